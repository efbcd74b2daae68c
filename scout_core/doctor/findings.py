"""A finding: one thing the doctor has to say, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "fatal"]
_ORDER: tuple[Severity, ...] = ("fatal", "warning", "info")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding.

    `id` is stable and says the subject (`version-torch`). `fatal`: checks would fail or blame healthy ranks; `warning`:
    SCOUT works and sees or proves less than it could; `info`: worth knowing, nothing to repair. `ranks` are the global
    ranks it is about: the odd ones out where a majority shows which those are, empty when it is about the whole job.
    """

    id: str
    severity: Severity
    message: str
    fix: str = ""
    ranks: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain dict for strict JSON."""
        return {**asdict(self), "ranks": list(self.ranks)}


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, gravest first; otherwise in the order given."""
    return tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.severity)))


def exit_code(findings: Iterable[Finding]) -> int:
    """0 when there is nothing to repair, 1 when a finding is a warning or fatal."""
    return int(any(finding.severity != "info" for finding in findings))


def rank_text(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {text}"


def count(number: int, noun: str) -> str:
    """`1 rank`, `3 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
