"""What one rank's observer knows of it: plain frozen values, JSON-ready. Everything that judges works on these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective call of one rank. `state` is `inside`, `returned` or `raised`; `text` says op and call site.

    `step` is the optimizer step within which it was issued, `passes` the forward passes of the model until then.
    """

    sequence: int
    fingerprint: int
    text: str
    state: str
    step: int
    passes: int = 0


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """One process group as one rank saw it: members (global ranks), calls issued, and the newest of them in order."""

    key: int
    members: tuple[int, ...]
    issued: int
    calls: tuple[Call, ...]


@dataclass(frozen=True, kw_only=True)
class ProcessView:
    """The operating system's word on a training process.

    `state` is the letter of /proc (T stopped, R running, S sleeping, D in the kernel, Z dead) or `-` when unknown.
    `cpu` is the share of one core it used lately. `exit_code` is set once it ended (negative: killed by that signal).
    """

    state: str = "-"
    cpu: float = 0.0
    exit_code: int | None = None
    wchan: str = ""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A process that works for a rank, on its batches or its checkpoint.

    `state` as in `ProcessView`, `gone` when it does not exist.
    """

    pid: int
    state: str


@dataclass(frozen=True, kw_only=True)
class RankView:
    """Everything the verdict functions may know of one rank.

    `quiet_s` is how long nothing was published, `threshold_s` how long that is fine in this phase and activity.
    `status` is `alive`, `exited` or `closed` (took SCOUT off itself). `farewell` is `none`, `closed`, `exception`,
    `collective_failed` or `finished` (the interpreter ends in good order), with `farewell_text`. `exception` is one
    being handled right now, if the process could say. `sends` and `receives` are the ranks with which it is in a
    point-to-point operation. `role`: ranks of equal role go through the same layers, so that their positions can be
    compared. `launcher` is the process id of the launcher that it has lost, 0 otherwise.
    """

    rank: int
    host: str = ""
    pid: int = 0
    status: str = "alive"
    quiet_s: float = 0.0
    threshold_s: float = 60.0
    step: int = 0
    micro: int = 0
    stage: int = 0
    phase: str = "train"
    activity: str = "none"
    activity_name: str = ""
    activity_s: float = 0.0
    group: int | None = None
    sequence: int = 0
    process: ProcessView = ProcessView()
    farewell: str = "none"
    farewell_text: str = ""
    exception: str = ""
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    workers: tuple[Worker, ...] = ()
    groups: tuple[GroupView, ...] = ()
    role: int = 0
    launcher: int = 0

    @property
    def stalled(self) -> bool:
        """Whether it lives and has been quiet for longer than its phase allows."""
        return self.status == "alive" and self.quiet_s >= self.threshold_s

    @property
    def position(self) -> tuple[int, int, int]:
        """Optimizer step, passes within it, layer: later is larger."""
        return self.step, self.micro, self.stage

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_json` gives the view back."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RankView:
        """The view that `to_json` wrote."""
        values = dict(record)
        values["process"] = ProcessView(**values["process"])
        values["sends"], values["receives"] = tuple(values["sends"]), tuple(values["receives"])
        values["workers"] = tuple(Worker(**worker) for worker in values["workers"])
        values["groups"] = tuple(
            GroupView(
                key=group["key"],
                members=tuple(group["members"]),
                issued=group["issued"],
                calls=tuple(Call(**call) for call in group["calls"]),
            )
            for group in values["groups"]
        )
        return cls(**values)
