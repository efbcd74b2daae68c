"""The fault report handed to people and managers: one strict, versioned, JSON-ready record."""

from __future__ import annotations

import uuid
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class FaultKind(str, Enum):
    """What went wrong. The names are stable from the first release."""

    SDC = "sdc"
    REPLICA_DIVERGENCE = "replica_divergence"
    NUMERIC = "numeric"
    NONDETERMINISTIC = "nondeterministic"
    COMPUTE_STRAGGLER = "compute_straggler"
    COMMUNICATION_STRAGGLER = "communication_straggler"
    DATA_IMBALANCE = "data_imbalance"
    HOST_CONTENTION = "host_contention"
    COLLECTIVE_DESYNC = "collective_desync"
    COLLECTIVE_HANG = "collective_hang"
    PROCESS_STALL = "process_stall"
    PROCESS_EXIT = "process_exit"
    DATALOADER_STALL = "dataloader_stall"
    CHECKPOINT_IO_STALL = "checkpoint_io_stall"
    CHECKPOINT_BAD = "checkpoint_bad"
    HARDWARE_FAULT = "hardware_fault"
    HARDWARE_WARNING = "hardware_warning"
    TELEMETRY_LOST = "telemetry_lost"
    OOB_DAEMON_FAILURE = "oob_daemon_failure"
    ENVIRONMENT_CHANGED = "environment_changed"


Severity = Literal["info", "warning", "fatal"]
VerdictStatus = Literal["Agree", "Attributed", "Inconclusive"]
Scope = Literal["job", "group", "rank", "host", "device", "checkpoint"]
RecommendedAction = Literal["continue", "observe", "restart", "restart_excluding", "stop"]


class SCOUTFaultReport(BaseModel):
    """One fault, whom it names, and why.

    `ranks` are the global ranks at fault and stay empty when none can be blamed; `hosts` and `devices` are in
    the order of `ranks` where both are known. `evidence` holds what accuses, `exonerating` what clears the
    others. `basis` says what the verdict rests on: `majority` of equivalent peers, `self` (the rank does not
    repeat itself while every other does), `reference` (outside the error bound of a recomputation), `direct` (its
    own telemetry), or `none`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    schema_version: Literal[1] = 1
    type: Literal["SCOUTFaultReport"] = "SCOUTFaultReport"
    incident_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    kind: FaultKind
    severity: Severity
    status: VerdictStatus
    scope: Scope
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    surface: str | None = None
    phase: str = "train"
    step: int | None = None
    first_seen_step: int | None = None
    confidence: float = Field(default=1.0, ge=0.0, le=1.0)
    basis: str = "none"
    evidence: dict[str, Any] = Field(default_factory=dict)
    exonerating: dict[str, Any] = Field(default_factory=dict)
    recommended_action: RecommendedAction
    message: str
