"""`attach()`: the one line in a training script, and the handle it returns."""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from scout_core.adapter import FrameworkAdapter
from scout_core.config import ScoutConfig
from scout_core.health.config import HealthConfig
from scout_core.health.watch import HealthWatch
from scout_core.manager_api import OrchestrationHooks
from scout_core.meeting import announce, meet, own_ordinal, places
from scout_core.oob.out_of_band import OutOfBand
from scout_core.pytorch import PyTorchAdapter
from scout_core.replay.check import CheckRunner
from scout_core.replay.guard import attempt, logger
from scout_core.replay.recorder import Recorder
from scout_core.replay.result import ReplayResult, without_peers
from scout_core.replay.schedule import Plan, available_classes, plan_all, plan_step
from scout_core.report.check_reports import reports_of
from scout_core.report.desk import ReportDesk
from scout_core.report.fault_report import FaultKind, SCOUTFaultReport
from scout_core.report.incidents import IncidentBook
from scout_core.report.live_reports import collector_report
from scout_core.report.oob_reports import daemon_failure, oob_report
from scout_core.report.trust_reports import checkpoint_report
from scout_core.report.unmonitored import absent_ranks, unmonitored_report
from scout_core.timing.collector import CollectorWatch
from scout_core.timing.live import LiveSteps, agreed_clock, step_clock
from scout_core.timing.live_groups import LiveGroups
from scout_core.timing.step_clock import NO_CLOCK, StepClock
from scout_core.trust.decision import FailureKind, RecoveryDecision
from scout_core.trust.durable import DurableCheckpointConfig
from scout_core.trust.saver import Problem
from scout_core.trust.states import Outcome
from scout_core.trust.trust import Trust

T = TypeVar("T")
_Certify = Callable[[int, ReplayResult | None], tuple[bool, RecoveryDecision | None]]


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    config: ScoutConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    adapter: FrameworkAdapter | None = None,
    hooks: OrchestrationHooks | None = None,
    stateful: Mapping[str, Any] | None = None,
    durable: DurableCheckpointConfig | None = None,
    mesh: DeviceMesh | None = None,
    **overrides: Any,
) -> Scout:
    """Watch a training job.

    Every rank calls it once, after the model is wrapped (DDP, FSDP2, DTensor) and the optimizer exists. Collectives:
    creates one Gloo group over this rank's peers, one over the ranks it works in lockstep with if there are any, and
    gathers host names. `mesh` is the job's whole DeviceMesh, with dimensions named `pp`, `dp_replicate`, `dp_shard`,
    `cp`, `ep`, `tp`; needed where parameters do not show it, as under pipeline, context or expert parallelism.
    `overrides` are fields of `ScoutConfig` or `ReplayHarnessConfig`, e.g. `check_interval=50`. `adapter`: for plugins.
    `stateful` names what else a restart must restore (scheduler, sampler, scaler), `durable` the job's own checkpoints.
    When `run_dir` holds a verified state of this run, it is loaded; train on from `scout.step_count`.

    Raises `ConfigError` for a configuration that cannot be used or that differs between ranks, before training starts,
    and `RuntimeError` when a load failed halfway and there is nothing else to load.
    Later only `ObserverLost` is raised into training, and `SystemExit` under `on_fault="restart"`.
    """
    settings = ScoutConfig.build(config, **overrides)
    if adapter is None:
        adapter = PyTorchAdapter(model, optimizer, settings.replay, stateful, mesh)
    return Scout(adapter, settings, hooks or OrchestrationHooks(), durable)


class Scout:
    """The handle of one attached job. A context manager; `close()` takes everything off again.

    `last_result` is the newest `ReplayResult` on this rank, `step_count` the optimizer steps seen since attaching,
    `active` whether checks still run.
    """

    def __init__(
        self,
        adapter: FrameworkAdapter,
        config: ScoutConfig,
        hooks: OrchestrationHooks,
        durable: DurableCheckpointConfig | None = None,
    ) -> None:
        self.config = config
        self.last_result: ReplayResult | None = None
        self.step_count = 0
        self.active = True
        self._adapter = adapter
        self._incidents = IncidentBook()
        self._manual_checks = 0
        self._plan: Plan | None = None
        layout = adapter.layout()
        surfaces = adapter.surfaces()
        self._peers, self._partners, table = meet(layout, config.replay.readiness_timeout_s)
        self._places = places(self._peers, config.replay)
        self._layers = tuple(sorted(surfaces.hidden))
        self._available = available_classes(surfaces, layout, config.replay)
        # shards that are held once have no peer to be compared with
        self._replay = (
            config.replay.model_copy(update={"compare_parameters": False}) if layout.shard_peers else config.replay
        )
        self._recorder = Recorder(adapter, surfaces, self._replay)
        self._runner = CheckRunner(
            adapter,
            self._recorder,
            self._peers,
            self._replay,
            partners=self._partners,
            table=table,
            shard_peers=layout.shard_peers,
        )
        self._desk = ReportDesk(config.run_dir, hooks, first=self._peers.position == 0)
        catalog = [r.recipe_id for r in plan_all(0, 0, self._replay, self._layers, self._available).recipes]
        catalog = [recipe for recipe in catalog if recipe != "state"]
        # on a compiled model the wait for the reduction cannot be told from the work
        alone = surfaces.compiled or self._peers.size < 2
        own = NO_CLOCK if alone else step_clock(surfaces.root, config, layout.gathers)
        self._clock = agreed_clock(own, self._peers, self._partners)
        self._oob = OutOfBand(
            config,
            self._peers,
            watched=layout.connected,
            stage=layout.stage,
            root=surfaces.root,
            layers={number: module for number, (_, module) in surfaces.hidden.items()},
            compiled=surfaces.compiled,
            on_report=self._take_report,
            on_lost=self._observer_lost,
            clock=self._clock,
        )
        with ExitStack() as failing:
            failing.callback(self._oob.close)
            # what is loaded is checkpoint I/O too: its stalls are to be seen
            self._trust = Trust(adapter, config, durable, catalog, self._tell_problem, self._oob.checkpoint_io)
            failing.callback(self._trust.close)
            self.step_count = self._trust.resume() or adapter.first_step()
            failing.pop_all()
        if self._peers.rank == 0 or (self._peers.position == 0 and self._peers.size > 1):
            announce((*surfaces.notes, *layout.notes), surfaces.compiled, self._peers)
        self._health = self._watch_hardware(config.health) if config.health is not None else None
        self._collector = CollectorWatch() if config.replay.live_timing else None
        self._runner.collective_digest = lambda: self._oob.digest
        self._runner.group_words = self._oob.group_words
        if isinstance(self._clock, StepClock):
            groups = LiveGroups(self._peers, self._partners, table, self._replay, self._places[0])
            self._runner.live = LiveSteps(self._clock, self._replay, groups)
        adapter.on_boundary(self._before_update, self._boundary)
        self._arm_next()

    @property
    def tainted(self) -> bool:
        """Whether corruption was found, or hardware told of it, since attach: nothing from then on is to be trusted."""
        return self._trust.tainted

    def outcome_at(self, step: int) -> Outcome | None:
        """The worst that all checks of the state after `step` came to on this rank; None unless the newest was one."""
        return self._trust.outcome_at(step) if self.active else None

    @property
    def reports(self) -> deque[SCOUTFaultReport]:
        """The newest fault reports on this rank's peers and the ranks it depends on, oldest first."""
        return self._desk.reports

    def check_now(self) -> ReplayResult:
        """Run the whole catalog at this boundary: embedding, every layer, output head, optimizer slice, live state.

        Every rank calls, after an optimizer step and before the next forward. Invocations are recomputed by one
        isolated forward pass from the model's last training input, output gradients are drawn from a shared seed.
        Collectives as in a scheduled check. Raises `RuntimeError` when checks have stopped on this rank or the check
        itself failed; the job can go on training.
        """
        if not self.active:
            raise RuntimeError("SCOUT is closed or its checks have stopped on this rank; see the log for the reason")
        result = self._replay_all(self._trust.out_of_turn)
        if result is None:
            raise RuntimeError("the check failed on this rank and checks have stopped; see the log for the reason")
        attempt("reporting", lambda: self._publish(result))
        return result

    def _replay_all(self, certify: _Certify | None = None) -> ReplayResult | None:
        """The whole catalog, not reported yet."""
        self._manual_checks += 1
        plan = plan_all(self.step_count, self._manual_checks, self._replay, self._layers, self._available)
        result = self._check(plan, certify)
        self._arm_next()  # the check took the hooks off that the coming step may be due to have
        return result

    @property
    def observer_pid(self) -> int | None:
        """Process id of this rank's out-of-band observer; None where there is none, or it was lost."""
        return self._oob.observer_pid

    def instrument_dataloader(self, loader: Iterable[T], *, name: str = "train") -> Iterable[T]:
        """The loader with its `next()` calls watched: a stall in it is told from one elsewhere. Local."""
        return self._oob.watch_loader(loader, name)

    def checkpoint_io(self, direction: Literal["read", "write"], *, name: str = "checkpoint") -> Any:
        """A context for one checkpoint read or write: a stall in it is told from one elsewhere. Local."""
        return self._oob.checkpoint_io(direction, name)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context for a part of the job with a grace of its own: `eval`, `checkpoint`, `compile`, `teardown`."""
        return self._oob.phase(name)

    def prepare_recovery(self, failure_kind: FailureKind, all_ranks_accessible: bool = True) -> RecoveryDecision:
        """Which checkpoint to go back to after a failure that SCOUT did not find itself.

        With all ranks accessible, every rank calls at the same boundary; for `hang` and `uncertain` the whole catalog
        is replayed first (collectives). Otherwise no collective is used. The decision is also reported to the manager.
        """
        before = self.last_result
        replay = self._replay_all if self.active and self._peers.size > 1 else None
        decision = self._trust.prepare(failure_kind, self.step_count, all_ranks_accessible, replay)
        self._deliver_decision(decision)
        result = self.last_result
        if result is not None and result is not before:  # the decision goes before its fault
            attempt("reporting", lambda: self._publish(result))
        return decision

    @property
    def last_recovery_decision(self) -> RecoveryDecision | None:
        """The newest decision on this rank, also one that an earlier attempt left and this one followed."""
        return self._trust.last_decision

    def close(self) -> None:
        """Remove every hook, end observer and monitors, close the log. Local; no collectives; may be called twice."""
        attempt("ending the out-of-band path", self._oob.close)
        if self._health is not None:
            attempt("ending the hardware monitor", self._health.close)
        if self._collector is not None:
            self._collector.close()
        self._stop_checks()
        attempt("closing checkpoint trust", self._trust.close)
        attempt("delivering the last reports", self._desk.close)

    def _stop_checks(self) -> None:
        """Take everything off that checks need; the out-of-band path stays until `close()`."""
        self.active = False
        # no later update will be held any more, and a capture may still be reading
        attempt("holding the update for a capture", self._trust.before_update)
        attempt("removing its hooks", self._recorder.close)
        attempt("detaching from the optimizer", self._adapter.close)

    def __enter__(self) -> Scout:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _before_update(self) -> None:
        attempt("holding the update for a capture", self._trust.before_update)
        if not self.active:
            return
        attempt("looking at what rested", self._recorder.end_rest)
        if self._plan is not None and not {"optimizer", "owner_update"}.isdisjoint(self._plan.classes):
            self._recorder.capture_slice(self._plan)

    def _boundary(self, applied: Callable[[], bool]) -> None:
        """After each optimizer step: run the check that is due, then arm the modules due after the next step.

        A check whose update was skipped is left out: gradients that overflowed are no fault and no state changed.
        """
        if not self.active:
            self._oob.boundary(self.step_count)
            return
        self.step_count += 1
        self._clock.end(self.step_count)
        if self._collector is not None and (found := self._collector.end()) is not None:
            self._tell_collector(found)
        self._oob.boundary(self.step_count)
        if self._plan is not None and applied():
            self._check(self._plan, self._trust.boundary)
        else:
            self._recorder.disarm()
        self._arm_next()
        self._clock.begin()

    def _arm_next(self) -> None:
        if not self.active:
            return
        if self._peers.size < 2:
            self._say_alone()
            return
        interval = self._replay.at_rest_interval or self._replay.check_interval
        if "at_rest" in self._available and interval and self.step_count % interval == 0:
            attempt("watching owned state at rest", self._recorder.begin_rest)
        step = self.step_count + 1
        self._plan = plan_step(step, self._replay, self._layers, self._available)
        if self._plan is not None:
            plan = self._plan
            attempt("arming the next step", lambda: self._recorder.arm(plan, keep=self._runner.is_source(plan)))

    def _say_alone(self) -> None:
        """At the first step that would check: what cannot be compared on this rank, for lack of peers."""
        plan = plan_step(self.step_count, self._replay, self._layers, self._available) if self.step_count else None
        if plan is not None and self.last_result is None:
            recipes = [recipe.recipe_id for recipe in plan.recipes]
            self.last_result = result = without_peers(self.step_count, self._peers.rank, recipes)
            attempt("reporting", lambda: self._publish(result))

    def _check(self, plan: Plan, certify: _Certify | None) -> ReplayResult | None:
        """`certify` None: whoever asked for this check lets the ranks agree on it."""
        outcome = attempt("checking", lambda: self._runner.run(plan))
        self._recorder.disarm()
        self._trust.checked(outcome.value)
        judged = None if certify is None else attempt("certifying", lambda: certify(plan.step, outcome.value))
        goes_on, decision = (judged.value if judged is not None else None) or (judged is None, None)
        if decision is not None:
            self._deliver_decision(decision)
        if outcome.value is None or not goes_on:
            self._stop(plan, outcome.failure.error if outcome.failure is not None else "another rank's check broke off")
            return None
        self.last_result = result = outcome.value
        if not plan.manual:
            attempt("reporting", lambda: self._publish(result))
        if decision is not None:
            self._leave(decision)
        return result

    def _deliver_decision(self, decision: RecoveryDecision) -> None:
        """Log a decision and hand it to the manager: on the job's first rank, before the fault it answers."""
        if self._peers.rank == 0:
            self._desk.take_decision(decision)

    def _leave(self, decision: RecoveryDecision) -> None:
        """Under `on_fault="restart"` this ends the process with its documented exit code."""
        if self.config.trust.on_fault != "restart" or not self._trust.enabled:
            return
        if self._peers.rank == 0:
            self._desk.announce_restart(decision)
        self._desk.drain()
        self._trust.leave(decision)

    def _tell_collector(self, found: Mapping[str, Any]) -> None:
        hosts, devices = (of[self._peers.position] for of in self._places)
        where = {"hosts": (hosts,), "devices": (devices,)}
        self._desk.take_own(collector_report(self._peers.rank, self.step_count, found, where))

    def _tell_problem(self, problem: Problem) -> None:
        self._desk.take_shared([checkpoint_report(problem)])

    def _take_hardware(self, report: SCOUTFaultReport) -> None:
        """A report on this rank's own hardware, a fatal one after its recovery decision. In the monitor's thread."""
        if report.severity == "fatal":
            left_out = (report.ranks, report.hosts) if report.recommended_action == "restart_excluding" else ((), ())
            step = self.step_count if report.first_seen_step is None else report.first_seen_step
            taints = bool(report.evidence.get("blocks_certification"))
            decision = self._trust.hardware_fault(step, *left_out, taints=taints)
            if decision is not None:
                self._desk.take_decision(decision)
        self._desk.take_own(report)

    def _publish(self, result: ReplayResult) -> None:
        hosts, devices = self._places
        reports = self._incidents.assign(reports_of(result, hosts=hosts, devices=devices), result)
        finding, tells = self._oob.explain_digest(result.inconclusive_reasons, self._partners)
        desync = [oob_report(finding, run="digest")] if finding is not None else []
        for report in [] if tells else desync:
            self._desk.take_written(report, deliver=False)
        self._oob.reset_digest()
        self._desk.take_shared(reports + desync if tells else reports, result.to_json())

    def _take_report(self, record: Mapping[str, Any], deliver: bool) -> None:
        """A report of the observers, which have written it to the event log. Called in the supervisor's thread."""
        report = SCOUTFaultReport.model_validate_json(json.dumps(record))
        if report.kind is FaultKind.COLLECTIVE_DESYNC:
            self._trust.tainted = True
        self._desk.take_written(report, deliver=deliver)

    def _observer_lost(self, reason: str) -> None:
        """This rank's observer is gone. Called once, in the supervisor's thread."""
        policy = self.config.oob.oob_failure
        self._desk.take_own(daemon_failure(self._peers.rank, socket.gethostname(), self.step_count, reason, policy))

    def _stop(self, plan: Plan, error: str) -> None:
        """A check broke off on this rank: its peers may be anywhere in it, so no further collective is safe."""
        missing = absent_ranks(self._peers, plan)
        report = unmonitored_report(plan, self._peers, missing, error)
        logger.error("SCOUT checks stop on rank %d", self._peers.rank)
        self._desk.take_own(report)
        self._stop_checks()

    def _watch_hardware(self, config: HealthConfig) -> HealthWatch:
        deliver, step = self._take_hardware, lambda: self.step_count
        return HealthWatch(config, rank=self._peers.rank, ordinal=own_ordinal(), deliver=deliver, step=step).start()
