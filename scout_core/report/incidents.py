"""Giving one fault one incident: the same id and first step for as long as it goes on, a new one if it returns."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from scout_core.consensus.c3 import C3Status
from scout_core.replay.result import ReplayResult
from scout_core.report.fault_report import FaultKind, SCOUTFaultReport

Key = tuple[FaultKind, tuple[int, ...], str | None]


@dataclass(frozen=True, kw_only=True)
class _Open:
    incident_id: str
    first_seen_step: int | None


class IncidentBook:
    """Open incidents of one set of peers. Deterministic: peers that see the same results assign the same ids."""

    def __init__(self) -> None:
        self._open: dict[Key, _Open] = {}

    def assign(self, reports: list[SCOUTFaultReport], result: ReplayResult) -> list[SCOUTFaultReport]:
        """`reports` with incident ids and first steps; incidents whose surface is clean in `result` are closed."""
        for key in [key for key in self._open if self._is_over(key, result)]:
            del self._open[key]
        assigned = []
        for report in reports:
            key = (report.kind, report.ranks, report.surface)
            opened = self._open.setdefault(
                key, _Open(incident_id=_incident_id(report, result), first_seen_step=report.first_seen_step)
            )
            update = {"incident_id": opened.incident_id, "first_seen_step": opened.first_seen_step}
            assigned.append(report.model_copy(update=update))
        return assigned

    @staticmethod
    def _is_over(key: Key, result: ReplayResult) -> bool:
        kind, ranks, surface = key
        if kind is FaultKind.NUMERIC:
            return not result.nonfinite
        if kind is FaultKind.COMPUTE_STRAGGLER:
            return not set(ranks) & set(result.straggler_ranks)
        found = result.c3_results.get(surface or "")
        return found is not None and found.status is C3Status.AGREE


def _incident_id(report: SCOUTFaultReport, result: ReplayResult) -> str:
    text = f"{report.kind.value}|{report.ranks}|{report.surface}|{report.step}|{result.peer_ranks}"
    return xxhash.xxh3_128_hexdigest(text.encode())
