"""From the event log of a run to the incidents in it, for people. Pure but for `read_log`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from scout_core.doctor.findings import count, rank_text
from scout_core.report import SCOUTFaultReport
from scout_core.report.health_reports import with_hardware_cause

_GRAVITY = ("fatal", "warning", "info")
_LONGEST = 200
_CLEARS = {
    "agreeing_ranks": "agree with one another bit for bit",
    "finite_ranks": "had finite values",
    "not_slow": "were not slow",
    "present_ranks": "came to the check",
}
_ACTIONS = {
    "continue": "continue: nothing to do",
    "observe": "observe: go on, and act if it recurs",
    "restart": "restart from a trusted checkpoint",
    "restart_excluding": "restart from a trusted checkpoint without {who}",
    "stop": "stop: no rank can be excluded; look at the evidence before training on",
}


@dataclass(frozen=True, kw_only=True)
class EventRecords:
    """The records of a log, by type. `unreadable` are line numbers (from 1) that no record could be made of."""

    reports: tuple[SCOUTFaultReport, ...]
    checks: tuple[Mapping[str, Any], ...]
    decisions: tuple[Mapping[str, Any], ...]
    others: Mapping[str, int]
    unreadable: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Incident:
    """All reports of one fault: the newest one, how many there were, and the steps they span."""

    report: SCOUTFaultReport
    times: int
    first_step: int | None
    last_step: int | None

    @property
    def who(self) -> str:
        """The ranks at fault with host and device, or that none is blamed."""
        report = self.report
        if not report.ranks:
            places = [*report.hosts, *report.devices]
            return ", ".join(places) if places else "no rank is blamed"
        text = rank_text(report.ranks)
        known = [*dict.fromkeys(report.hosts), *dict.fromkeys(report.devices)]
        return f"{text} ({', '.join(known)})" if known else text

    @property
    def when(self) -> str:
        """`step 20`, or `steps 20-60, 3 reports`."""
        if self.first_step is None or self.last_step is None:
            steps = "no step"
        elif self.first_step == self.last_step:
            steps = f"step {self.first_step}"
        else:
            steps = f"steps {self.first_step}-{self.last_step}"
        return steps if self.times == 1 else f"{steps}, {count(self.times, 'report')}"

    @property
    def action(self) -> str:
        """The recommended action in words."""
        who = rank_text(self.report.ranks) if self.report.ranks else "the device at fault"
        return _ACTIONS[self.report.recommended_action].format(who=who)

    def to_json(self) -> dict[str, Any]:
        """The newest report with the span of the incident, as a plain dict."""
        span = {"times": self.times, "first_step": self.first_step, "last_step": self.last_step}
        return {**self.report.model_dump(mode="json"), **span}


def log_path(target: Path) -> Path:
    """The event log that `target`, a run's folder or the file itself, stands for."""
    return target / "events.jsonl" if target.is_dir() else target


def read_log(path: Path) -> EventRecords:
    """Read an event log. A torn or foreign line is only counted. Raises `OSError` when the file cannot be read."""
    return parse_log(path.read_text(encoding="utf-8", errors="replace").splitlines())


def parse_log(lines: Sequence[str]) -> EventRecords:
    """The records of these lines."""
    reports: list[SCOUTFaultReport] = []
    plain: dict[str, list[Mapping[str, Any]]] = {"check": [], "RecoveryDecision": []}
    others: Counter[str] = Counter()
    unreadable = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            kind = record["type"]
            if kind == "SCOUTFaultReport":
                reports.append(SCOUTFaultReport.model_validate(record))
            elif kind in plain:
                plain[kind].append(record)
            else:
                others[str(kind)] += 1
        except (json.JSONDecodeError, ValidationError, KeyError, TypeError):
            unreadable.append(number)
    return EventRecords(
        reports=tuple(reports),
        checks=tuple(plain["check"]),
        decisions=tuple(plain["RecoveryDecision"]),
        others=dict(others),
        unreadable=tuple(unreadable),
    )


def incidents(reports: Sequence[SCOUTFaultReport]) -> tuple[Incident, ...]:
    """One incident per id, gravest first, then in the order of their first report. The newest report speaks for it.

    A slow rank whose hardware told of a reason is shown with that reason.
    """
    grouped: dict[str, list[SCOUTFaultReport]] = {}
    for report in reports:
        grouped.setdefault(report.incident_id, []).append(report)
    found = []
    for same in grouped.values():
        steps = [s for report in same for s in (report.first_seen_step, report.step) if s is not None]
        found.append(
            Incident(
                report=with_hardware_cause(same[-1], reports),
                times=len(same),
                first_step=min(steps, default=None),
                last_step=max(steps, default=None),
            )
        )
    return tuple(sorted(found, key=lambda incident: _GRAVITY.index(incident.report.severity)))


def evidence_lines(report: SCOUTFaultReport) -> list[str]:
    """What accuses, one line each: signatures grouped by value, times by rank, the rest as it is."""
    evidence = dict(report.evidence)
    ranks = evidence.pop("peer_ranks", None)
    ranks = ranks if isinstance(ranks, list) else []
    lines = [f"{name}: {_grouped(ranks, values)}" for name, values in _table(evidence.pop("signatures", None))]
    lines += [f"{name}: {_by_rank(ranks, values, ' ms')}" for name, values in _table(evidence.pop("times_ms", None))]
    for key in ("differing_elements", "largest_difference"):
        values = evidence.pop(key, None)
        if isinstance(values, list):
            lines.append(f"{key.replace('_', ' ')}: {_by_rank(ranks, values)}")
    lines += [
        f"{key.replace('_', ' ')}: {_short(value)}" for key, value in evidence.items() if value not in (None, [], "")
    ]
    return lines


def clearing_lines(report: SCOUTFaultReport) -> list[str]:
    """What clears the others."""
    lines = []
    for key, value in report.exonerating.items():
        if key in _CLEARS and isinstance(value, list) and value:
            lines.append(f"{rank_text(value)} {_CLEARS[key]}")
        else:
            lines.append(f"{key.replace('_', ' ')}: {_short(value)}")
    return lines or ["nothing: no one is accused, so no one is cleared" if not report.ranks else "nothing recorded"]


def incident_lines(incident: Incident) -> list[str]:
    """One incident in plain text."""
    report = incident.report
    lines = [
        f"{report.severity} {report.kind.value}, {incident.when}: {report.message}",
        f"  who       {incident.who}; {report.status}, by {_basis(report.basis)}",
    ]
    lines += _labelled("evidence", evidence_lines(report))
    lines += _labelled("clears", clearing_lines(report))
    return [*lines, f"  action    {incident.action}"]


def summary_lines(records: EventRecords) -> list[str]:
    """What else the log says: checks, the newest trustworthy step, recovery decisions, lines that were no records."""
    lines = []
    if records.checks:
        good = [check.get("step") for check in records.checks if check.get("trustworthy")]
        last = records.checks[-1].get("step")
        trusted = f"newest trustworthy step {good[-1]}" if good else "none of them trustworthy"
        lines.append(f"{count(len(records.checks), 'check')}, the last after step {last}; {trusted}")
        open_checks = [check for check in records.checks if check.get("status") == "Inconclusive"]
        if open_checks:
            why = sorted({str(reason) for check in open_checks for reason in check.get("inconclusive_reasons", ())})
            more = f"; and {len(why) - 3} more" if len(why) > 3 else ""
            lines.append(f"{count(len(open_checks), 'check')} inconclusive: {'; '.join(why[:3])}{more}")
    else:
        lines.append("no checks in this log")
    for decision in records.decisions:
        fields = ", ".join(
            f"{key} {_short(value)}" for key, value in decision.items() if key != "type" and value is not None
        )
        lines.append(f"recovery decision: {fields}")
    if records.others:
        lines.append("other records: " + ", ".join(f"{number} {kind}" for kind, number in records.others.items()))
    if records.unreadable:
        where = ", ".join(map(str, records.unreadable[:5]))
        more = ", ..." if len(records.unreadable) > 5 else ""
        lines.append(
            f"{count(len(records.unreadable), 'line')} not understood (line {where}{more}): torn, or of another version"
        )
    return lines


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    return [f"  {label if i == 0 else '':9} {line}" for i, line in enumerate(lines)]


def _basis(basis: str) -> str:
    words = {
        "majority": "a majority of equivalent peers",
        "self": "its own contradiction: it does not repeat itself",
        "direct": "its own data or telemetry",
        "none": "nothing that could name a rank",
    }
    return words.get(basis, basis)


def _table(value: object) -> list[tuple[str, list[Any]]]:
    if not isinstance(value, dict):
        return []
    return [(str(name), values) for name, values in value.items() if isinstance(values, list)]


def _grouped(ranks: Sequence[int], values: Sequence[Any]) -> str:
    if len(ranks) != len(values):
        return _short(list(values))
    holders: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        holders.setdefault(str(value), []).append(rank)
    ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{value} on {rank_text(held)}" for value, held in ordered)


def _by_rank(ranks: Sequence[int], values: Sequence[Any], unit: str = "") -> str:
    if len(ranks) != len(values):
        return _short(list(values))
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
    return ", ".join(f"rank {rank} {text}{unit}" for rank, text in zip(ranks, texts, strict=True))


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
