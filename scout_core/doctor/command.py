"""The doctor as a command, shared by `scout doctor` and `python -m scout_core.doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scout_core.doctor.collect import local_facts
from scout_core.doctor.facts import RankFacts
from scout_core.doctor.findings import Finding, by_severity, exit_code
from scout_core.doctor.job import gather_launched
from scout_core.doctor.rules import diagnose


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What one run of the doctor found. `speaks` is True on the one rank that prints."""

    facts: tuple[RankFacts, ...]
    findings: tuple[Finding, ...]
    speaks: bool = True

    @property
    def exit_code(self) -> int:
        """0: nothing to repair; 1: something is. Equal on every rank that could gather."""
        return exit_code(self.findings)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for strict JSON."""
        return {
            "type": "doctor",
            "exit_code": self.exit_code,
            "ranks": [rank.to_json() for rank in self.facts],
            "findings": [finding.to_json() for finding in self.findings],
        }


def run_doctor(*, in_job: bool, timeout_s: float) -> Diagnosis:
    """Gather and judge. In a job every rank calls, and the lowest rank that answered prints.

    Raises `JobError` when `in_job` and the ranks cannot be brought together at all.
    """
    if not in_job:
        facts: tuple[RankFacts, ...] = (local_facts(),)
        return Diagnosis(facts=facts, findings=diagnose(facts))
    job = gather_launched(timeout_s)
    return Diagnosis(
        facts=job.facts,
        findings=by_severity([*job.findings, *diagnose(job.facts)]),
        speaks=job.speaks,
    )
