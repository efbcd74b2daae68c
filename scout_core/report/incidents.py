"""Giving one fault one incident: the same id and first step for as long as it goes on, a new one if it returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from scout_core.consensus.c3 import C3Status
from scout_core.replay.result import ReplayResult
from scout_core.report.fault_report import FaultKind, SCOUTFaultReport
from scout_core.report.live_reports import KINDS

_PASSING = frozenset({*KINDS.values(), FaultKind.COMMUNICATION_STRAGGLER})
"""Slowness of some kind, which is over when it has not been seen for a while: it shows on no surface."""

Key = tuple[FaultKind, tuple[int, ...], str | None]

_QUIET_CHECKS = 2
"""Checks in a row without a slow rank that end its incident: as many as begin one. A peer's hiccup hides it for one."""


@dataclass(kw_only=True)
class _Open:
    """`surfaces` are those on which it was seen and that have not been clean since, `quiet` the checks without it."""

    incident_id: str
    first_seen_step: int | None
    quiet: int = 0
    surfaces: set[str] = field(default_factory=set)


class IncidentBook:
    """Open incidents of one set of peers. Deterministic: peers that see the same results assign the same ids."""

    def __init__(self) -> None:
        self._open: dict[Key, _Open] = {}

    def assign(self, reports: list[SCOUTFaultReport], result: ReplayResult) -> list[SCOUTFaultReport]:
        """`reports` with incident ids and first steps.

        A fault of a rank is one incident whichever of its surfaces this check happened to cover; it is over once every
        surface on which it showed has been found clean, a slow rank's after two checks in a row in which it was not
        slow. Incidents that `result` shows to be over are closed first.
        """
        for key, incident in list(self._open.items()):
            incident.quiet += 1
            incident.surfaces -= {name for name in incident.surfaces if _clean(name, result)}
            if _is_over(key, incident, result):
                del self._open[key]
        assigned = []
        for report in reports:
            incident = self._open.setdefault(
                _key(report),
                _Open(incident_id=_incident_id(report, result), first_seen_step=report.first_seen_step),
            )
            incident.quiet = 0
            incident.surfaces |= {name for name in (report.surface, *report.evidence.get("also", ())) if name}
            update = {"incident_id": incident.incident_id, "first_seen_step": incident.first_seen_step}
            assigned.append(report.model_copy(update=update))
        return assigned


def _key(report: SCOUTFaultReport) -> Key:
    """A named rank's fault is one thing; where nobody is named, each surface is."""
    return report.kind, report.ranks, None if report.ranks else report.surface


def _is_over(key: Key, incident: _Open, result: ReplayResult) -> bool:
    kind, ranks, _ = key
    if kind is FaultKind.NUMERIC:
        return not result.nonfinite
    if kind is FaultKind.COMMUNICATION_STRAGGLER and result.cross_pg_result is not None:
        return False  # groups are still slow: only what else is healthy was unclear at this check
    if kind in _PASSING:
        return incident.quiet >= _QUIET_CHECKS and not set(ranks) & set(result.straggler_ranks)
    return not incident.surfaces


def _clean(surface: str, result: ReplayResult) -> bool:
    found = result.c3_results.get(surface)
    return found is not None and found.status is C3Status.AGREE


def _incident_id(report: SCOUTFaultReport, result: ReplayResult) -> str:
    text = f"{report.kind.value}|{report.ranks}|{report.surface}|{report.step}|{result.peer_ranks}"
    return xxhash.xxh3_128_hexdigest(text.encode())
