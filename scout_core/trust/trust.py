"""`Trust`: what the session composes. Votes at boundaries, captures, certifies, decides, and loads at a new attempt."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from scout_core.adapter import FrameworkAdapter
from scout_core.config import ConfigError, ScoutConfig
from scout_core.replay.guard import attempt
from scout_core.replay.result import ReplayResult
from scout_core.trust.available import durable_available, gather_holdings
from scout_core.trust.certify import JobVerdict, Vote, agree, outcome_of
from scout_core.trust.channel import JobChannel
from scout_core.trust.decision import Emergency, FailureKind, RecoveryDecision
from scout_core.trust.durable import DurableCheckpointConfig
from scout_core.trust.gemini import Gemini
from scout_core.trust.holdings import LocalHoldings, complete_steps
from scout_core.trust.meeting import begin, meet
from scout_core.trust.memory import HostMemory
from scout_core.trust.resume import Resumer
from scout_core.trust.run_record import RESTART_EXIT_CODE, STOP_EXIT_CODE, RunFolder, RunRecord
from scout_core.trust.saver import DurableTier, Lineage, Problem
from scout_core.trust.selection import Available, Failure, select_recovery
from scout_core.trust.shard import Shards
from scout_core.trust.signals import FlushOnSignal
from scout_core.trust.states import Boundary, Change, Outcome, TrustBook, TrustRules, TrustState, advance

_CYCLE = frozenset({"cycle"})
_SURVIVORS: dict[str, list[tuple[int, Any]]] = {}
"""Memory copies by run id that outlive their `Trust`, for a restart inside the process."""


class Trust:
    """Checkpoint trust of one rank. Off, and free, unless GEMINI or durable checkpoints are configured.

    Every rank of the job makes one at attach and calls `boundary` after each scheduled check. `problems` are told to
    `tell`, on every rank alike.
    """

    def __init__(
        self,
        adapter: FrameworkAdapter,
        config: ScoutConfig,
        durable: DurableCheckpointConfig | None,
        catalog: Sequence[str],
        tell: Callable[[Problem], None],
    ) -> None:
        self.enabled = config.trust.gemini or durable is not None
        self.last_decision: RecoveryDecision | None = None
        self._tainted = False
        self._adapter = adapter
        self._config = config.trust
        self._tell = tell
        if not self.enabled:
            return
        if config.run_dir is None:
            raise ConfigError("gemini and durable checkpoints need run_dir, where what is known of them is kept")
        self._channel = JobChannel(config.trust.agreement_timeout_s, "control")
        self._writer = self._channel.rank == 0
        self._folder = RunFolder(config.run_dir)
        self._hosts, self._topology = meet(self._channel, adapter.layout().coordinates, self._config)
        self._record, known, problem = begin(self._channel, self._folder)
        self._rules = TrustRules(dense=config.trust.certification == "dense", catalog=_CYCLE)
        self._catalog = frozenset(catalog)
        self._covered: frozenset[str] = frozenset()
        self._book = TrustBook()
        self._loaded: tuple[str, int, str | None] | None = None
        gemini_folder = config.trust.gemini_dir or config.run_dir / "gemini"
        self._shards = Shards(
            gemini_folder,
            run_id=self._record.run_id,
            topology_digest=self._topology,
            world_size=self._channel.size,
        )
        self._gemini = self._make_gemini() if config.trust.gemini else None
        self._durable = self._make_durable(durable, config, adapter) if durable is not None else None
        self._signals: FlushOnSignal | None = None
        if self._gemini is not None:
            self._signals = FlushOnSignal(self._gemini.flush, config.trust.grace_s)
            self._signals.install()
        if problem is not None:
            tell(Problem(step=0, message=f"a new lineage begins, since its record cannot be trusted: {problem}"))
        self._known = known

    def resume(self) -> int:
        """Load what is to be loaded, at attach. Every rank calls; returns the step from which training goes on.

        Leaves with `STOP_EXIT_CODE` when an earlier attempt decided to stop.
        """
        if not self.enabled or not self._known or not self._config.resume:
            return 0
        resumer = Resumer(
            channel=self._channel,
            folder=self._folder,
            record=self._record,
            topology=self._topology,
            budget=self._config.restart_budget,
            durable=self._durable,
            local=LocalHoldings(
                self._channel.rank,
                self._channel.size,
                self._shards,
                _SURVIVORS.pop(self._record.run_id, []),
            ),
            adapter=self._adapter,
        )
        found = resumer.run()
        self._record, self.last_decision = found.record, found.decision
        for problem in found.problems:
            self._tell(problem)
        if found.stop:
            raise SystemExit(STOP_EXIT_CODE)
        self._loaded = found.loaded
        if found.step and self._durable is not None:
            self._durable.resume_at(found.step)
        if self._loaded is not None:
            self._book = TrustBook(states={found.step: TrustState.RECOVERY_VERIFIED} if found.verified else {})
        return found.step

    def before_update(self) -> None:
        """Before an optimizer step writes: captures under way must have read."""
        if self.enabled and self._gemini is not None:
            self._gemini.hold()

    def boundary(self, step: int, result: ReplayResult | None) -> tuple[bool, RecoveryDecision | None]:
        """After a check: agree over all ranks, then capture or reject. `result` None: the check broke off here.

        Every rank calls. One all-gather when all is well. Returns whether every rank's checks go on, and a decision
        if there is a fault to recover from.
        """
        if not self.enabled:
            return result is not None, None
        verdict = agree([Vote.decode(row) for row in self._channel.gather(self._vote(step, result).encode())])
        recipes = _CYCLE if verdict.cycle else frozenset()
        self._book, change = advance(
            self._book, self._rules, Boundary(step=step, outcome=verdict.outcome, recipes=recipes)
        )
        if not verdict.outcome.accepts or verdict.cycle:
            self._covered = frozenset()
        self._apply(step, change, verdict)
        decision = self._after_fault(step, verdict, result)
        return not verdict.broken_ranks, decision

    def _vote(self, step: int, result: ReplayResult | None) -> Vote:
        outcome = outcome_of(result)
        if self._tainted and outcome.accepts:
            outcome = Outcome.INCONCLUSIVE
        if result is not None and outcome.accepts:
            self._covered |= set(result.checked_recipe_ids)
        alike = result is not None and result.nonfinite and len(result.nonfinite_ranks) * 2 >= len(result.peer_ranks)
        alike = alike or (result is not None and result.nonfinite and not result.nonfinite_ranks)
        return Vote(
            step=step,
            outcome=outcome,
            cycle=outcome.accepts and self._covered >= self._catalog,
            busy=self._gemini is not None and self._gemini.busy,
            broken=result is None,
            nonfinite_alike=alike,
        )

    def _apply(self, step: int, change: Change, verdict: JobVerdict) -> None:
        if self._durable is not None:
            if change.promoted:
                self._durable.settle(TrustState.RECOVERY_VERIFIED, change.promoted, "")
            if change.rejected:
                self._durable.settle(TrustState.REJECTED, change.rejected, f"corruption found at step {step}")
        if not change.capture:
            return
        self._prove(step)
        assert change.state is not None
        state = change.state
        if self._gemini is not None and verdict.may_capture:
            gemini = self._gemini
            attempt("capturing state in host memory", lambda: gemini.begin(step, state, self._training_state(step)))
        if self._durable is not None and self._durable.due(step):
            for problem in self._durable.save(step, state, lambda: self._training_state(step)):
                self._tell(problem)

    def _training_state(self, step: int) -> dict[str, Any]:
        return {"step": step, "state": self._adapter.training_state()}

    def _prove(self, step: int) -> None:
        """The first accepted boundary after a load proves what was loaded; passing the failure renews the budget."""
        if self._loaded is not None:
            source, loaded_step, checkpoint_id = self._loaded
            self._loaded = None
            if source == "durable" and checkpoint_id is not None and self._durable is not None:
                durable = self._durable
                attempt("clearing the load count", lambda: durable.proven(checkpoint_id))
            loads = {key: count for key, count in self._record.loads.items() if key != str(loaded_step)}
            self._keep(self._record.model_copy(update={"loads": loads}))
        if self._record.restarts_used and step > self._record.failed_step:
            self._keep(self._record.model_copy(update={"restarts_used": 0}))

    def _keep(self, record: RunRecord) -> None:
        self._record = record
        if self._writer:
            attempt("writing the run's record", lambda: self._folder.save(record))

    def _after_fault(self, step: int, verdict: JobVerdict, result: ReplayResult | None) -> RecoveryDecision | None:
        bad_load = self._loaded is not None and verdict.nonfinite_alike
        if bad_load:
            assert self._loaded is not None
            text = "NaN on every rank since it was loaded: the checkpoint is suspected, not the hardware"
            self._tell(Problem(step=self._loaded[1], message=text, checkpoint_id=self._loaded[2]))
        elif verdict.outcome is not Outcome.SDC:
            return None
        own = [] if result is None or bad_load else list(result.sdc_ranks)
        named = sorted({rank for ranks in self._channel.gather_json(own) for rank in ranks})
        hosts = tuple(dict.fromkeys(self._hosts[rank] for rank in named))
        return self._select(
            "uncertain" if bad_load else "sdc", step, True, None, exclude_ranks=tuple(named), exclude_hosts=hosts
        )

    def prepare(
        self,
        kind: FailureKind,
        step: int,
        all_ranks_accessible: bool,
        replay: Callable[[], ReplayResult | None],
    ) -> RecoveryDecision:
        """The decision for a failure that the manager or user knows of.

        With all ranks accessible every rank calls, and a hang or uncertain failure runs the emergency replay first
        (collectives); otherwise no collective is used, and only durable manifests are considered.
        """
        if not self.enabled:
            failure = Failure(kind=kind, step=step, all_ranks_accessible=all_ranks_accessible, restart_budget=1)
            self.last_decision = select_recovery(failure, [])
            return self.last_decision
        emergency: Emergency | None = None
        if all_ranks_accessible and kind in ("hang", "uncertain"):
            emergency = self._emergency(step, replay)
        return self._select(kind, step, all_ranks_accessible, emergency)

    def hardware_fault(
        self, step: int, ranks: tuple[int, ...], hosts: tuple[str, ...], *, taints: bool
    ) -> RecoveryDecision | None:
        """The decision for a fatal fault of this rank's own hardware; None when trust is off. Local, in any thread.

        No collective is used, so only durable manifests are considered; `ranks` and `hosts` are to be left out. `step`
        is the last one before the first sign. With `taints` no later boundary of the job is certified.
        """
        if not self.enabled:
            return None
        self._tainted = self._tainted or taints
        return self._select("inaccessible", step, False, None, exclude_ranks=ranks, exclude_hosts=hosts)

    def _emergency(self, step: int, replay: Callable[[], ReplayResult | None]) -> Emergency:
        result = attempt("replaying in an emergency", replay).value
        vote = Vote(step=step, outcome=outcome_of(result), broken=result is None)
        verdict = agree([Vote.decode(row) for row in self._channel.gather(vote.encode())])
        if verdict.broken_ranks:
            return "unavailable"
        if verdict.outcome is Outcome.SDC:
            return "sdc"
        return "clean" if verdict.outcome.accepts else "incomplete"

    def _select(
        self,
        kind: FailureKind,
        step: int,
        reachable: bool,
        emergency: Emergency | None,
        exclude_ranks: tuple[int, ...] = (),
        exclude_hosts: tuple[str, ...] = (),
    ) -> RecoveryDecision:
        failure = Failure(
            kind=kind,
            step=step,
            all_ranks_accessible=reachable,
            emergency=emergency,
            run_id=self._record.run_id,
            attempt=self._record.attempt,
            topology_digest=self._topology,
            exclude_ranks=exclude_ranks,
            exclude_hosts=exclude_hosts,
            restarts_used=self._record.restarts_used,
            restart_budget=self._config.restart_budget,
        )
        decision = select_recovery(failure, self._available(reachable))
        if reachable:  # one word for all: manifests may show late on some host
            told = self._channel.gather_json(decision.model_dump(mode="json") if self._writer else None)[0]
            decision = RecoveryDecision.model_validate_json(json.dumps(told, allow_nan=False))
        self.last_decision = decision
        return decision

    def _available(self, reachable: bool) -> list[Available]:
        found = durable_available(self._durable)
        if self._gemini is None or not reachable:
            return found
        self._gemini.settle(self._config.grace_s)
        local = LocalHoldings(self._channel.rank, self._channel.size, self._shards, self._copies())
        holdings = gather_holdings(self._channel, local)
        for complete in complete_steps(holdings, self._channel.size):
            state = self._book.states.get(complete.step, complete.state)
            found.append(
                Available(
                    source="gemini",
                    step=complete.step,
                    state=state,
                    run_id=self._record.run_id,
                    topology_digest=self._topology,
                    load_failures=self._record.loads.get(str(complete.step), 0),
                )
            )
        return found

    def leave(self, decision: RecoveryDecision) -> None:
        """Under `on_fault="restart"`: write the decision, flush, and end this process. Every rank calls; may return.

        Exit codes: `RESTART_EXIT_CODE` to be started again, `STOP_EXIT_CODE` when the budget is spent.
        """
        if not self.enabled or self._config.on_fault != "restart":
            return
        stop = decision.mode == "STOP"
        if self._gemini is not None:
            self._gemini.settle(self._config.grace_s)
            self._gemini.flush()
        if self._writer:
            attempt("writing the decision", lambda: self._write_down(decision, stop))
        self._channel.gather([decision.step or 0])  # nobody leaves before all have flushed and the decision is written
        raise SystemExit(STOP_EXIT_CODE if stop else RESTART_EXIT_CODE)

    def _write_down(self, decision: RecoveryDecision, stop: bool) -> None:
        update = {
            "restarts_used": self._record.restarts_used + (0 if stop else 1),
            "failed_step": max(self._record.failed_step, decision.failed_step),
            "stopped": stop,
        }
        self._folder.save(self._record.model_copy(update=update))
        self._folder.decide(decision)

    def close(self) -> None:
        """Give the signals back; memory copies stay for a restart inside this process. Local."""
        if not self.enabled:
            return
        if self._gemini is not None:
            self._gemini.settle(self._config.grace_s)
            _SURVIVORS[self._record.run_id] = self._copies()
        if self._signals is not None:
            self._signals.remove()

    def _copies(self) -> list[tuple[int, Any]]:
        if self._gemini is None:
            return []
        copies = (self._gemini.memory.latest, self._gemini.held)
        return [(self._record.attempt, copy) for copy in copies if copy is not None]

    def _make_gemini(self) -> Gemini:
        replicate = self._config.replicate and self._channel.size > 1
        return Gemini(
            HostMemory(self._channel.rank),
            self._shards,
            JobChannel(self._config.agreement_timeout_s, "replicate") if replicate else None,
            rank=self._channel.rank,
            attempt=self._record.attempt,
            hosts=self._hosts,
            flush_interval=self._config.flush_interval,
        )

    def _make_durable(
        self, durable: DurableCheckpointConfig, config: ScoutConfig, adapter: FrameworkAdapter
    ) -> DurableTier:
        assert config.run_dir is not None
        callbacks = durable.callbacks or adapter.durable_callbacks()
        if callbacks is None:
            raise ConfigError(
                f"durable checkpoints need callbacks, and {type(adapter).__name__} has none of its own; "
                "give DurableCheckpointConfig(callbacks=TorchSaveCallbacks(), ...)"
            )
        lineage = Lineage(
            run_id=self._record.run_id,
            attempt=self._record.attempt,
            topology_digest=self._topology,
            environment={"torch": torch.__version__, "python": platform.python_version()},
        )
        return DurableTier(replace(durable, callbacks=callbacks), config.run_dir / "manifests", self._channel, lineage)
