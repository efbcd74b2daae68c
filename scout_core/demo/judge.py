"""Whether SCOUT said the right thing. Pure: plain values in, complaints out."""

from __future__ import annotations

from dataclasses import dataclass

from scout_core.report.fault_report import FaultKind, SCOUTFaultReport


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What SCOUT has to say of a fault, and no other thing.

    `surfaces` are the surfaces of which it may name any, empty where that is left open; `tensor` a name that its
    evidence must hold, if any; `says` a text that its message must hold. `trusted` says whether the checkpoint of the
    step of the report may be certified; None where no check is involved.
    """

    kind: FaultKind
    ranks: tuple[int, ...]
    status: str
    surfaces: tuple[str, ...]
    trusted: bool | None
    tensor: str | None = None
    says: str = ""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What happened in one scenario.

    `early` are the reports before the fault was injected, `reports` those after. `steps` counts from the injection to
    the first report, at optimizer step `step`; `trusted` is the check's opinion of that step. `untrusted_early` has a
    sentence for each check before the injection that would not be certified. `checks` counts all checks, None where
    none is due; `active` says whether SCOUT still ran at the end. `seconds` from the injection to the first report are
    known where the observers report.
    """

    checks: int | None
    active: bool
    early: tuple[SCOUTFaultReport, ...] = ()
    untrusted_early: tuple[str, ...] = ()
    reports: tuple[SCOUTFaultReport, ...] = ()
    steps: int | None = None
    step: int | None = None
    trusted: bool | None = None
    seconds: float | None = None


def judge(expected: Expected | None, observed: Observed) -> tuple[str, ...]:
    """Everything wrong with what SCOUT said; empty if it was right. `expected` is None where nothing is faulty."""
    problems = [f"alarm without a fault: {report.message}" for report in observed.early]
    problems += observed.untrusted_early
    if not observed.active:
        problems.append("SCOUT's checks stopped by themselves")
    if observed.checks == 0:
        problems.append("no check ran")
    if expected is None:
        return (*problems, *(f"alarm without a fault: {report.message}" for report in observed.reports))
    if not observed.reports:
        return (*problems, "SCOUT did not notice the fault")
    for report in observed.reports:
        problems += _wrong_names(expected, report)
    problems += _wrong_place(expected, observed.reports[0])
    if expected.trusted is not None and observed.trusted != expected.trusted:
        problems.append(f"the checkpoint of step {observed.step} must {'' if expected.trusted else 'not '}be trusted")
    return tuple(problems)


def _wrong_names(expected: Expected, report: SCOUTFaultReport) -> list[str]:
    """Each report, the first and those that follow, must be of the right kind and name the right ranks."""
    problems = []
    if report.kind is not expected.kind:
        problems.append(f"reported {report.kind.value} instead of {expected.kind.value}")
    if report.ranks != expected.ranks:
        problems.append(f"named {_ranks(report.ranks)} instead of {_ranks(expected.ranks)}")
    if report.status != expected.status:
        problems.append(f"status {report.status} instead of {expected.status}")
    return problems


def _wrong_place(expected: Expected, first: SCOUTFaultReport) -> list[str]:
    problems = []
    if expected.surfaces and first.surface not in expected.surfaces:
        problems.append(f"found at {first.surface} instead of {' or '.join(expected.surfaces)}")
    if expected.tensor is not None and expected.tensor not in first.evidence.get("tensors", ()):
        problems.append(f"the evidence does not name {expected.tensor}")
    if expected.says not in first.message:
        problems.append(f"the message does not say {expected.says!r}")
    return problems


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {', '.join(map(str, ranks))}" if ranks else "no rank"
