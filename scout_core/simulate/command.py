"""What `scout simulate` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from scout_core.simulate.run import Report
from scout_core.simulate.score import Outcome

_LISTED = 20


def report_lines(report: Report) -> Iterator[str]:
    """The report in words, a line each."""
    grid, groups, cost = report.model.grid, report.groups, report.cost
    shape = " x ".join(f"{name} {size}" for name, size in grid.dims if size > 1) or "one rank"
    yield f"{grid.world} ranks: {shape}"
    yield (
        f"groups: {groups.peer_groups} of {groups.peers} peers, {groups.cohorts} of {groups.partners} lockstep "
        f"partners; every rank's own derived in {groups.seconds:.2f} s"
    )
    yield (
        f"a check: {cost.messages} control messages and {cost.bytes} bytes a rank, {cost.bytes_per_surface:.0f} bytes "
        f"of evidence a surface, whatever the sizes of tensors"
    )
    yield (
        f"decisions: {report.decision_us_per_rank / 1e3:.2f} ms of CPU a rank and check; {report.decision_s:.1f} s for "
        f"all that follows ({report.checks} checks of each cohort with a fault, 1 of {report.healthy_cohorts} others)"
    )
    answers = report.answers
    yield (
        f"{len(report.outcomes)} faults: {answers['hit']} hits, {answers['noticed']} noticed without blame, "
        f"{answers['miss']} misses; {len(report.false_alarms)} false alarms"
    )
    yield from (_line(outcome) for outcome in report.outcomes[:_LISTED])
    if len(report.outcomes) > _LISTED:
        yield f"  and {len(report.outcomes) - _LISTED} more (--json lists all)"
        yield from _boundaries(report.outcomes)
    for step, what, rank in report.false_alarms[:_LISTED]:
        yield f"  FALSE ALARM at step {step}: rank {rank}, {what}"


def _line(outcome: Outcome) -> str:
    fault = outcome.fault
    where = f"{fault.recipe_id}/{fault.surface}" if fault.kind == "corruption" else fault.kind
    when = f" at step {outcome.step}" if outcome.step is not None else ""
    why = f": {outcome.boundary.value}" if outcome.boundary else ": NOT EXPLAINED"
    return f"  {outcome.answer}{when}: rank {fault.rank}, {where}{'' if outcome.answer == 'hit' else why}"


def _boundaries(outcomes: Sequence[Outcome]) -> Iterator[str]:
    counted = Counter(outcome.boundary.value for outcome in outcomes if outcome.boundary)
    yield from (f"  {count} x {text}" for text, count in counted.most_common())
