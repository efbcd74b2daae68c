"""A new attempt: read the decision, agree, load and verify; step back when a load fails; end when nothing is left."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from scout_core.adapter import FrameworkAdapter
from scout_core.replay.guard import attempt, logger
from scout_core.trust.channel import JobChannel
from scout_core.trust.decision import RecoveryDecision
from scout_core.trust.durable import CheckpointIo, unwatched
from scout_core.trust.holdings import Complete, Holding, LocalHoldings, complete_steps, fetch
from scout_core.trust.run_record import RunFolder, RunRecord
from scout_core.trust.saver import DurableTier, Problem
from scout_core.trust.selection import Available, Failure, select_recovery
from scout_core.trust.states import TrustState


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a new attempt starts from. `loaded`: source, step and durable id, unproven until its first clean check."""

    step: int
    record: RunRecord
    decision: RecoveryDecision | None
    loaded: tuple[str, int, str | None] | None = None
    verified: bool = False
    stop: bool = False
    problems: list[Problem] = field(default_factory=list)


@dataclass(kw_only=True)
class Resumer:
    """Loads on all ranks alike: the manifest writer reads the records, everybody judges the same values."""

    channel: JobChannel
    folder: RunFolder
    record: RunRecord
    topology: str
    budget: int
    durable: DurableTier | None
    local: LocalHoldings
    adapter: FrameworkAdapter
    io: CheckpointIo = unwatched
    problems: list[Problem] = field(default_factory=list)
    tried: set[str | Complete] = field(default_factory=set)
    """What failed in this attempt: a second try would count for nothing that the first did not show."""
    mixed: bool = False
    """Whether a load that failed on some rank has changed the live state of any."""

    def run(self) -> Resumed:
        """Load the decided checkpoint, or the next that can be loaded. Every rank calls; many collectives.

        Raises `RuntimeError` on every rank when nothing is left to load and the live state is no fresh one any more.
        """
        decision = self._take_decision()
        if self.record.stopped or (decision is not None and decision.mode == "STOP"):
            logger.error("SCOUT: an earlier attempt decided to stop: %s", decision.reason if decision else "see log")
            return self._resumed(0, decision, stop=True)
        self._tell_refused()
        while True:
            available, complete = self._look()
            wanted = self._choose(decision, available)
            if not wanted.available:
                if self.mixed:
                    raise RuntimeError(
                        "nothing could be loaded whole, and the live state is in part that of a checkpoint that was "
                        f"not; start the processes anew ({self.problems[-1].message})"
                    )
                logger.warning("SCOUT: training starts from scratch: %s", wanted.reason)
                return self._resumed(0, wanted)
            problems = self._load(wanted, complete)
            if not problems:
                verified = wanted.mode == "RECOVERY_VERIFIED"
                assert wanted.step is not None
                logger.info("SCOUT: resumed from step %d (%s, %s)", wanted.step, wanted.mode, wanted.source)
                loaded = (wanted.source, wanted.step, wanted.checkpoint_id)
                return self._resumed(wanted.step, wanted, loaded=loaded, verified=verified)
            self.tried.add(wanted.checkpoint_id or self._parts(wanted, complete))
            text = "; ".join(problems)
            self.problems.append(
                Problem(step=wanted.step or 0, message=f"cannot be loaded: {text}", checkpoint_id=wanted.checkpoint_id)
            )

    def _resumed(self, step: int, decision: RecoveryDecision | None, **more: Any) -> Resumed:
        return Resumed(step=step, record=self.record, decision=decision, problems=self.problems, **more)

    def _take_decision(self) -> RecoveryDecision | None:
        """What earlier attempts decided, together or on ranks that asked no other; these void what came later."""
        told: Any = None
        if self.channel.rank == 0:
            joint, alone, refused = self.folder.read_decisions(self.record.run_id)
            decisions = [one.model_dump(mode="json") for one in alone]
            told = {
                "joint": None if joint is None else joint.model_dump(mode="json"),
                "alone": decisions,
                "refused": refused,
            }
        told = self.channel.gather_json(told)[0]
        for text in told["refused"]:
            self.problems.append(Problem(step=0, message=f"the decision file is refused: {text}"))
        alone = sorted((_decision(one) for one in told["alone"]), key=lambda one: (one.mode != "STOP", one.failed_step))
        for one in alone:
            self.record = self.record.with_fault(one.attempt, one.failed_step)
        if self.channel.rank == 0:
            if alone:
                attempt("writing the run's record", lambda: self.folder.save(self.record))
                attempt("rejecting checkpoints of failing hardware", self._reject_void)
            attempt("putting decisions away", self.folder.take_decisions)
        joint = None if told["joint"] is None else _decision(told["joint"])
        if joint is None or (alone and alone[0].mode == "STOP"):
            return alone[0] if alone else None
        return joint

    def _reject_void(self) -> None:
        """For whoever reads manifests alone; a load asks the record. On the manifest writer."""
        for manifest in self.durable.store.all()[0] if self.durable is not None else ():
            open_to_it = manifest.state in ("CANDIDATE", "RECOVERY_VERIFIED")
            if open_to_it and self.record.judgement(manifest.step, manifest.attempt) is TrustState.REJECTED:
                assert self.durable is not None
                self.durable.mark(manifest, TrustState.REJECTED, "made after the first sign of a hardware fault")

    def _tell_refused(self) -> None:
        for rank, refused in enumerate(self.channel.gather_json(self.local.refused)):
            for text in refused[:4]:
                self.problems.append(Problem(step=0, message=f"refused: {text}", ranks=(rank,)))

    def _look(self) -> tuple[list[Available], list[Complete]]:
        """What could be loaded now: the writer's manifests and every rank's holdings."""
        durable: list[dict[str, Any]] = []
        if self.durable is not None and self.channel.rank == 0:
            # where that cannot be written down, selection refuses them all the same
            self.problems += attempt("quarantining", self.durable.quarantine_failed).value or []
            durable = [
                {**manifest.model_dump(include={"step", "run_id", "topology_digest", "checkpoint_id", "state"}),
                 "load_failures": manifest.failures}
                for manifest in self.durable.store.all()[0]
                if self.record.judgement(manifest.step, manifest.attempt) is not TrustState.REJECTED
                and manifest.checkpoint_id not in self.tried
            ]  # fmt: skip
        own = [{**asdict(h), "state": h.state.value} for h in self.local.list()]
        told = self.channel.gather_json({"durable": durable, "holdings": own})
        holdings = [Holding(**{**one, "state": TrustState(one["state"])}) for rank in told for one in rank["holdings"]]
        complete = [one for one in complete_steps(holdings, self.channel.size) if one not in self.tried]
        found = [
            Available(source="durable", **{**one, "state": TrustState(one["state"])}) for one in told[0]["durable"]
        ]
        for step in complete:
            found.append(
                Available(
                    source="gemini",
                    step=step.step,
                    state=self._state(step),
                    run_id=self.record.run_id,
                    topology_digest=self.topology,
                    load_failures=self.record.loads.get(str(step.step), 0),
                )
            )
        return found, complete

    def _state(self, found: Complete) -> TrustState:
        return self.record.judgement(found.step, found.attempt) or found.state

    def _choose(self, decision: RecoveryDecision | None, available: list[Available]) -> RecoveryDecision:
        """The decided checkpoint while it can be had; a crash that left no decision made its ranks inaccessible."""
        failure = Failure(
            kind="inaccessible" if decision is None else decision.failure_kind,
            step=max([a.step for a in available], default=0) if decision is None else decision.failed_step,
            all_ranks_accessible=decision is not None,
            emergency="clean" if decision is not None and decision.mode == "GEMINI" else None,
            run_id=self.record.run_id,
            attempt=self.record.attempt,
            topology_digest=self.topology,
            restarts_used=0,  # whether to go on at all was decided before
            restart_budget=max(self.budget, 1),
            exclude_ranks=() if decision is None else decision.exclude_ranks,
            exclude_hosts=() if decision is None else decision.exclude_hosts,
        )
        # where a rank could not be asked, what it holds may be newer than what was decided, and as good
        asked = decision is not None and decision.failure_kind != "inaccessible"
        if decision is not None and asked and decision.available and decision.step is not None:
            at_most = [a for a in available if a.step <= decision.step]
            return select_recovery(failure, at_most)
        return select_recovery(failure, available)

    def _load(self, wanted: RecoveryDecision, complete: list[Complete]) -> list[str]:
        """Load on every rank, counted as failed until proven; returns every rank's problems."""
        if wanted.source == "durable":
            assert self.durable is not None and wanted.checkpoint_id is not None
            durable, checkpoint_id = self.durable, wanted.checkpoint_id
            state, problems = durable.load(checkpoint_id, {"step": 0, "state": self.adapter.training_state()})
            if problems:
                return problems
        else:
            key = str(wanted.step)
            self._keep_loads({**self.record.loads, key: self.record.loads.get(key, 0) + 1})
            chosen = self._parts(wanted, complete)
            with self.io("read", "gemini"):
                copy, problems = fetch(self.local, chosen, self.channel)
            if problems or copy is None:
                # a damaged part is refused from now on, so the same step may yet be complete without it
                self._keep_loads({**self.record.loads, key: self.record.loads[key] - 1})
                return problems
            state = copy.load()
        changed = True

        def put_back() -> None:
            nonlocal changed
            try:
                self._put_back(state, wanted.step)
            except ValueError:  # the adapter's word that the live state is as it was
                changed = False
                raise

        failure = attempt("putting the training state back", put_back).failure
        told = self.channel.gather_json({"error": None if failure is None else failure.error, "changed": changed})
        problems = [f"rank {rank}: {one['error']}" for rank, one in enumerate(told) if one["error"] is not None]
        self.mixed = bool(problems) and (self.mixed or any(one["changed"] for one in told))
        return problems

    def _parts(self, wanted: RecoveryDecision, complete: list[Complete]) -> Complete:
        fit = [c for c in complete if c.step == wanted.step and self._state(c) is not TrustState.REJECTED]
        # two attempts may have captured one step: the decision is about the one that is verified
        return next((c for c in fit if self._state(c).value == wanted.mode), fit[0])

    def _put_back(self, state: Any, step: int | None) -> None:
        if not isinstance(state, dict) or state.get("step") != step:
            raise ValueError(
                f"the state is of step {state.get('step') if isinstance(state, dict) else None}, not {step}"
            )
        self.adapter.load_training_state(state["state"])

    def _keep_loads(self, loads: dict[str, int]) -> None:
        self.record = self.record.model_copy(update={"loads": loads})
        if self.channel.rank == 0:
            attempt("writing the run's record", lambda: self.folder.save(self.record))


def _decision(values: dict[str, Any]) -> RecoveryDecision:
    return RecoveryDecision.model_validate_json(json.dumps(values, allow_nan=False))
