"""What one attempt leaves to the next: the decision, the flushed state, and the exit code."""

from __future__ import annotations

from scout_core.replay.guard import attempt
from scout_core.trust.channel import JobChannel
from scout_core.trust.decision import RecoveryDecision
from scout_core.trust.durable import CheckpointIo
from scout_core.trust.gemini import Gemini
from scout_core.trust.run_record import RESTART_EXIT_CODE, STOP_EXIT_CODE, RunFolder, RunRecord


class HandOver:
    """Of one rank; the manifest writer (rank 0) writes."""

    def __init__(
        self, folder: RunFolder, channel: JobChannel, gemini: Gemini | None, grace_s: float, io: CheckpointIo
    ) -> None:
        self._folder = folder
        self._channel = channel
        self._writer = channel.rank == 0
        self._gemini = gemini
        self._grace_s = grace_s
        self._io = io
        self._pending = False
        self._alone: RecoveryDecision | None = None

    def offer_alone(self, decision: RecoveryDecision) -> None:
        """Leave what this rank decided without asking another; of several, what goes back furthest. In any thread."""
        if self._alone is None or decision.failed_step < self._alone.failed_step:
            self._alone = decision
            attempt("writing this rank's decision", lambda: self._folder.decide(decision, self._channel.rank))

    def offer(self, decision: RecoveryDecision) -> None:
        """Leave the decision for the attempt that may follow; flush what it recommends. Every rank calls; local."""
        self._pending = True
        if decision.mode == "GEMINI":
            self._flush()
        if self._writer:
            attempt("writing the decision", lambda: self._folder.decide(decision))

    def withdraw(self) -> None:
        """The job went on: what was offered is out of date. Local."""
        if self._pending and self._writer:
            attempt("taking the decision back", self._folder.withdraw)
        self._pending = False
        if self._alone is not None:
            attempt("taking this rank's decision back", lambda: self._folder.withdraw(self._channel.rank))
        self._alone = None

    def leave(self, record: RunRecord, decision: RecoveryDecision) -> None:
        """Write the decision, flush, and end this process. Every rank calls; one all-gather.

        Exit codes: `RESTART_EXIT_CODE` to be started again, `STOP_EXIT_CODE` when the budget is spent.
        """
        stop = decision.mode == "STOP"
        self._flush()
        if self._writer:
            attempt("writing the decision", lambda: self._write_down(record, decision, stop))
        self._channel.gather([decision.step or 0])  # nobody leaves before all have flushed and the decision is written
        raise SystemExit(STOP_EXIT_CODE if stop else RESTART_EXIT_CODE)

    def _flush(self) -> None:
        if self._gemini is not None:
            with self._io("write", "gemini"):
                self._gemini.settle(self._grace_s)
                self._gemini.flush()

    def _write_down(self, record: RunRecord, decision: RecoveryDecision, stop: bool) -> None:
        update = {
            "restarts_used": record.restarts_used + (0 if stop else 1),
            "failed_step": max(record.failed_step, decision.failed_step),
            "stopped": stop,
        }
        self._folder.save(record.model_copy(update=update))
        self._folder.decide(decision)
