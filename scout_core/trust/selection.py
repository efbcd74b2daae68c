"""Which checkpoint to go back to: the contract's table as one pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scout_core.trust.decision import Emergency, FailureKind, RecoveryDecision, RecoveryMode
from scout_core.trust.states import LOAD_FAILURES_ALLOWED, TrustState


@dataclass(frozen=True, kw_only=True)
class Available:
    """One checkpoint that could be loaded. `complete`: every rank has its part somewhere it can reach."""

    source: Literal["gemini", "durable"]
    step: int
    state: TrustState
    run_id: str
    topology_digest: str
    complete: bool = True
    checkpoint_id: str | None = None
    load_failures: int = 0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What happened, to whom and when. `emergency` is what the replay after a hang came to, if one was run; `note` says
    why it was not clean.
    """

    kind: FailureKind
    step: int
    all_ranks_accessible: bool = True
    emergency: Emergency | None = None
    note: str = ""
    run_id: str = ""
    attempt: int = 0
    topology_digest: str = ""
    exclude_ranks: tuple[int, ...] = ()
    exclude_hosts: tuple[str, ...] = ()
    restarts_used: int = 0
    restart_budget: int = 3


def select_recovery(failure: Failure, available: Sequence[Available]) -> RecoveryDecision:
    """The checkpoint to load after `failure`.

    The contract's table picks GEMINI or RECOVERY_VERIFIED; of these the newest that belongs to this run and topology,
    is complete on all ranks and did not fail to load too often. No GEMINI falls back to RECOVERY_VERIFIED, none of
    that to RESTART_FROM_SCRATCH. A spent restart budget says STOP: more of the same would loop.
    """
    if failure.restarts_used >= failure.restart_budget:
        text = f"{failure.restarts_used} restarts used of {failure.restart_budget}: another would most likely end alike"
        return _decide(failure, "STOP", None, text)
    wanted, why = _row(failure)
    usable = [a for a in available if _refusal(a, failure) is None]
    refused = [f"step {a.step}: {said}" for a in available if (said := _refusal(a, failure)) is not None]
    if wanted == "GEMINI":
        memory = [a for a in usable if a.source == "gemini" and a.state is not TrustState.REJECTED]
        if memory:
            return _decide(failure, "GEMINI", max(memory, key=lambda a: a.step), why)
        why += "; no complete GEMINI checkpoint, so the newest verified one"
    verified = [a for a in usable if a.state is TrustState.RECOVERY_VERIFIED]
    if verified:
        # at one step prefer memory, which is nearer and as verified, unless a part of it may be where nobody can reach
        lost = failure.kind == "inaccessible" or not failure.all_ranks_accessible
        best = max(verified, key=lambda a: (a.step, (a.source == "gemini") is not lost))
        return _decide(failure, "RECOVERY_VERIFIED", best, why)
    why += "; there is no verified checkpoint of this run" + (f" ({'; '.join(refused)})" if refused else "")
    return _decide(failure, "RESTART_FROM_SCRATCH", None, why)


def _row(failure: Failure) -> tuple[Literal["GEMINI", "RECOVERY_VERIFIED"], str]:
    """The row of the contract's table."""
    if failure.kind == "sdc":
        return "RECOVERY_VERIFIED", "detected corruption"
    if failure.kind == "inaccessible" or not failure.all_ranks_accessible:
        return "RECOVERY_VERIFIED", "a required rank or machine is inaccessible"
    if failure.kind == "straggler":
        return "GEMINI", "an accessible straggler taints no state"
    if failure.emergency == "clean":
        return "GEMINI", f"{failure.kind} with all ranks accessible and a complete clean replay of the catalog"
    note = f" ({failure.note})" if failure.note else ""
    word = {"sdc": "found corruption", None: "was unavailable"}.get(failure.emergency, f"was {failure.emergency}")
    return "RECOVERY_VERIFIED", f"{failure.kind}, and the emergency replay {word}{note}"


def _refusal(found: Available, failure: Failure) -> str | None:
    """Why this checkpoint cannot be loaded at all, or None."""
    if found.state in (TrustState.REJECTED, TrustState.QUARANTINED):
        return str(found.state.value)
    if found.run_id != failure.run_id:
        return f"of another run ({found.run_id})"
    if found.topology_digest != failure.topology_digest:
        return "of another topology"
    if not found.complete:
        return "not every rank can load its part"
    if found.load_failures >= LOAD_FAILURES_ALLOWED:
        return f"failed to load {found.load_failures} times"
    if found.step > failure.step:
        return f"later than the failure at step {failure.step}"
    return None


def _decide(failure: Failure, mode: RecoveryMode, chosen: Available | None, reason: str) -> RecoveryDecision:
    return RecoveryDecision(
        mode=mode,
        source="none" if chosen is None else chosen.source,
        step=None if chosen is None else chosen.step,
        checkpoint_id=None if chosen is None else chosen.checkpoint_id,
        topology_digest=failure.topology_digest,
        available=chosen is not None,
        reason=reason,
        failure_kind=failure.kind,
        failed_step=failure.step,
        lost_steps=failure.step - (chosen.step if chosen is not None else 0),
        run_id=failure.run_id,
        attempt=failure.attempt,
        exclude_ranks=failure.exclude_ranks,
        exclude_hosts=failure.exclude_hosts,
        restarts_used=failure.restarts_used,
        restart_budget=failure.restart_budget,
    )
