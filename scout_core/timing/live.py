"""Live steps judged at each check: the clock's observations of all peers, in order, given to the judge of pace."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from scout_core.config import ReplayHarnessConfig, ScoutConfig
from scout_core.consensus.structure import structure_signature
from scout_core.peers import PeerGroup
from scout_core.replay.isolation import run_queue_delay_ns
from scout_core.timing.live_groups import WORDS as GROUP_WORDS
from scout_core.timing.live_groups import LiveGroups
from scout_core.timing.pace import JobNote, PaceFinding, PaceJudge, PaceThresholds, PaceVerdict
from scout_core.timing.step_clock import NO_CLOCK, Clock, GroupCall, Pace, StepClock, mean_pace

_RECENT = 20
_CONTENDED = 0.25
"""Share of their time that half of the peers wait for a core when their hosts are told to be overcommitted."""
_CROWDED = 0.1
"""Share of its time a rank must wait for a core, and twice the others' share, before a crowded host is the cause."""


def step_clock(root: nn.Module, config: ScoutConfig, gathers: bool) -> Clock:
    """The clock of a job's steps; one that keeps nothing where they are not timed, or nobody watches for waits.

    On a GPU a rank that `gathers` parameters waits for them between streams, where nobody can tell it from work.
    """
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    if not (config.replay.live_timing and config.oob.oob_enabled) or (gathers and device.type == "cuda"):
        return NO_CLOCK
    return StepClock(device, config.replay.shortest_interval, run_queue_delay_ns)


def agreed_clock(own: Clock, peers: PeerGroup, partners: PeerGroup) -> Clock:
    """`own`, if all of the table have such a one; else one that keeps nothing, since their rows would differ in length.

    Every peer and partner calls: one all-gather among peers and one among partners.
    """
    kind = own.kind if isinstance(own, StepClock) else 0
    column = peers.gather(torch.tensor([kind, -kind])).amin(0)
    least, most = partners.gather(column).amin(0).tolist()
    return own if least == -most else NO_CLOCK


@dataclass(frozen=True, kw_only=True)
class LiveVerdict:
    """What the newest live steps say. Positions in `findings` are peer-local; `step` is the newest step judged.

    `own_ms` has each peer's own time per step, the median of its newest observations; `core_wait` the share of its time
    in which it was ready to run and had no core; None where unknown. `crowded` are positions whose host is the likely
    cause of their slowness.
    """

    step: int
    findings: tuple[PaceFinding, ...] = ()
    note: JobNote | None = None
    own_ms: tuple[float | None, ...] = ()
    core_wait: tuple[float | None, ...] = ()
    crowded: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain dict for strict JSON."""
        return {
            "step": self.step,
            "findings": [vars(finding) for finding in self.findings],
            "note": self.note,
            "own_ms": [None if value is None else round(value, 3) for value in self.own_ms],
            "core_wait": [None if value is None else round(value, 3) for value in self.core_wait],
        }


class LivePace:
    """The clock of this rank and the judge that all peers hold alike.

    Every peer calls `words` and, with the words of all, `judge`, once at each check. No collectives of its own.
    """

    def __init__(self, clock: StepClock, config: ReplayHarnessConfig) -> None:
        self._clock = clock
        self._judge = PaceJudge(PaceThresholds(relative=config.live_relative, absolute_ms=config.live_absolute_ms))
        self._judged = -1
        self._least_ms = config.live_observation_ms
        self._verdict: PaceVerdict | None = None
        self._open: list[list[Pace]] = []
        self._open_ms = 0.0
        self._recent: deque[Sequence[Pace]] = deque(maxlen=_RECENT)

    def words(self, step: int) -> list[int]:
        """This rank's observations, a fixed number of words."""
        return self._clock.words(step)

    def judge(self, step: int, rows: Sequence[Sequence[int]]) -> LiveVerdict | None:
        """Judge what is new in `rows`, one row of `words` per peer; None where nothing is.

        What was found holds until enough is new for another judgement.
        """
        newest = self._clock.newest(step)
        first = newest - self._clock.observations + 1
        fresh = False
        for index in range(max(first, self._judged + 1), newest + 1):
            row = [Pace.decode(words[index - first]) for words in rows]
            known = [pace.own_ms for pace in row if pace.own_ms is not None]
            if not known:
                continue  # before this attempt, or steps that nobody timed
            fresh = True
            self._open.append(row)
            self._open_ms += max(known) * self._clock.steps_each
            if self._open_ms < self._least_ms:
                continue  # what disturbs a host lasts for milliseconds, whatever a step takes
            row = [mean_pace(paces) for paces in zip(*self._open, strict=True)]
            self._open, self._open_ms = [], 0.0
            self._recent.append(row)
            tokens = [pace.tokens for pace in row]
            self._verdict = self._judge.observe(
                (index + 1) * self._clock.steps_each,
                [pace.own_ms for pace in row],
                tokens=tokens if any(tokens) else None,
                loader_ms=[pace.loader_ms for pace in row],
            )
        self._judged = max(self._judged, newest)
        verdict = self._verdict
        if verdict is None or not fresh:
            return None
        waits = [self._core_wait(position) for position in range(len(rows))]
        own = tuple(_median([row[p].own_ms for row in self._recent]) for p in range(len(rows)))
        return LiveVerdict(
            step=verdict.step,
            findings=verdict.findings,
            note=verdict.note or ("host_contention" if self._contended(waits) else None),
            own_ms=own,
            core_wait=tuple(waits),
            crowded=tuple(f.position for f in verdict.findings if crowding_explains(f, own[f.position], waits)),
        )

    def _contended(self, waits: Sequence[float | None]) -> bool:
        median = _median(waits)
        return len(self._recent) == _RECENT and median is not None and median > _CONTENDED

    def _core_wait(self, position: int) -> float | None:
        shares = [
            pace.core_wait_ms / (pace.own_ms + pace.core_wait_ms)
            for pace in (row[position] for row in self._recent)
            if pace.core_wait_ms is not None and pace.own_ms is not None and pace.own_ms + pace.core_wait_ms > 0
        ]
        return _median(shares)


class LiveSteps:
    """What a check hears of live steps: every rank's pace, and its collectives by group.

    Every peer calls `words` and, with those of all, `judge`, once at each check.
    """

    def __init__(self, clock: StepClock, config: ReplayHarnessConfig, groups: LiveGroups) -> None:
        self._clock = clock
        self._pace = LivePace(clock, config)
        self._newest = -1
        self._fresh = True
        self.groups = groups

    def words(self, step: int) -> list[int]:
        """This rank's row, of a fixed length."""
        self._fresh, self._newest = step > self._newest, max(step, self._newest)  # a step counts in one check only
        told = self.groups.words(self._clock.collectives(step)) if self._fresh else [0] * GROUP_WORDS
        return self._pace.words(step) + told

    def judge(self, step: int, rows: Sequence[Sequence[int]], asked: bool) -> LiveVerdict | None:
        """Judge what all peers said; `rows` is empty where they do not stand at one boundary.

        Where a partner `asked`, every partner calls: one object gather among them.
        """
        self.groups.hear([row[-GROUP_WORDS:] for row in rows])
        if asked:
            self.groups.exchange()
        if self._fresh:
            self.groups.judge()
        return self._pace.judge(step, [row[:-GROUP_WORDS] for row in rows]) if rows else None


class LiveWatch:
    """Hooks on the root module: how many tokens a step works on, and how long backward waits for its reduction.

    `DistributedDataParallel` reduces while gradients are computed and waits for the rest in a callback at the end of
    backward. Callbacks run in the order in which they are queued: one queued at the very beginning runs before it and
    queues another, which runs after it. Nothing is put on a compiled model, whose graph hooks would change.
    """

    def __init__(self, root: nn.Module, clock: Clock) -> None:
        self._clock = clock
        self._reduction = _reduction(root)
        self._task = -1
        self._handles = [
            root.register_forward_pre_hook(self._before, with_kwargs=True),
            root.register_forward_hook(self._after),
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> LiveWatch:
        """A copy of the model has its hooks, which time the same steps."""
        return self

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            self._clock.count(_tokens((*args, *kwargs.values())))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        first = _first_differentiable(output)
        if first is not None and module.training:
            first.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:  # several passes of the model may share one backward pass
            self._task = task
            Variable._execution_engine.queue_callback(self._gradients_done)

    def _gradients_done(self) -> None:
        since = self._clock.mark()
        Variable._execution_engine.queue_callback(lambda: self._clock.waited(since, self._reduction))


def _reduction(root: nn.Module) -> GroupCall | None:
    """The reduction of gradients that `DistributedDataParallel` waits for at the end of backward."""
    if not isinstance(root, DistributedDataParallel):
        return None
    ranks = tuple(dist.get_process_group_ranks(root.process_group))
    size = sum(p.numel() * p.element_size() for p in root.parameters() if p.requires_grad)
    fingerprint = structure_signature(("gradient_reduction", size))
    return GroupCall(ranks, fingerprint, "gradient_reduction", size, overlapped=True)


def _tokens(values: Sequence[Any]) -> int:
    """Elements of the first tensor of whole numbers among a model's inputs: token ids; 0 where there is none."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32):
            return value.numel()
        if isinstance(value, dict):
            found = _tokens(tuple(value.values()))
            if found:
                return found
    return 0


def _first_differentiable(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return next((found for value in values if (found := _first_differentiable(value)) is not None), None)


def crowding_explains(finding: PaceFinding, own_ms: float | None, waits: Sequence[float | None]) -> bool:
    """Whether a crowded host may be why: the rank waited for a core as its peers did not, and at least as long as its
    step has grown. A sleeping rank waits a little for a core whenever it wakes, without being slow for that."""
    share = waits[finding.position]
    if finding.kind != "compute_straggler" or own_ms is None or share is None or share >= 1.0:
        return False
    grown_ms = own_ms * finding.excess / (1.0 + finding.excess)
    return _stands_out(waits, finding.position) and own_ms * share / (1.0 - share) >= grown_ms


def _stands_out(shares: Sequence[float | None], position: int) -> bool:
    others = _median([share for p, share in enumerate(shares) if p != position])
    own = shares[position]
    return own is not None and own > _CROWDED and own > 2 * (others or 0.0)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
