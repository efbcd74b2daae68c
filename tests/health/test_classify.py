"""The classifier as a pure function: random sequences, and the rules one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scout_core.health import (
    DeviceSample,
    HealthConfig,
    HealthEvent,
    HealthHistory,
    HealthReading,
    HealthSeverity,
    Metric,
    ReadingStatus,
    classify,
)
from scout_core.health.history import CounterTrack, advance

CONFIG = HealthConfig()
DEVICES = ("GPU-a", "GPU-b", "GPU-c")

# Every metric with values from harmless to deadly to nonsense. A value of None means 'no value'.
COUNTERS = (
    Metric.ECC_UNCORRECTABLE,
    Metric.ECC_CORRECTABLE,
    Metric.SRAM_UNCORRECTABLE,
    Metric.NVLINK_RECOVERY,
    Metric.NVLINK_CRC,
    Metric.NVLINK_REPLAY,
    Metric.NVLINK_RECOVERY_FAILED,
)
nonsense = st.sampled_from([-1, float("nan"), float("inf"), 2**32 - 1, 2**64 - 1, 2**70, "x", None, True, b"\x00"])
values: dict[str, st.SearchStrategy[Any]] = {
    **{metric: st.integers(0, 20_000) | st.integers(0, 3) | nonsense for metric in COUNTERS},
    Metric.REMAP_FAILURE: st.sampled_from([0, 1, 7, None]),
    Metric.REMAP_PENDING: st.sampled_from([0, 1]),
    Metric.TEMPERATURE: st.integers(20, 110) | nonsense,
    Metric.TEMPERATURE_SHUTDOWN: st.sampled_from([90, 95, 0, None]),
    Metric.RECOVERY_ACTION: st.integers(0, 9),
    Metric.CLOCK_EVENTS: st.integers(0, 0x1FF) | nonsense,
    Metric.UTILIZATION: st.integers(0, 100),
    Metric.PRESENCE: st.sampled_from(["present", "present", "lost", "unreachable", "unavailable", "??"]),
    Metric.NVLINK_LINKS: st.integers(0, 6),
    Metric.PCIE_WIDTH: st.sampled_from([8, 16]),
    Metric.XID: st.sampled_from([13, 31, 45, 48, 62, 63, 79, 94, 95, 144, 9999]) | nonsense,
    "custom.metric": st.integers(0, 3),
}
statuses = st.sampled_from([*[ReadingStatus.OK] * 5, *ReadingStatus])


@st.composite
def readings(draw: st.DrawFn, device: str, only: Sequence[ReadingStatus] | None = None) -> HealthReading:
    metric = draw(st.sampled_from(sorted(values)))
    return HealthReading(
        device=device,
        metric=metric,
        value=draw(values[metric]),
        status=draw(st.sampled_from(only) if only else statuses),
        limit=6.0 if metric == Metric.NVLINK_LINKS else 16.0,
        parts=draw(st.just({}) | st.just({"link 0": draw(st.integers(0, 9000))})) if metric in COUNTERS else {},
        occurred_s=draw(st.sampled_from([None, 0.0, 5.0, 100.0, 101.0, 140.0])),
        sequence=draw(st.sampled_from([None, 1, 2, 3])),
        severity=draw(st.sampled_from([None, *HealthSeverity])) if metric == "custom.metric" else None,
    )


@st.composite
def rounds(draw: st.DrawFn, only: Sequence[ReadingStatus] | None = None) -> list[list[DeviceSample]]:
    length = draw(st.integers(1, 6))
    result = []
    for number in range(length):
        present = draw(st.sets(st.sampled_from(DEVICES)))
        result.append(
            [
                DeviceSample(
                    device=device,
                    time_s=100.0 + 10.0 * number,
                    readings=tuple(draw(st.lists(readings(device, only), max_size=4))),
                    source="s",
                )
                for device in sorted(present)
            ]
        )
    return result


def run(sequence: Sequence[Sequence[DeviceSample]], config: HealthConfig = CONFIG) -> list[list[HealthEvent]]:
    history = HealthHistory(started_s=50.0)
    told: list[list[HealthEvent]] = []
    for samples in sequence:
        judgement = classify(samples, history, config)
        history = judgement.history
        told.append(list(judgement.events))
    return told


def keys(told: Sequence[Sequence[HealthEvent]]) -> list[tuple[str, str]]:
    return [event.key for events in told for event in events if event.severity is HealthSeverity.FATAL]


def check_each_fatal_once(sequence: list[list[DeviceSample]]) -> None:
    fatal = keys(run(sequence))
    assert len(fatal) == len(set(fatal))


def check_order_does_not_matter(sequence: list[list[DeviceSample]]) -> None:
    assert run(sequence) == run([list(reversed(samples)) for samples in sequence])


def check_devices_do_not_mix(sequence: list[list[DeviceSample]]) -> None:
    """Apart from the two questions that are about all devices at once, each device alone gives the same."""
    across = (Metric.PRESENCE, Metric.NVLINK_LINKS)
    cleaned = [
        [
            DeviceSample(
                device=sample.device,
                time_s=sample.time_s,
                source=sample.source,
                readings=tuple(r for r in sample.readings if r.metric not in across),
            )
            for sample in samples
        ]
        for samples in sequence
    ]
    together = [event for events in run(cleaned) for event in events]
    for device in DEVICES:
        alone = run([[sample for sample in samples if sample.device == device] for samples in cleaned])
        assert [event for events in alone for event in events] == [e for e in together if e.device == device]


def check_absent_data_accuses_nobody(sequence: list[list[DeviceSample]]) -> None:
    assert keys(run(sequence)) == []


def check_baseline_accuses_nobody(sequence: list[list[DeviceSample]]) -> None:
    """Counters that stand still, at whatever value and with whatever gaps, are not this job's errors."""
    first: dict[tuple[str, str], HealthReading] = {}
    frozen = []
    for samples in sequence:
        frozen.append(
            [
                DeviceSample(
                    device=sample.device,
                    time_s=sample.time_s,
                    source=sample.source,
                    readings=tuple(
                        replace(first.setdefault((r.device, r.metric), r), status=r.status)
                        for r in sample.readings
                        if r.metric in COUNTERS
                    ),
                )
                for sample in samples
            ]
        )
    assert [e for events in run(frozen) for e in events if e.metric != Metric.TELEMETRY_STALE] == []


def check_new_errors_are_told_exactly_once(sequence: list[list[DeviceSample]]) -> None:
    """The counters of `sequence` made to rise by their own values: a rise is an alarm, and only a rise."""
    sums: dict[str, int] = {}
    seen: dict[str, list[int]] = {}
    rising: list[list[DeviceSample]] = []
    for samples in sequence:
        row: list[DeviceSample] = []
        rising.append(row)
        for sample in samples:
            step = len(sample.readings) // 3
            sums[sample.device] = sums.get(sample.device, 40) + step
            reading = HealthReading(
                device=sample.device,
                metric=Metric.ECC_UNCORRECTABLE,
                value=sums[sample.device],
                status=sample.readings[0].status if sample.readings else ReadingStatus.OK,
            )
            if reading.status is ReadingStatus.OK:
                seen.setdefault(sample.device, []).append(sums[sample.device])
            row.append(replace(sample, readings=(reading,)))
    expected = {(device, Metric.ECC_UNCORRECTABLE) for device, values in seen.items() if values[-1] > values[0]}
    assert sorted(keys(run(rising))) == sorted(expected)


ABSENT = [ReadingStatus.UNSUPPORTED, ReadingStatus.FAILED, ReadingStatus.STALE]
CHECKS = [
    (check_each_fatal_once, None),
    (check_order_does_not_matter, None),
    (check_devices_do_not_mix, None),
    (check_absent_data_accuses_nobody, ABSENT),
    (check_baseline_accuses_nobody, None),
    (check_new_errors_are_told_exactly_once, None),
]


@pytest.mark.parametrize(("check", "only"), CHECKS, ids=[check.__name__ for check, _ in CHECKS])
def test_random_sequences(check: Any, only: list[ReadingStatus] | None) -> None:
    settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))(given(rounds(only))(check))()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_random_sequences() -> None:
    """Every property of every sequence; its absent form has the same readings without any that answered."""

    def check_all(sequence: list[list[DeviceSample]]) -> None:
        for check, only in CHECKS:
            check(sequence if only is None else without_answers(sequence))

    settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))(given(rounds())(check_all))()


def without_answers(sequence: list[list[DeviceSample]]) -> list[list[DeviceSample]]:
    def silent(number: int, reading: HealthReading) -> HealthReading:
        return replace(reading, status=ABSENT[number % len(ABSENT)])

    return [
        [replace(sample, readings=tuple(silent(n, r) for n, r in enumerate(sample.readings))) for sample in samples]
        for samples in sequence
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=20))
def test_a_counter_that_only_rises_grows_by_exactly_the_rise(steps: list[int]) -> None:
    track: CounterTrack | None = None
    value = 7
    for number, step in enumerate(steps):
        value += step
        track = advance(track, value, float(number), 60.0)
    assert track is not None
    assert track.total == sum(steps[1:])


@pytest.mark.parametrize(
    ("sequence", "total"),
    [
        ([5, 5, 5], 0),
        ([5, 0, 5], 0),
        ([5, 0, 0, 1], 1),
        ([5, 0, 1], 1),
        ([5, 6, 0, 0, 0], 1),
        ([0, 1, 1], 1),
    ],
)
def test_a_counter_that_fell_is_believed_when_seen_twice(sequence: list[int], total: int) -> None:
    track: CounterTrack | None = None
    for number, value in enumerate(sequence):
        track = advance(track, value, float(number), 60.0)
    assert track is not None
    assert track.total == total


def test_growth_is_forgotten_after_the_window_and_memory_is_bounded() -> None:
    track = advance(None, 0, 0.0, 60.0)
    for tick in range(1, 20_000):
        track = advance(track, tick, tick * 0.01, 60.0)
    assert len(track.recent) <= 33
    assert track.within_window() == pytest.approx(6000, rel=0.05)
    assert advance(track, track.last, 1000.0, 60.0).within_window() == 0


def sample(time_s: float, *readings: HealthReading) -> DeviceSample:
    return DeviceSample(device="GPU-a", time_s=time_s, readings=readings, source="s")


def ok(metric: str, value: Any, **more: Any) -> HealthReading:
    return HealthReading(device="GPU-a", metric=metric, value=value, **more)


def told(*samples: DeviceSample, config: HealthConfig = CONFIG) -> list[tuple[str, str]]:
    return [(e.severity.value, e.metric) for events in run([[s] for s in samples], config) for e in events]


def test_temperature_near_shutdown_is_fatal_and_further_off_a_warning() -> None:
    limit = ok(Metric.TEMPERATURE_SHUTDOWN, 95)
    assert told(sample(0, limit, ok(Metric.TEMPERATURE, 86))) == []
    assert told(sample(0, limit, ok(Metric.TEMPERATURE, 87))) == [("warning", Metric.SHUTDOWN_MARGIN)]
    assert told(sample(0, limit, ok(Metric.TEMPERATURE, 93))) == [("fatal", Metric.SHUTDOWN_MARGIN)]


def test_t_limit_counts_from_its_own_value_at_shutdown() -> None:
    end = ok(Metric.TLIMIT_SHUTDOWN, -8)
    assert told(sample(0, end, ok(Metric.TLIMIT_MARGIN, 1))) == []
    assert told(sample(0, end, ok(Metric.TLIMIT_MARGIN, -1))) == [("warning", Metric.SHUTDOWN_MARGIN)]
    assert told(sample(0, end, ok(Metric.TLIMIT_MARGIN, -6))) == [("fatal", Metric.SHUTDOWN_MARGIN)]


def test_a_warning_lasts_until_its_reading_says_otherwise_and_then_can_come_again() -> None:
    pending, clear = ok(Metric.REMAP_PENDING, 1), ok(Metric.REMAP_PENDING, 0)
    gone = ok(Metric.REMAP_PENDING, None, status=ReadingStatus.FAILED)
    warning = ("warning", Metric.REMAP_PENDING)
    assert told(*(sample(t, pending) for t in range(5))) == [warning]
    assert told(sample(0, pending), sample(1, gone), sample(2, pending)) == [warning]
    assert told(sample(0, pending), sample(1, clear), sample(2, pending)) == [warning, warning]


def test_link_errors_warn_then_alarm_by_growth_within_the_window_and_name_the_links() -> None:
    def crc(time_s: float, one: int, two: int) -> DeviceSample:
        return sample(time_s, ok(Metric.NVLINK_CRC, one + two, parts={"link 1": one, "link 2": two}))

    slow = [crc(10.0 * i, 100 + 900 * i, 5) for i in range(12)]
    assert told(*slow) == [("warning", Metric.NVLINK_CRC)]
    fast = run([[crc(10.0 * i, 100, 5 + 3000 * i)] for i in range(6)])
    fatal = [event for events in fast for event in events if event.severity is HealthSeverity.FATAL]
    assert [event.metric for event in fatal] == [Metric.NVLINK_CRC]
    assert list(fatal[0].evidence["growth_by_link"]) == ["link 2"]


def test_a_link_that_stops_answering_takes_no_errors_back_and_invents_none() -> None:
    both = ok(Metric.NVLINK_CRC, 50_010, parts={"link 1": 50_000, "link 2": 10})
    one = ok(Metric.NVLINK_CRC, 10, parts={"link 2": 10})
    assert told(sample(0, both), sample(1, one), sample(2, both), sample(3, one), sample(4, one), sample(5, both)) == []


def test_one_poll_of_silence_is_not_believed() -> None:
    present, silent = (
        ok(Metric.PRESENCE, "present"),
        ok(Metric.PRESENCE, "unreachable", parts={"siblings_answering": 3}),
    )
    flicker = [sample(t, silent if t % 2 else present) for t in range(9)]
    assert told(*flicker) == []
    assert told(sample(0, present), sample(1, silent), sample(2, silent), sample(3, silent)) == [
        ("fatal", Metric.PRESENCE)
    ]


def test_a_configured_xid_is_fatal_and_then_only_that_one() -> None:
    config = HealthConfig(fatal_xids=frozenset({13}))
    events = [ok(Metric.XID, code, occurred_s=100.0 + i * 60, sequence=i) for i, code in enumerate([79, 13])]
    assert told(sample(200, *events), config=config) == [("warning", "xid.79"), ("fatal", "xid.13")]


def test_a_graver_xid_in_the_same_burst_is_told_too() -> None:
    events = [ok(Metric.XID, code, occurred_s=100.0 + i, sequence=i) for i, code in enumerate([94, 95, 45, 94])]
    assert told(sample(200, *events)) == [("fatal", "xid.94"), ("fatal", "xid.95"), ("info", "xid.45")]


def test_running_into_the_boards_own_power_limit_is_how_a_busy_gpu_looks() -> None:
    full = [ok(Metric.CLOCK_EVENTS, 0x04), ok(Metric.POWER_LIMIT, 700.0), ok(Metric.POWER_DEFAULT, 700.0)]
    assert told(sample(0, *full)) == []


def test_a_custom_sources_own_severity_counts_for_metrics_that_are_not_ours() -> None:
    port = ok("ib.port_down", 1, severity=HealthSeverity.FATAL, reason="mlx5_0 port 1 is down")
    assert told(sample(0, port), sample(1, port)) == [("fatal", "ib.port_down")]
    overreaching = ok(Metric.TEMPERATURE, 30, severity=HealthSeverity.FATAL)
    assert told(sample(0, overreaching)) == []


def test_thresholds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="warning comes before the alarm"):
        HealthConfig(fatal_temperature_margin_c=10, warning_temperature_margin_c=5)
