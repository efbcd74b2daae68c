"""Watching the collectives that a replayed module runs: what this rank put in, and how long they took.

The inputs say where corruption came from when it travels: ranks that work in lockstep receive each other's errors, but
each one's input to the first collective is its own work alone. The times tell a slow rank from one that waits for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from scout_core.replay.evidence import Collectives
from scout_core.replay.isolation import Stopwatch
from scout_core.replay.trees import map_tensors

_INPUTS: dict[str, int | None] = {
    # c10d: where the operator takes what this rank contributes; None: nothing that could be signed beforehand
    "c10d.allreduce_": 0,
    "c10d.allreduce_coalesced_": 0,
    "c10d.reduce_": 0,
    "c10d.broadcast_": 0,
    "c10d.allgather_": 1,
    "c10d._allgather_base_": 1,
    "c10d.allgather_coalesced_": 1,
    "c10d.allgather_into_tensor_coalesced_": 1,
    "c10d.reduce_scatter_": 1,
    "c10d._reduce_scatter_base_": 1,
    "c10d.reduce_scatter_tensor_coalesced_": 1,
    "c10d.alltoall_": 1,
    "c10d.alltoall_base_": 1,
    "c10d.gather_": 1,
    "c10d.scatter_": 1,
    "c10d.send": 0,
    "c10d.recv_": None,
    "c10d.recv_any_source_": None,
    "c10d.barrier": None,
    "_c10d_functional.all_reduce": 0,
    "_c10d_functional.all_reduce_": 0,
    "_c10d_functional.all_reduce_coalesced": 0,
    "_c10d_functional.all_gather_into_tensor": 0,
    "_c10d_functional.all_gather_into_tensor_out": 0,
    "_c10d_functional.all_gather_into_tensor_coalesced": 0,
    "_c10d_functional.reduce_scatter_tensor": 0,
    "_c10d_functional.reduce_scatter_tensor_coalesced": 0,
    "_c10d_functional.all_to_all_single": 0,
    "_c10d_functional.broadcast": 0,
    "_c10d_functional.broadcast_": 0,
}
_SPLIT = ("c10d.alltoall_base_", "_c10d_functional.all_to_all_single")
"""Operators that take the number of rows for each rank, as lists; the first leaves them empty for equal shares."""
_LISTED = ("c10d.alltoall_",)
_ROOTED = ("c10d.broadcast_", "c10d.scatter_", "_c10d_functional.broadcast", "_c10d_functional.broadcast_")
_POINT_TO_POINT = ("c10d.send", "c10d.recv_", "c10d.recv_any_source_")
_DESUGARED = ("DTensor", "AsyncCollectiveTensor")
_WAIT = "_c10d_functional.wait_tensor"


@dataclass(kw_only=True)
class TappedCall:
    """One collective: operator, global ranks of its group, bytes put in, and its stopwatches.

    `repeat()` issues it once more on fresh memory of the same sizes, for partners that wait in it. `free`: its sizes,
    or through integers that it carries those of later calls, may hang on the data and be others the next time.
    """

    operator: str
    ranks: tuple[int, ...]
    size: int
    repeat: Callable[[], object]
    free: bool = False
    watches: list[Stopwatch] = field(default_factory=list)

    def elapsed_us(self) -> int:
        """Time in the collective and in waiting for it; on a GPU this waits for the work to end."""
        return sum(watch.read().wall_us for watch in self.watches)


class CollectiveTap(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every collective issued within the block, in order, also those of backward and of DTensors.

    `signed` has, per call, the signatures of what this rank contributes, taken before the call, which may write into
    it; None where it contributes nothing. `before(index, operator)` is called before each collective; what it raises
    keeps this rank from entering. A synchronous call is waited for at once, so that its time is its own.
    """

    def __init__(
        self,
        device: torch.device,
        sign: Callable[[list[torch.Tensor]], torch.Tensor],
        before: Callable[[int, str], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[TappedCall] = []
        self.signed: list[torch.Tensor | None] = []
        self.begun = 0
        self.forward_ended = 0
        self._device = device
        self._sign = sign
        self._before = before

    @property
    def replayed(self) -> list[TappedCall]:
        """The collectives of the replay itself, without those that gathered parameters."""
        return self.calls[self.begun :]

    def collectives(self) -> Collectives:
        """The evidence on `replayed`."""
        signed = self.signed[self.begun :]
        labels = [
            f"{call.operator}[{i}]"
            for i, (call, vector) in enumerate(zip(self.replayed, signed, strict=True))
            for _ in range(1 if vector is None else vector.numel())
        ]
        return Collectives(signed=signed, forward=max(self.forward_ended - self.begun, 0), labels=labels)

    def begin(self) -> None:
        """Parameters are whole; what comes from now on belongs to the replay itself."""
        self.begun = len(self.calls)

    def end_forward(self) -> None:
        """What comes from now on belongs to backward."""
        self.forward_ended = len(self.calls)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        namespace = getattr(func, "namespace", "")
        if any(kind.__name__ in _DESUGARED for kind in types):
            # these first turn into what they do locally, whose collectives then come by here
            return NotImplemented
        if namespace not in ("c10d", "_c10d_functional"):
            return func(*args, **kwargs)
        name = f"{namespace}.{func._opname}"
        if name == _WAIT:
            return self._timed(self.calls[-1] if self.calls else None, lambda: func(*args, **kwargs))
        if name not in _INPUTS:
            return func(*args, **kwargs)
        return self._collective(name, func, args, kwargs)

    def _collective(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group = _group_of(args, kwargs)
        given = self._contribution(name, args, group)
        call = TappedCall(
            operator=name.partition(".")[2].strip("_"),
            ranks=tuple(dist.get_process_group_ranks(group)) if group is not None else (),
            size=sum(t.numel() * t.element_size() for t in given),
            repeat=_repeatable(name, func, args, kwargs),
            free=_hangs_on_data(name, args, given),
        )
        self._before(len(self.calls), name)
        self.calls.append(call)
        self.signed.append(self._sign(given) if given else None)
        return self._timed(call, lambda: _waited(name, func(*args, **kwargs)))

    def _contribution(self, name: str, args: tuple[Any, ...], group: Any) -> list[torch.Tensor]:
        place = _INPUTS[name]
        if place is None or (name in _ROOTED and not _is_root(args, group)):
            return []
        return _tensors(args[place])

    def _timed(self, call: TappedCall | None, work: Callable[[], Any]) -> Any:
        with Stopwatch(self._device) as watch:
            result = work()
        if call is not None:
            call.watches.append(watch)
        return result


def _hangs_on_data(name: str, args: Sequence[Any], given: Sequence[torch.Tensor]) -> bool:
    """See `TappedCall.free`. Routing to experts sends counts first, then as many rows."""
    split = name in _LISTED or (name in _SPLIT and any(isinstance(value, (list, tuple)) and value for value in args))
    return split or not all(tensor.is_floating_point() or tensor.is_complex() for tensor in given)


def _repeatable(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
    """The call with its sizes kept and its tensors forgotten."""
    hollow_args, hollow_kwargs = map_tensors(lambda t: torch.empty_like(t, device="meta"), (args, kwargs))
    device = next((t.device for t in _tensors(list(args))), torch.device("cpu"))

    def repeat() -> object:
        fresh = map_tensors(lambda t: torch.zeros_like(t, device=device), (hollow_args, hollow_kwargs))
        return _waited(name, func(*fresh[0], **fresh[1]))

    return repeat


def _waited(name: str, result: Any) -> Any:
    """Wait for a call of `torch.distributed` itself; not for point to point, whose other end may come later."""
    if name.startswith("c10d.") and name not in _POINT_TO_POINT:
        work = result[-1] if isinstance(result, (tuple, list)) else result
        handle = dist.Work.unbox(work) if isinstance(work, torch.ScriptObject) else None
        if handle is not None:  # NCCL gives none for a call that is synchronous anyway
            handle.wait()
    return result


def _group_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The process group among an operator's arguments: an object under `c10d`, the last text otherwise."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except RuntimeError:  # a reduction operator travels as an object too
                continue
    resolve: Any = c10d.__dict__["_resolve_process_group"]  # not exported; torch 2.10 to 2.13
    names = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
    return resolve(names[-1]) if names else None


def _is_root(args: Sequence[Any], group: Any) -> bool:
    """Whether this rank is the root of a broadcast or scatter: the first integer names it within the group."""
    root = next((value for value in args if isinstance(value, int) and not isinstance(value, bool)), 0)
    return group is None or group.rank() == root


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    if isinstance(value, (list, tuple)):
        return reduce(operator.iadd, (_tensors(item) for item in value), [])
    return []
