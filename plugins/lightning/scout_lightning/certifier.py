"""Lightning's own checkpoints, certified: what the strategy saves, deletes and loads passes here."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from scout_core.replay.guard import attempt
from scout_core.trust.states import Outcome, TrustState
from scout_lightning.ledger import Entry, Ledger, latest_verified

logger = logging.getLogger("scout")
SENTINEL = "scout-verified"


def state_at_save(*, outcome: Outcome | None, checked_now: bool, failing: bool) -> tuple[TrustState, str]:
    """The state of a checkpoint that is saved now, and why. Pure.

    `outcome`: what the job's newest check came to, None before the first, and SDC ever since one found it;
    `checked_now`: it was of this very state; `failing`: an exception is on its way through the job.
    """
    if outcome is Outcome.SDC:
        return TrustState.QUARANTINED, "corruption was found before in this fit"
    if failing:
        return TrustState.CANDIDATE, "saved while the job was failing; not certified"
    if checked_now and outcome is not None and outcome.accepts:
        return TrustState.RECOVERY_VERIFIED, ""
    return TrustState.CANDIDATE, ""


class Certifier:
    """Stands on `strategy.save_checkpoint`, `strategy.remove_checkpoint`, and the connector's `resume_start` and
    `resume_end`, between which everything is loaded.

    On every rank; only rank 0 reads and writes manifests. Uses no collective but one broadcast of the path to load.
    """

    def __init__(self, trainer: Any, dirpath: Path, run_id: str) -> None:
        self.outcome: Outcome | None = None
        self.checked_step = -1
        self.failing = False
        self.is_now: Callable[[int], bool] = lambda step: False
        self.io: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._trainer = trainer
        self._dirpath = dirpath
        strategy, connector = trainer.strategy, trainer._checkpoint_connector
        self._strategy, self._connector = strategy, connector
        self._topology = f"{type(strategy).__name__}-{trainer.world_size}"
        self._ledger = Ledger(dirpath, run_id=run_id, topology=self._topology) if trainer.is_global_zero else None
        self._waiting: list[Entry] = []
        self._save, self._remove = strategy.save_checkpoint, strategy.remove_checkpoint
        self._resume, self._resume_end = connector.resume_start, connector.resume_end
        self._loading: Path | None = None
        self._closed = False
        self._stands = [
            (strategy, "save_checkpoint", self._saving),
            (strategy, "remove_checkpoint", self._removing),
            (connector, "resume_start", self._resuming),
            (connector, "resume_end", self._resumed),
        ]
        self._before = [vars(owner).get(name) for owner, name, _ in self._stands]
        for owner, name, ours in self._stands:
            setattr(owner, name, ours)

    def close(self) -> None:
        """Take everything off the strategy and the connector. Local; may be called twice.

        What others put there before comes back; what they put there since stays, and passes through.
        """
        self._closed = True
        for (owner, name, ours), before in zip(self._stands, self._before, strict=True):
            if vars(owner).get(name) != ours:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def goes_on(self, run_id: str) -> None:
        """What was loaded is of this run, which the fit therefore continues. Local."""
        if self._ledger is not None:
            self._ledger.run_id = run_id

    def judged(self, outcome: Outcome, step: int) -> None:
        """The job's verdict on the state after optimizer step `step`; equal on every rank, local.

        Corruption stays until another fit begins: gathered or reduced, a wrong value is soon everywhere, and peers
        that all hold it agree again; and a check looks at a part of the state only.
        """
        if self.outcome is Outcome.SDC:
            outcome = Outcome.SDC
        self.outcome, self.checked_step = outcome, step
        if outcome is Outcome.INCONCLUSIVE:
            return
        state = TrustState.RECOVERY_VERIFIED if outcome.accepts else TrustState.QUARANTINED
        reason = "" if outcome.accepts else "corruption was found before this checkpoint was proven"
        waiting, self._waiting = self._waiting, []
        if self._ledger is None:
            return
        for entry in waiting:
            with self.io():  # every file is read again
                attempt("recording a checkpoint", partial(self._ledger.settle, entry, state, reason))
        self._delete_superseded()

    def _saving(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if self._closed:
            self._save(checkpoint, filepath, storage_options=storage_options)
            return
        path = Path(str(filepath)).absolute()
        state, reason = state_at_save(
            outcome=self.outcome, checked_now=self.is_now(self.checked_step), failing=self.failing
        )
        whole = "optimizer_states" in checkpoint
        if not whole and state is TrustState.RECOVERY_VERIFIED:
            state, reason = TrustState.CANDIDATE, "weights only; training cannot go on from it"
        ledger = self._ledger
        if ledger is not None:
            self._after_writes(lambda: ledger.set_aside(path))
            for old in self._waiting:
                old.gone = old.gone or old.path == path
        with self.io():
            self._save(checkpoint, filepath, storage_options=storage_options)
        if ledger is None:
            return
        entry = Entry(path=path, step=int(checkpoint["global_step"]), state=state, reason=reason)
        if state is TrustState.CANDIDATE and whole and not self.failing:
            self._waiting.append(entry)
        if self._writer is not None and state is TrustState.RECOVERY_VERIFIED:
            ledger.expect(entry)
        self._after_writes(lambda: ledger.complete(entry))
        self._delete_superseded()

    @property
    def _writer(self) -> Any:
        """The executor of AsyncCheckpointIO, from its first write on; it has one worker (Lightning 2.5 to 2.6)."""
        return getattr(self._strategy.checkpoint_io, "_executor", None)

    def _after_writes(self, work: Callable[[], None]) -> None:
        """Now, or once everything is written that was saved before. A manifest that fails is logged, not raised."""
        if self._writer is not None:
            self._writer.submit(attempt, "recording a checkpoint", work)
        else:
            with self.io():  # every file is read, which may take longer than writing it did
                attempt("recording a checkpoint", work)

    def _removing(self, filepath: Any) -> None:
        ledger = self._ledger
        if ledger is None or self._closed:
            self._remove(filepath)
            return
        path = Path(str(filepath)).absolute()
        needed = attempt("looking for the newest verified checkpoint", lambda: ledger.is_last_resort(path))
        if needed.value is not False:  # also when nobody can tell
            ledger.keep(path)
            return
        for entry in self._waiting:
            entry.gone = entry.gone or entry.path == path
        with self.io():
            self._remove(filepath)
        attempt("forgetting a checkpoint", lambda: ledger.forget(path))

    def _delete_superseded(self) -> None:
        assert self._ledger is not None
        for path in attempt("looking for superseded checkpoints", self._ledger.superseded).value or ():
            attempt("deleting a superseded checkpoint", partial(self._discard, path))

    def _discard(self, path: Path) -> None:
        assert self._ledger is not None
        with self.io():
            self._remove(str(path))
        self._ledger.forget(path)

    def _resuming(self, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Every rank calls; one broadcast for `scout-verified`, of what rank 0 found."""
        if str(checkpoint_path) == SENTINEL and not self._closed:
            checkpoint_path = self._strategy.broadcast(self._choice())
            logger.info("SCOUT: %s is %s", SENTINEL, checkpoint_path or "nothing: training starts from scratch")
        if self._ledger is not None and checkpoint_path and not self._closed:
            self._loading = Path(str(checkpoint_path)).absolute()
            attempt("counting a load", partial(self._ledger.begin_load, self._loading))
        return self._resume(checkpoint_path, *args, **kwargs)

    def _choice(self) -> str | None:
        if self._ledger is None:
            return None
        attempt("quarantining what cannot be loaded", self._ledger.quarantine_failed)
        return latest_verified(self._dirpath, topology=self._topology)

    def _resumed(self, *args: Any, **kwargs: Any) -> Any:
        """Every rank calls; when it returns, every rank has loaded everything."""
        done = self._resume_end(*args, **kwargs)
        if self._ledger is not None and self._loading is not None and not self._closed:
            attempt("counting a load", partial(self._ledger.loaded, self._loading))
        self._loading = None
        return done
