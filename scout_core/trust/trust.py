"""`Trust`: what the session composes. Votes at boundaries, captures, certifies, decides, and loads at a new attempt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from scout_core.adapter import FrameworkAdapter
from scout_core.config import ConfigError, ScoutConfig
from scout_core.replay.guard import attempt
from scout_core.replay.result import ReplayResult
from scout_core.trust.available import durable_available, gather_holdings, outlives, still_on_disk, worst_loss
from scout_core.trust.certify import JobVerdict, Vote, agree, nonfinite_alike, outcome_of
from scout_core.trust.channel import JobChannel, partners
from scout_core.trust.decision import FailureKind, RecoveryDecision
from scout_core.trust.durable import CheckpointIo, DurableCheckpointConfig, unwatched
from scout_core.trust.emergency import EmergencyReplay, Replay, replay_in_emergency
from scout_core.trust.gemini import Gemini
from scout_core.trust.handover import HandOver
from scout_core.trust.holdings import LocalHoldings, complete_steps
from scout_core.trust.meeting import begin, meet
from scout_core.trust.places import Places
from scout_core.trust.resume import Resumer
from scout_core.trust.run_record import STOP_EXIT_CODE, RunFolder, RunRecord
from scout_core.trust.saver import DurableTier, Problem
from scout_core.trust.selection import Available, Failure, select_recovery
from scout_core.trust.shard import Shards
from scout_core.trust.signals import FlushOnSignal
from scout_core.trust.states import Boundary, Change, Outcome, TrustBook, TrustRules, TrustState, advance, worst
from scout_core.trust.tiers import make_durable, make_gemini

_CYCLE = frozenset({"cycle"})
_SURVIVORS: dict[tuple[str, str], list[tuple[int, Any]]] = {}
"""Memory copies by run id and topology that outlive their `Trust`, for a restart inside the process."""


class Trust:
    """Checkpoint trust of one rank. Off, and free, unless GEMINI or durable checkpoints are configured.

    Every rank of the job makes one at attach and calls `boundary` after each scheduled check. `problems` are told to
    `tell`, on every rank alike. `tainted`, also when off: corruption was found, or hardware told of it, since attach.
    """

    def __init__(
        self,
        adapter: FrameworkAdapter,
        config: ScoutConfig,
        durable: DurableCheckpointConfig | None,
        catalog: Sequence[str],
        tell: Callable[[Problem], None],
        io: CheckpointIo = unwatched,
    ) -> None:
        """`catalog`: recipe ids of one complete cycle. `io` tells the out-of-band path of checkpoint I/O."""
        self.enabled = config.trust.gemini or durable is not None
        self.last_decision: RecoveryDecision | None = None
        self.tainted = False
        self._seen: tuple[int, Outcome] | None = None
        self._adapter = adapter
        self._config = config.trust
        self._tell = tell
        self._io = io
        if not self.enabled:
            return
        if config.run_dir is None:
            raise ConfigError("gemini and durable checkpoints need run_dir, where what is known of them is kept")
        self._channel = JobChannel(config.trust.agreement_timeout_s, "control")
        self._writer = self._channel.rank == 0
        self._folder = RunFolder(config.run_dir)
        self._hosts, self._topology = meet(self._channel, adapter.layout().coordinates, self._config, durable)
        self._record, known, problem = begin(self._channel, self._folder, Places.given(config.trust, durable))
        self._rules = TrustRules(dense=config.trust.certification == "dense", catalog=_CYCLE)
        self._catalog = frozenset(catalog)
        self._covered: frozenset[str] = frozenset()
        self._book = TrustBook()
        self._on_disk: tuple[int, ...] = ()
        self._loaded: tuple[str, int, str | None] | None = None
        gemini_folder = config.trust.gemini_dir or config.run_dir / "gemini"
        self._shards = Shards(
            gemini_folder,
            run_id=self._record.run_id,
            topology_digest=self._topology,
            world_size=self._channel.size,
        )
        self._gemini: Gemini | None = None
        if config.trust.gemini:
            self._gemini = make_gemini(
                config, self._channel, self._shards, self._hosts, self._record.attempt, self._judge
            )
        self._durable: DurableTier | None = None
        if durable is not None:
            self._durable = make_durable(durable, config, adapter, self._record, self._topology, io)
        self._handover = HandOver(self._folder, self._channel, self._gemini, config.trust.grace_s, io)
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
                _survivors(self._record.run_id, self._topology),
            ),
            adapter=self._adapter,
            io=self._io,
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
        # what was corrupt has reached the replicas or waits outside the next check's window: a clean one proves nothing
        self.tainted = self.tainted or verdict.outcome is Outcome.SDC
        recipes = _CYCLE if verdict.cycle else frozenset()
        before = self._book
        self._book, change = advance(
            self._book, self._rules, Boundary(step=step, outcome=verdict.outcome, recipes=recipes)
        )
        self._on_disk = still_on_disk(self._on_disk, verdict.kept, self._book.states)
        if not verdict.outcome.accepts or verdict.cycle:
            self._covered = frozenset()
        if verdict.trouble:
            self._tell_trouble(step)
        self._judged(change, before)
        self._apply(step, change, verdict)
        decision = self._after_fault(step, verdict, result)
        return not verdict.broken_ranks, decision

    def checked(self, result: ReplayResult | None) -> None:
        """After every check, also one that certifies nothing: corruption that it found counts from now on. Local."""
        outcome = outcome_of(result)
        self.tainted = self.tainted or outcome is Outcome.SDC
        if result is not None:
            self._seen = result.step, worst([outcome, self.outcome_at(result.step) or outcome])

    def outcome_at(self, step: int) -> Outcome | None:
        """The worst that checks of the state after `step` came to on this rank; None unless the newest was one."""
        return self._seen[1] if self._seen is not None and self._seen[0] == step else None

    def out_of_turn(self, step: int, result: ReplayResult | None) -> tuple[bool, None]:
        """After a check that certifies nothing: agree on what it found. Every rank calls; one all-gather.

        Corruption takes back what was certified at this very step by a check that looked elsewhere. Returns what
        `boundary` does, without a decision: the caller asked for a check, and may ask for one.
        """
        if not self.enabled:
            return result is not None, None
        own = Vote(step=step, outcome=outcome_of(result), broken=result is None)
        verdict = agree([Vote.decode(row) for row in self._channel.gather(own.encode())])
        if verdict.outcome is Outcome.SDC:
            self._revoke(step)
        return not verdict.broken_ranks, None

    def _revoke(self, step: int) -> None:
        """Corruption was found in the state after `step`, whatever was said of it before. On every rank alike."""
        self.tainted = True
        before = self._book
        self._book, change = advance(before, self._rules, Boundary(step=step, outcome=Outcome.SDC))
        self._covered = frozenset()
        self._judged(change, before)
        self._settle(step, change)

    def _vote(self, step: int, result: ReplayResult | None) -> Vote:
        outcome = outcome_of(result)
        if self.tainted and outcome.accepts:
            outcome = Outcome.INCONCLUSIVE
        if result is not None and outcome.accepts:
            self._covered |= set(result.checked_recipe_ids)
        return Vote(
            step=step,
            outcome=outcome,
            cycle=outcome.accepts and self._covered >= self._catalog,
            busy=self._gemini is not None and self._gemini.busy,
            broken=result is None,
            nonfinite_alike=result is not None and nonfinite_alike(result),
            trouble=self._gemini is not None and self._gemini.failure is not None,
            kept=-1 if self._gemini is None else self._gemini.kept,
        )

    def _tell_trouble(self, step: int) -> None:
        """What went wrong with memory copies since the last check, on any rank. Every rank calls; one gather."""
        own = None if self._gemini is None else self._gemini.take_failure()
        told = self._channel.gather_json(own)
        ranks = tuple(rank for rank, text in enumerate(told) if text is not None)
        text = "; ".join(f"rank {rank}: {told[rank]}" for rank in ranks)
        self._tell(Problem(step=step, message=f"memory copies: {text}; earlier ones stay", ranks=ranks))

    def _judged(self, change: Change, before: TrustBook) -> None:
        """Write down what became of earlier captures, for the whole job at once."""
        gone = [step for step in change.rejected if step in before.states]
        record = self._record
        for state, steps in ((TrustState.RECOVERY_VERIFIED, change.promoted), (TrustState.REJECTED, gone)):
            record = record.with_judgement(state, steps) if steps else record
        if record is not self._record:
            self._keep(record)

    def _judge(self, step: int, attempt: int) -> TrustState | None:
        """What became of a capture; None: what it said when it was made. In any thread."""
        state = self._book.states.get(step) if attempt == self._record.attempt else None
        if state in (TrustState.RECOVERY_VERIFIED, TrustState.REJECTED):
            return state
        return self._record.judgement(step, attempt)

    def _settle(self, step: int, change: Change) -> None:
        if self._durable is not None:
            if change.promoted:
                self._durable.settle(TrustState.RECOVERY_VERIFIED, change.promoted, "")
            if change.rejected:
                self._durable.settle(TrustState.REJECTED, change.rejected, f"corruption found at step {step}")

    def _apply(self, step: int, change: Change, verdict: JobVerdict) -> None:
        self._settle(step, change)
        if not change.capture:
            return
        self._prove(step)
        assert change.state is not None
        state = change.state
        if self._gemini is not None and verdict.may_capture:
            gemini = self._gemini
            attempt("capturing state in host memory", lambda: gemini.begin(step, state, self._training_state(step)))
        # under the dynamic rule only the end of a cycle makes a candidate: what lies between is never promoted
        if self._durable is not None and state is not TrustState.LATEST_GEMINI and self._durable.due(step):
            for problem in self._durable.save(step, state, lambda: self._training_state(step)):
                self._tell(problem)

    def _training_state(self, step: int) -> dict[str, Any]:
        return {"step": step, "state": self._adapter.training_state()}

    def _prove(self, step: int) -> None:
        """The first accepted boundary after a load proves what was loaded; passing the failure renews the budget."""
        self._handover.withdraw()
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
        kind: FailureKind = "uncertain" if bad_load else "sdc"
        return self._select(kind, step, True, exclude_ranks=tuple(named), exclude_hosts=hosts)

    def prepare(
        self,
        kind: FailureKind,
        step: int,
        all_ranks_accessible: bool,
        replay: Replay | None,
    ) -> RecoveryDecision:
        """The decision for a failure that the manager or user knows of. `replay` None: this rank cannot.

        With all ranks accessible every rank calls, and a hang or uncertain failure runs the emergency replay first
        (collectives); otherwise no collective is used: durable manifests are considered, and the state that all ranks
        were known to have on disk at the last check, if it outlives the loss of any one other host.
        """
        if not self.enabled:
            failure = Failure(kind=kind, step=step, all_ranks_accessible=all_ranks_accessible, restart_budget=1)
            self.last_decision = select_recovery(failure, [])
            return self.last_decision
        if not all_ranks_accessible:
            return self._select(kind, step, False)
        if kind in ("hang", "uncertain"):
            emergency = replay_in_emergency(self._channel, step, replay)
            if emergency.word == "sdc":
                self._revoke(step)
            hosts = tuple(dict.fromkeys(self._hosts[rank] for rank in emergency.ranks))
            decision = self._select(kind, step, True, emergency, exclude_ranks=emergency.ranks, exclude_hosts=hosts)
        else:
            decision = self._select(kind, step, True)
        self._handover.offer(decision)
        return decision

    def hardware_fault(
        self, step: int, ranks: tuple[int, ...], hosts: tuple[str, ...], *, taints: bool
    ) -> RecoveryDecision | None:
        """The decision for a fatal fault of this rank's own hardware; None when trust is off. Local, in any thread.

        No collective is used: durable manifests are considered, and what all ranks were known to have on disk, if
        it outlives `hosts`, which are to be left out as `ranks` are. `step` is the last one before the first sign: the
        next attempt loads none of this one's that is later. With `taints` no later boundary of the job is certified.
        """
        self.tainted = self.tainted or taints
        if not self.enabled:
            return None
        decision = self._select("inaccessible", step, False, exclude_ranks=ranks, exclude_hosts=hosts, lost=hosts)
        self._handover.offer_alone(decision)
        return decision

    def _select(
        self,
        kind: FailureKind,
        step: int,
        reachable: bool,
        emergency: EmergencyReplay | None = None,
        exclude_ranks: tuple[int, ...] = (),
        exclude_hosts: tuple[str, ...] = (),
        lost: tuple[str, ...] | None = None,
    ) -> RecoveryDecision:
        failure = Failure(
            kind=kind,
            step=step,
            all_ranks_accessible=reachable,
            emergency=None if emergency is None else emergency.word,
            note="" if emergency is None else emergency.why,
            run_id=self._record.run_id,
            attempt=self._record.attempt,
            topology_digest=self._topology,
            exclude_ranks=exclude_ranks,
            exclude_hosts=exclude_hosts,
            restarts_used=self._record.restarts_used,
            restart_budget=self._config.restart_budget,
        )
        available = durable_available(self._durable)
        available += self._in_reach() if reachable else self._believed(lost)
        decision = select_recovery(failure, available)
        if reachable:  # one word for all: manifests may show late on some host
            told = self._channel.gather_json(decision.model_dump(mode="json") if self._writer else None)[0]
            decision = RecoveryDecision.model_validate_json(json.dumps(told, allow_nan=False))
        self.last_decision = decision
        return decision

    def _in_reach(self) -> list[Available]:
        """GEMINI steps that every rank can load now. Every rank calls; one gather of JSON."""
        if self._gemini is None:
            return []
        self._gemini.settle(self._config.grace_s)
        local = LocalHoldings(self._channel.rank, self._channel.size, self._shards, self._copies())
        found = complete_steps(gather_holdings(self._channel, local), self._channel.size)
        return [self._gemini_step(one.step, self._judge(one.step, one.attempt) or one.state) for one in found]

    def _believed(self, lost: tuple[str, ...] | None) -> list[Available]:
        """GEMINI steps on disk, as of the last check, that outlive the hosts `lost`; None: any one but this. Local."""
        if self._gemini is None:
            return []
        rank, size = self._channel.rank, self._channel.size
        replicated = self._config.replicate and size > 1
        offset = (partners(self._hosts, rank)[0] - rank) % size if replicated else 0
        safe = worst_loss(self._hosts, rank, offset) if lost is None else outlives(self._hosts, offset, lost)
        states = self._book.states
        return [self._gemini_step(step, states[step]) for step in self._on_disk if step in states] if safe else []

    def _gemini_step(self, step: int, state: TrustState) -> Available:
        return Available(
            source="gemini",
            step=step,
            state=state,
            run_id=self._record.run_id,
            topology_digest=self._topology,
            load_failures=self._record.loads.get(str(step), 0),
        )

    def leave(self, decision: RecoveryDecision) -> None:
        """Under `on_fault="restart"`: write the decision, flush, and end this process. Every rank calls; may return."""
        if self.enabled and self._config.on_fault == "restart":
            self._handover.leave(self._record, decision)

    def close(self) -> None:
        """Give the signals back; memory copies stay for a restart inside this process. Local."""
        if not self.enabled:
            return
        if self._gemini is not None:
            self._gemini.settle(self._config.grace_s)
            _SURVIVORS[self._record.run_id, self._topology] = self._copies()
        if self._signals is not None:
            self._signals.remove()
        self._folder.release()

    def _copies(self) -> list[tuple[int, Any]]:
        if self._gemini is None:
            return []
        return [(self._record.attempt, copy) for copy in self._gemini.copies()]


def _survivors(run_id: str, topology: str) -> list[tuple[int, Any]]:
    """What outlived the last attempt in this process, if its ranks stood as these do. It is given out once."""
    found = _SURVIVORS.get((run_id, topology), [])
    for key in [key for key in _SURVIVORS if key[0] == run_id]:
        del _SURVIVORS[key]
    return found
