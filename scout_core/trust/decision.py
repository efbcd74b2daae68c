"""`RecoveryDecision`: which checkpoint a job is to go back to, as one strict, versioned, JSON-ready record."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

RecoveryMode = Literal["GEMINI", "RECOVERY_VERIFIED", "RESTART_FROM_SCRATCH", "STOP"]
FailureKind = Literal["sdc", "inaccessible", "straggler", "hang", "uncertain"]
Emergency = Literal["clean", "incomplete", "unavailable", "sdc"]


class RecoveryDecision(BaseModel):
    """What SCOUT recommends after a failure. Equal on every rank; the manager owns placement and the restart itself.

    `mode` says which row of the contract's table applies, `source` where the bytes are (`gemini`: host memory, a
    peer's memory or node-local disk, whichever each rank can reach). `available` is False for the two modes that load
    nothing. `exclude_hosts` and `exclude_ranks` are what to leave out of the next attempt. `lost_steps` are optimizer
    steps between the checkpoint and the failure.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1] = 1
    type: Literal["RecoveryDecision"] = "RecoveryDecision"
    mode: RecoveryMode
    source: Literal["gemini", "durable", "none"]
    step: int | None = Field(default=None, ge=0)
    checkpoint_id: str | None = None
    topology_digest: str | None = None
    available: bool
    reason: str
    failure_kind: FailureKind
    failed_step: int = Field(default=0, ge=0)
    lost_steps: int = Field(default=0, ge=0)
    run_id: str = ""
    attempt: int = Field(default=0, ge=0)
    exclude_ranks: tuple[int, ...] = ()
    exclude_hosts: tuple[str, ...] = ()
    restarts_used: int = Field(default=0, ge=0)
    restart_budget: int = Field(default=0, ge=0)
