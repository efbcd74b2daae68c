"""The lineage of a run: who it is, which attempt this is, and what earlier attempts taught. One sealed record."""

from __future__ import annotations

import fcntl
import os
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from scout_core.trust.decision import RecoveryDecision
from scout_core.trust.files import UntrustedFile, read_record, write_record
from scout_core.trust.states import TrustState

RESTART_EXIT_CODE = 75
"""How a job leaves that asks to be restarted (sysexits' EX_TEMPFAIL); any code but 0 makes torchrun restart it."""
STOP_EXIT_CODE = 78
"""How a job leaves that should not be restarted as it is; further attempts leave with it at once."""
_JUDGED = 64
_CLAIMED: weakref.WeakValueDictionary[Path, RunFolder] = weakref.WeakValueDictionary()
"""Folders that some `RunFolder` of this process has claimed: a process's own file locks never refuse itself."""


class RunRecord(BaseModel):
    """What outlives an attempt. `loads` counts failed loads of GEMINI steps, `failed_step` where it last went wrong.

    `judged` says what became of GEMINI captures after they were written, by `step@attempt`. It is one record for the
    whole job, so that no restart finds a step promoted on some ranks and not on others. `void_after` says by attempt
    after which step its captures count no more, since the hardware had shown the first sign of a fault.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1] = 1
    type: Literal["ScoutRun"] = "ScoutRun"
    run_id: str
    attempt: int = Field(default=0, ge=0)
    restarts_used: int = Field(default=0, ge=0)
    failed_step: int = Field(default=0, ge=0)
    loads: dict[str, int] = Field(default_factory=dict)
    judged: dict[str, Literal["RECOVERY_VERIFIED", "REJECTED"]] = Field(default_factory=dict)
    void_after: dict[str, int] = Field(default_factory=dict)
    stopped: bool = False

    def judgement(self, step: int, attempt: int) -> TrustState | None:
        """What became of the capture of a step in an attempt; None: what its shards say."""
        if step > self.void_after.get(str(attempt), step):
            return TrustState.REJECTED
        found = self.judged.get(f"{step}@{attempt}")
        return None if found is None else TrustState(found)

    def with_judgement(self, state: TrustState, steps: Sequence[int]) -> RunRecord:
        """The record after this attempt's captures of `steps` were promoted or rejected. Bounded."""
        judged = {**self.judged, **{f"{step}@{self.attempt}": state.value for step in steps}}
        return self.model_validate({**self.model_dump(), "judged": dict(list(judged.items())[-_JUDGED:])})

    def with_fault(self, attempt: int, step: int) -> RunRecord:
        """The record after hardware whose first sign of a fault came after `step` of an attempt. Bounded."""
        key = str(attempt)
        void = {**self.void_after, key: min(step, self.void_after.get(key, step))}
        return self.model_copy(update={"void_after": dict(list(void.items())[-_JUDGED:])})


class RunFolder:
    """`run.json` and `decision.json` under a run's folder, written by the manifest writer alone.

    Beside them stand decisions of ranks that could ask no other, each written by its rank: `decision-rank-N.json`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_path = folder / "run.json"
        self.decision_path = folder / "decision.json"
        self._release: weakref.finalize[[int], RunFolder] | None = None

    def claim(self) -> str | None:
        """Take the folder for this attempt; why it cannot be had, when another live one has it. Raises `OSError`.

        The lock is the process's and ends with it, however it ends; children that it forked do not hold it on. A file
        system without locks is taken at its word.
        """
        place = self.folder.absolute()
        if place in _CLAIMED:
            return f"{self.folder} is already in use by another attach() in process {os.getpid()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
            os.close(descriptor)
            return f"{self.folder} is in use by another job (process {owner or 'unknown'})"
        except OSError:
            os.close(descriptor)
            return None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        self._release = weakref.finalize(self, os.close, descriptor)
        _CLAIMED[place] = self
        return None

    def release(self) -> None:
        """Give the folder up. A second call does nothing."""
        if _CLAIMED.get(self.folder.absolute()) is self:
            del _CLAIMED[self.folder.absolute()]
        if self._release is not None:
            self._release()

    def begin(self) -> tuple[RunRecord, bool, str | None]:
        """This attempt's record, whether the run existed before, and what was wrong with the old record, if anything.

        A record that cannot be trusted begins a new lineage: its checkpoints cannot be told from foreign ones.
        """
        problem = None
        if self.run_path.exists():
            try:
                old = read_record(self.run_path, RunRecord)
                record = old.model_copy(update={"attempt": old.attempt + 1})
                write_record(self.run_path, record)
                return record, True, None
            except UntrustedFile as error:
                problem = str(error)
        launched = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        run_id = uuid.uuid4().hex if launched == "none" else f"{launched}-{uuid.uuid4().hex[:8]}"
        record = RunRecord(run_id=run_id)
        write_record(self.run_path, record)
        return record, False, problem

    def save(self, record: RunRecord) -> None:
        """Publish the record. Raises `OSError`."""
        write_record(self.run_path, record)

    def decide(self, decision: RecoveryDecision, rank: int | None = None) -> None:
        """Publish the decision for the next attempt; `rank`: of a rank that asked no other. Raises `OSError`."""
        write_record(self._path(rank), decision)

    def withdraw(self, rank: int | None = None) -> None:
        """Take a decision back: the job went on without a restart. Raises `OSError`."""
        self._path(rank).unlink(missing_ok=True)

    def read_decisions(self, run_id: str) -> tuple[RecoveryDecision | None, list[RecoveryDecision], list[str]]:
        """The decision an earlier attempt left, those of ranks that asked no other, and why others are refused."""
        joint, alone, problems = None, [], []
        for path in self._decisions():
            try:
                decision = read_record(path, RecoveryDecision)
                if decision.run_id != run_id:
                    problems.append(f"{path}: belongs to run {decision.run_id}")
                elif path == self.decision_path:
                    joint = decision
                else:
                    alone.append(decision)
            except UntrustedFile as error:
                problems.append(str(error))
        return joint, alone, problems

    def take_decisions(self) -> None:
        """Put away what `read_decisions` read, so that it serves once. Raises `OSError`."""
        for path in self._decisions():
            path.replace(path.with_name(f"{path.stem}.taken.json"))

    def _path(self, rank: int | None) -> Path:
        return self.decision_path if rank is None else self.folder / f"decision-rank-{rank:05d}.json"

    def _decisions(self) -> list[Path]:
        alone = sorted(path for path in self.folder.glob("decision-rank-*.json") if path.suffixes == [".json"])
        return [*([self.decision_path] if self.decision_path.exists() else []), *alone]
