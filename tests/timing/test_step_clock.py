"""The clock of live steps: what it hands over, and that its hooks change nothing."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scout_core.config import ReplayHarnessConfig
from scout_core.peers import PeerGroup
from scout_core.timing import step_clock
from scout_core.timing.live import LivePace, LiveSteps, LiveWatch, crowding_explains
from scout_core.timing.live_groups import LiveGroups
from scout_core.timing.pace import PaceFinding, PaceKind
from scout_core.timing.step_clock import GroupCall, Pace, StepClock

MS = 1_000_000
values = st.none() | st.floats(min_value=0, max_value=1e7)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that the test turns, in ns; the thread never has a core of its own to run on."""
    moment = [0]
    monkeypatch.setattr(step_clock.time, "perf_counter_ns", lambda: moment[0])
    monkeypatch.setattr(step_clock.time, "thread_time_ns", lambda: 0)
    return moment


@given(values, values, values, values)
def test_a_word_holds_an_observation_within_a_thousandth(
    own: float | None, loader: float | None, tokens: float | None, wait: float | None
) -> None:
    pace = Pace(own_ms=own, loader_ms=loader, tokens=tokens, core_wait_ms=wait)
    word = pace.encode()
    assert -(1 << 63) <= word < 1 << 63
    back = Pace.decode(word)
    for name, unit in (("own_ms", 1e-3), ("loader_ms", 1e-3), ("tokens", 1.0), ("core_wait_ms", 1e-3)):
        given_value, found = getattr(pace, name), getattr(back, name)
        assert (given_value is None) == (found is None)
        if given_value is not None:
            assert found == pytest.approx(given_value, rel=1e-3, abs=1e-3 * unit)


def run_step(clock: StepClock, now: list[int], number: int, own_ms: int, *, wait_ms: int = 0, load_ms: int = 0) -> None:
    clock.begin()
    now[0] += own_ms * MS
    for milliseconds, told in ((wait_ms, clock.waited), (load_ms, clock.loaded)):
        since = clock.mark()
        now[0] += milliseconds * MS
        if milliseconds:
            told(since)
    clock.end(number)


def test_waiting_in_collectives_is_no_time_of_its_own_and_waiting_for_data_is(now: list[int]) -> None:
    clock = StepClock(torch.device("cpu"), 2, lambda: 0)
    run_step(clock, now, 1, 10, wait_ms=90)
    clock.begin()
    clock.count(12)
    clock.end(2)
    first, second = (Pace.decode(word) for word in clock.words(2))
    run_step(clock, now, 3, 10, load_ms=5)
    clock.begin()
    clock.spoil()  # an evaluation in it
    clock.end(4)
    assert first.own_ms == pytest.approx(10, rel=1e-3) and first.tokens is None
    assert second.tokens == pytest.approx(12, rel=1e-3)
    third, fourth = (Pace.decode(word) for word in clock.words(4))
    assert third.own_ms == pytest.approx(15, rel=1e-3) and third.loader_ms == pytest.approx(5, rel=1e-3)
    assert fourth.own_ms is None


def test_waiting_for_a_core_is_set_apart_but_never_more_than_the_thread_stood_still(now: list[int]) -> None:
    delay = [0]
    clock = StepClock(torch.device("cpu"), 1, lambda: delay[0])
    clock.begin()
    now[0] += 10 * MS
    delay[0] += 4 * MS
    clock.end(1)
    assert Pace.decode(clock.words(1)[0]).own_ms == pytest.approx(6, rel=1e-3)
    clock.begin()
    since = clock.mark()
    now[0] += 50 * MS
    delay[0] += 50 * MS  # it woke late in a collective
    clock.waited(since)
    now[0] += 10 * MS
    clock.end(2)
    seen = Pace.decode(clock.words(2)[0])
    assert seen.own_ms is not None and seen.core_wait_ms is not None
    assert seen.own_ms + seen.core_wait_ms == pytest.approx(10, rel=1e-3)


@pytest.mark.parametrize("interval", [1, 7, 64, 65, 1000])
def test_every_step_is_judged_once_whatever_the_interval(now: list[int], interval: int) -> None:
    config = ReplayHarnessConfig(live_observation_ms=0)
    clocks = [StepClock(torch.device("cpu"), interval, lambda: 0) for _ in range(3)]
    judges = [LivePace(clock, config) for clock in clocks]
    steps, last = 3 * interval + 5, None
    for number in range(1, steps + 1):
        for rank, clock in enumerate(clocks):
            run_step(clock, now, number, 100 if rank == 1 else 50)
        if number % interval == 0:
            rows = [judge.words(number) for judge in judges]
            assert len(rows[0]) <= step_clock.MOST_OBSERVATIONS
            verdicts = [judge.judge(number, rows) for judge in judges]
            assert verdicts[0] is not None and verdicts == [verdicts[0]] * 3
            assert verdicts[0].own_ms == pytest.approx((50, 100, 50), rel=1e-3)
            assert last is None or verdicts[0].step > last
            last = verdicts[0].step
    assert judges[0].judge(steps - 5, [judge.words(steps - 5) for judge in judges]) is None  # seen before


@pytest.mark.parametrize(("own_ms", "found"), [(5, False), (60, True)])
def test_what_passes_in_a_second_is_not_told_however_many_steps_it_takes(
    now: list[int], own_ms: int, found: bool
) -> None:
    """A rank takes twice as long for 100 steps: 1 s or 12 s. Nobody knows of a wait for a core."""
    config = ReplayHarnessConfig(check_interval=10)
    clocks = [StepClock(torch.device("cpu"), 10, lambda: 0) for _ in range(3)]
    judges = [LivePace(clock, config) for clock in clocks]
    named: set[int] = set()
    seen = []
    for number in range(1, 4501):
        for rank, clock in enumerate(clocks):
            run_step(clock, now, number, own_ms * (2 if rank == 1 and 4101 <= number <= 4200 else 1))
        if number % 10 == 0:
            verdict = judges[0].judge(number, [judge.words(number) for judge in judges])
            if verdict is not None:
                seen.append(verdict.step)
                named |= {finding.position for finding in verdict.findings}
    assert named == ({1} if found else set())
    assert seen == sorted(seen) and seen[-1] > 4450 and len(seen) > 440  # a judgement stands until the next one


def test_hooks_change_no_bit_and_count_tokens_of_training_alone() -> None:
    class Counted(StepClock):
        counted = 0

        def count(self, tokens: int) -> None:
            self.counted += tokens

    def gradients(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        clock = Counted(torch.device("cpu"), 1, lambda: 0)
        watch = LiveWatch(model, clock) if watched else None
        clock.begin()
        model(torch.arange(6)).square().sum().backward()
        model.eval()(torch.arange(6))
        clock.end(1)
        if watch is not None:
            assert clock.counted == 6 and Pace.decode(clock.words(1)[0]).own_ms is not None
            watch.close()
            assert not model._forward_hooks and not model._forward_pre_hooks
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(torch.equal(one, other) for one, other in zip(gradients(True), gradients(False), strict=True))


class Event:
    """A CUDA event of a device whose clock the test turns."""

    made = 0
    moment = 0.0
    alive: ClassVar[weakref.WeakSet[Event]] = weakref.WeakSet()

    def __init__(self, enable_timing: bool) -> None:
        type(self).made += 1
        self.alive.add(self)

    def record(self) -> None:
        self.at = type(self).moment

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


@pytest.mark.parametrize(("spans", "timed"), [(64, 32), (65, 17), (200, 9)])
def test_on_a_gpu_steps_of_many_spans_are_timed_now_and_then(
    monkeypatch: pytest.MonkeyPatch, spans: int, timed: int
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "main")
    monkeypatch.setattr(Event, "made", 0)
    clock = StepClock(torch.device("cuda"), 32, lambda: 0)
    for number in range(1, 33):
        clock.begin()
        Event.moment += 10.0
        for _ in range(spans):
            since = clock.mark()
            Event.moment += 1.0
            clock.waited(since, GroupCall((0, 1), 7, "all_reduce", 8))
        clock.end(number)
    assert Event.made == timed * 2 * (spans + 1)
    paces = [Pace.decode(word) for word in clock.words(32)]
    assert {round(pace.own_ms) for pace in paces if pace.own_ms is not None} == {10}
    assert [ms for _, ms in clock.collectives(32)] == [1.0]
    assert len(Event.alive) <= 3 * 2 * (spans + 1), "of steps that are over numbers are kept, and no events"


def test_what_runs_on_another_stream_or_thread_goes_on_beside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ["main"]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream[0])
    clock = StepClock(torch.device("cuda"), 4, lambda: 0)

    def collective() -> None:
        since = clock.mark()
        Event.moment += 5.0
        clock.waited(since, GroupCall((0, 1), 7, "all_reduce", 8))

    for number in range(1, 9):
        clock.begin()
        collective()
        stream[0] = "all-gather"
        collective()
        stream[0] = "main"
        thread = threading.Thread(target=collective)
        thread.start()
        thread.join()
        clock.end(number)
    assert {round(Pace.decode(word).own_ms or 0) for word in clock.words(8)} == {10}


def test_a_step_that_several_checks_hear_of_counts_once() -> None:
    config = ReplayHarnessConfig(check_interval=1, straggler_absolute_ms=1)
    peers = [PeerGroup(ranks=(0, 1, 2, 3), rank=rank, control=None) for rank in range(4)]
    alone = [PeerGroup(ranks=(rank,), rank=rank, control=None) for rank in range(4)]
    calls = [GroupCall(pair, 10 + i, "all_reduce", 100) for i, pair in enumerate([(0, 1), (0, 2), (2, 3)])]
    jobs = []
    for rank in range(4):
        clock = StepClock(torch.device("cpu"), 1, lambda: 0)
        jobs.append((clock, LiveSteps(clock, config, LiveGroups(peers[rank], alone[rank], [(0, 1, 2, 3)], config))))

    def check(step: int, slow: bool, times: int = 1) -> None:
        for rank, (clock, _) in enumerate(jobs):
            clock.begin()
            for call in calls:
                if rank in call.ranks:
                    clock.waited(time.perf_counter_ns() - (50 if slow and 0 in call.ranks else 5) * MS, call)
            clock.end(step)
        for _ in range(times):
            rows = [live.words(step) for _, live in jobs]
            for _, live in jobs:
                live.judge(step, rows, asked=False)

    for step in range(1, 13):
        check(step, slow=False)
    check(13, slow=True, times=6)
    assert {(live.groups.found or {}).get("rank") for _, live in jobs} == {None}
    check(14, slow=True)
    check(15, slow=True)
    assert {(live.groups.found or {}).get("rank") for _, live in jobs} == {0}


@pytest.mark.parametrize("onset", [40, 300])
def test_partners_know_what_is_usual_however_long_nothing_was_slow(monkeypatch: pytest.MonkeyPatch, onset: int) -> None:
    """Two columns of two replicas; from `onset` on all collectives of rank 2 are slow. Partners talk when asked."""
    config = ReplayHarnessConfig(check_interval=1, straggler_absolute_ms=1)
    columns, rows = ((0, 2), (1, 3)), ((0, 1), (2, 3))
    peers = [PeerGroup(ranks=columns[rank % 2], rank=rank, control=None) for rank in range(4)]
    partners: list[Any] = [PeerGroup(ranks=rows[rank // 2], rank=rank, control=rank // 2) for rank in range(4)]
    jobs = [LiveGroups(peers[rank], partners[rank], columns, config) for rank in range(4)]
    told: dict[int, Any] = {}

    def gather(into: list[Any], own: Any, group: int) -> None:
        into[:] = [told[rank] for rank in rows[group]]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    calls = [GroupCall(ranks, 10 + i, "all_reduce", 100) for i, ranks in enumerate((*columns, *rows))]
    talked = 0
    for check in range(onset + 5):
        words = []
        for rank, job in enumerate(jobs):
            own = [(c, 50.0 if check >= onset and 2 in c.ranks else 5.0) for c in calls if rank in c.ranks]
            words.append(job.words(own))
        asked = {rank: any(jobs[one].wants for one in partners[rank].ranks) for rank in range(4)}
        for rank, job in enumerate(jobs):
            job.hear([words[peer] for peer in peers[rank].ranks])
            told[rank] = (job._heard, job._hosts)
        talked += any(asked.values())
        for rank, job in enumerate(jobs):
            if asked[rank]:
                job.exchange()
        for job in jobs:
            job.judge()
    assert {(job.found or {}).get("rank") for job in jobs} == {2}
    assert talked < 20, "only while usual times are learned and when something is slow"


@pytest.mark.parametrize(
    ("kind", "own_ms", "share", "excess", "crowded"),
    [
        ("compute_straggler", 23.5, 0.29, 4.0, False),  # it sleeps, and waits a little whenever it wakes
        ("compute_straggler", 30.0, 0.5, 0.5, True),
        ("data_imbalance", 30.0, 0.5, 0.5, False),
    ],
)
def test_a_crowded_host_is_the_cause_of_what_its_waits_explain(
    kind: PaceKind, own_ms: float, share: float, excess: float, crowded: bool
) -> None:
    finding = PaceFinding(kind=kind, position=1, onset_step=3, excess=excess, reason="")
    assert crowding_explains(finding, own_ms, [0.01, share, 0.02]) is crowded
