"""NVLink error counters and link states of one GPU, whichever interface its generation offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scout_core.health.nvml_api import Answer, NvmlApi
from scout_core.health.product import nvlink_expectation
from scout_core.health.types import NODE_WIDE, HealthReading, Metric, ReadingStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counter:
    """Where one counter is found: per-link field of NVLink 5, per-link field of NVLink 4, older per-link call."""

    metric: str
    nvlink5: str | None
    nvlink4: str | None
    call: str | None


# nvml.h: the DL_* fields are for Hopper and not offered by Blackwell, which has the COUNT_* fields instead. RCV_ERRORS
# (packets received with errors) is what NVLink 5 has in place of the CRC counter.
_COUNTERS = (
    _Counter(
        metric=Metric.NVLINK_RECOVERY,
        nvlink5="NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",
        nvlink4="NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY",
        call="NVML_NVLINK_ERROR_DL_RECOVERY",
    ),
    _Counter(
        metric=Metric.NVLINK_CRC,
        nvlink5="NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS",
        nvlink4="NVML_FI_DEV_NVLINK_ERROR_DL_CRC",
        call="NVML_NVLINK_ERROR_DL_CRC_FLIT",
    ),
    _Counter(
        metric=Metric.NVLINK_REPLAY,
        nvlink5=None,
        nvlink4="NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY",
        call="NVML_NVLINK_ERROR_DL_REPLAY",
    ),
    _Counter(
        metric=Metric.NVLINK_RECOVERY_FAILED,
        nvlink5="NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
        nvlink4=None,
        call=None,
    ),
)
_WAYS = ("nvlink5", "nvlink4", "call")


class LinkReader:
    """Reads the links of one open device. Learns once which interface answers, then asks only that."""

    def __init__(self, nvml: NvmlApi, handle: Any, device: str, name: str | None, node_gpus: int) -> None:
        self._nvml = nvml
        self._handle = handle
        self._device = device
        # A GPU alone on its node has nothing to link to: its links may rightly be down.
        self._expected = nvlink_expectation(name) if node_gpus > 1 else 0
        self._links: tuple[int, ...] | None = None
        self._way: dict[str, str] = {}

    def read(self) -> list[HealthReading]:
        if self._links is None:
            self._links = self._count_links()
        states = self._states(self._links)
        return [self._state_reading(states), *(self._counter_reading(counter) for counter in _COUNTERS)]

    def _count_links(self) -> tuple[int, ...] | None:
        most = self._nvml.constant("NVML_NVLINK_MAX_LINKS") or 18
        field = self._nvml.constant("NVML_FI_DEV_NVLINK_LINK_COUNT")
        if field is not None:
            (answer,) = self._nvml.ask_fields(self._handle, [(field, 0)])
            if answer.ok:
                return tuple(range(min(int(answer.value), most)))
            if answer.status is ReadingStatus.FAILED:
                return None
        found = []
        for link in range(most):
            if not self._nvml.ask("nvmlDeviceGetNvLinkState", self._handle, link).ok:
                break
            found.append(link)
        return tuple(found)

    def _states(self, links: Sequence[int] | None) -> list[Answer]:
        if links is None:
            return [Answer(status=ReadingStatus.FAILED, reason="the number of links could not be read")]
        return [self._nvml.ask("nvmlDeviceGetNvLinkState", self._handle, link) for link in links]

    def _state_reading(self, states: Sequence[Answer]) -> HealthReading:
        links = self._links or ()
        known = {link: answer for link, answer in zip(links, states, strict=False) if answer.ok}
        if not known:
            return self._absent(Metric.NVLINK_LINKS, states, "no NVLink")
        active = sum(1 for answer in known.values() if answer.value)
        return HealthReading(
            device=self._device,
            metric=Metric.NVLINK_LINKS,
            value=active,
            reason=NODE_WIDE if active == 0 and self._expected and not self._any_link_on_node() else "",
            parts={f"link {link}": int(answer.value != 0) for link, answer in known.items()},
            limit=float(self._expected),
        )

    def _any_link_on_node(self) -> bool:
        """Asked only when all own links are down: a dead endpoint and a dead fabric look alike from one GPU."""
        count = self._nvml.ask("nvmlDeviceGetCount")
        for index in range(int(count.value) if count.ok else 0):
            handle = self._nvml.ask("nvmlDeviceGetHandleByIndex", index)
            for link in self._links or ():
                state = self._nvml.ask("nvmlDeviceGetNvLinkState", handle.value, link) if handle.ok else handle
                if state.ok and state.value:
                    return True
        return False

    def _counter_reading(self, counter: _Counter) -> HealthReading:
        ways = [self._way[counter.metric]] if counter.metric in self._way else list(_WAYS)
        asked: list[Answer] = []
        for way in ways:
            asked = self._ask(counter, way)
            good = {f"link {n}": int(a.value) for n, a in zip(self._links or (), asked, strict=False) if a.ok}
            if good:
                self._way[counter.metric] = way
                return HealthReading(device=self._device, metric=counter.metric, value=sum(good.values()), parts=good)
            if any(answer.status is ReadingStatus.FAILED for answer in asked):
                break
        else:
            self._way.setdefault(counter.metric, "none")
        return self._absent(counter.metric, asked, "no counter of this kind")

    def _ask(self, counter: _Counter, way: str) -> list[Answer]:
        name: str | None = getattr(counter, way, None)
        constant = self._nvml.constant(name) if name is not None else None
        links = self._links or ()
        if constant is None or not links:
            return []
        if way == "call":
            return [self._nvml.ask("nvmlDeviceGetNvLinkErrorCounter", self._handle, link, constant) for link in links]
        return self._nvml.ask_fields(self._handle, [(constant, link) for link in links])

    def _absent(self, metric: str, answers: Sequence[Answer], reason: str) -> HealthReading:
        failed = next((answer for answer in answers if answer.status is ReadingStatus.FAILED), None)
        refused = next((answer for answer in answers if not answer.ok), None)
        shown = failed or refused
        return HealthReading(
            device=self._device,
            metric=metric,
            status=ReadingStatus.FAILED if failed else ReadingStatus.UNSUPPORTED,
            reason=shown.reason if shown else reason,
        )
