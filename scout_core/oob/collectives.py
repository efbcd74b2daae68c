"""Watching the public collectives of `torch.distributed` from Python, and taking every patch off again.

Each function is replaced in the modules that export it, and in those that imported its name, by one that records the
call and calls the original. While a graph is traced the original is called alone, so compiled code stays what it was.
Collectives that C++ issues (DDP's reducer, FSDP's streams) are not seen here. Those of background threads are left out:
they keep no order with training's by which ranks could be compared, and go on while training hangs.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from scout_core.oob.calls import FUNCTIONAL, FUNCTIONS, Metadata, described
from scout_core.oob.fingerprints import Described
from scout_core.oob.layout import CallState, Farewell
from scout_core.oob.point_to_point import BATCH, PAIRED, SINGLE, Awaited, argument, batched, partner, single
from scout_core.oob.tally import Members
from scout_core.oob.writer import Publisher
from scout_core.timing.step_clock import NO_CLOCK, Clock, GroupCall

_PACKAGES = (os.path.dirname(os.path.abspath(torch.__file__)), os.path.dirname(os.path.dirname(__file__)))
_DEMO = os.path.join(_PACKAGES[1], "demo")  # a training job like any other
_LEFT_ALONE = ("torch", "scout_core")
_OWN_GROUP = "scout_control"
_OWN_GROUPS = "scout_"
_KEPT_WORKS = 1024


class _Depth(threading.local):
    value = 0


class CollectiveWatch:
    """Installs the patches for one publisher. `close()` puts every original back where this watch had replaced it.

    `clock` is told of the time that calls and waits take.
    """

    def __init__(self, publisher: Publisher, clock: Clock = NO_CLOCK) -> None:
        self._publisher = publisher
        self._clock = clock
        self._inside = _Depth()
        self._closed = False
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._works: OrderedDict[int, tuple[tuple[Members, int] | Awaited, GroupCall | None]] = OrderedDict()
        # weak: a group that was destroyed is not to live on, with its connections, for having been used once
        self._members: WeakKeyDictionary[c10d.ProcessGroup, Members | None] = WeakKeyDictionary()
        for name, (metadata, place) in FUNCTIONS.items():
            self._replace_function(name, metadata, place)
        for name in (*PAIRED, BATCH):
            self._replace_function(name, None, None)
        functional = sys.modules.get("torch.distributed._functional_collectives")
        for name, (metadata, place) in FUNCTIONAL.items() if functional is not None else ():
            original = getattr(functional, name, None)
            if original is not None:
                self._set(functional, name, self._wrap(f"functional.{name}", original, metadata, place))
        if functional is not None:
            self._set(functional, "wait_tensor", self._waiting_for_tensor(functional.wait_tensor))
        self._replace_imported_names()
        for name in SINGLE:
            self._set(c10d.ProcessGroup, name, self._singly(name, getattr(c10d.ProcessGroup, name)))
        self._set(c10d.Work, "wait", self._waiting(c10d.Work.wait))

    def close(self) -> None:
        """Undo every patch that is still in place; a patch that somebody wrapped meanwhile goes quiet instead."""
        for owner, name, replacement, original in reversed(self._undo):
            if owner.__dict__.get(name) is replacement:
                setattr(owner, name, original)
        self._undo.clear()
        self._closed = True
        self._works.clear()
        self._members.clear()

    def _replace_function(self, name: str, metadata: Metadata | None, place: int | None) -> None:
        original = getattr(c10d, name, None)
        if original is None:
            return
        replacement = self._wrap(name, original, metadata, place)
        for module in (c10d, dist):
            if module.__dict__.get(name) is original:
                self._set(module, name, replacement)

    def _replace_imported_names(self) -> None:
        """What `from torch.distributed import all_reduce` left in modules that were loaded before.

        Not in torch's own: its compiler knows collectives by identity.
        """
        replaced = {id(original): replacement for _, _, replacement, original in self._undo}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in _LEFT_ALONE or not issubclass(type(module), ModuleType):
                continue  # what stands in for a module may load it once it is looked into
            for key, value in list(vars(module).items()):
                if id(value) in replaced:
                    self._set(module, key, replaced[id(value)])

    def _set(self, owner: Any, name: str, replacement: Any) -> None:
        self._undo.append((owner, name, replacement, owner.__dict__.get(name)))
        setattr(owner, name, replacement)

    def _wrap(self, name: str, original: Any, metadata: Metadata | None, place: int | None) -> Any:
        publisher = self._publisher

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._aside:
                return original(*args, **kwargs)
            if metadata is None:
                return self._pair(name, original, args, kwargs)
            members = self._group(args, kwargs, place)
            if members is None:
                return original(*args, **kwargs)
            what = described(name, metadata, _call_site(), args, kwargs)
            _, sequence = publisher.begin_call(members, what)
            self._inside.value += 1
            since = self._clock.mark()
            state, result = CallState.RAISED, None
            try:
                result = original(*args, **kwargs)
                state = CallState.RETURNED
            except RuntimeError as error:
                publisher.farewell(Farewell.COLLECTIVE_FAILED, f"{what.text}: {error}")
                raise
            finally:
                self._inside.value -= 1
                later = isinstance(result, c10d.Work)
                call = None if since is None else _timed_call(name, members, what, args, kwargs, later)
                self._clock.waited(since, None if later else call)
                publisher.end_call(members, sequence, state)
            if later:
                self._keep(result, (members, sequence), call)
            return result

        return watched

    def _pair(self, name: str, original: Any, args: Any, kwargs: Any) -> Any:
        """Point to point: progress and whom it waits for, but nothing that all ranks of a group would issue alike."""
        group = argument(args, kwargs, 2, "group") if name != BATCH else None
        if _scouts(group):
            return original(*args, **kwargs)
        each = batched(args, kwargs) if name == BATCH else [partner(name, args, kwargs)]
        ranks = tuple(pair for one in each for pair in one)
        what = f"{name} at {_call_site()}"
        self._publisher.await_ranks(what, ranks)
        self._inside.value += 1
        since = self._clock.mark()
        try:
            result = original(*args, **kwargs)
        except RuntimeError as error:
            self._publisher.farewell(Farewell.COLLECTIVE_FAILED, f"{what}: {error}")
            raise
        finally:
            self._inside.value -= 1
            self._clock.waited(since)
            self._publisher.leave()
        works = result if isinstance(result, list) else [result]
        for index, work in enumerate(works):
            if isinstance(work, c10d.Work):  # NCCL gives one for the whole batch
                self._keep(work, (what, each[index] if len(works) == len(each) else ranks))
        return result

    def _singly(self, name: str, original: Any) -> Any:
        """`isend` and `irecv`: nothing waits yet, and what is waited on later says for whom."""

        @functools.wraps(original)
        def issue(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._aside or _scouts(group):
                return original(group, tensors, *args, **kwargs)
            work = original(group, tensors, *args, **kwargs)
            if isinstance(work, c10d.Work):
                self._keep(work, (f"{SINGLE[name]} at {_call_site()}", single(name, group, args)))
                self._publisher.publish()
            return work

        return issue

    @property
    def _aside(self) -> bool:
        """Whether a call is not to be told of: after `close()`, inside another call, or beside training."""
        return self._closed or self._inside.value > 0 or not self._publisher.training.here()

    def _waiting(self, original: Any) -> Any:
        publisher = self._publisher

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(work, *args, **kwargs)
            known, call = self._works.pop(id(work), (None, None))
            if self._aside:
                return original(work, *args, **kwargs)
            if known is None:  # a group that is not watched
                return self._timed(original, work, args, kwargs)
            if isinstance(known[0], str):
                publisher.await_ranks(*known)
            else:
                publisher.wait_for(*known)
            since = self._clock.mark()
            try:
                return original(work, *args, **kwargs)
            except RuntimeError as error:
                publisher.farewell(Farewell.COLLECTIVE_FAILED, f"waiting for {known[0]}, {known[1]}: {error}")
                raise
            finally:
                self._clock.waited(since, call)
                publisher.leave()

        return wait

    def _waiting_for_tensor(self, original: Any) -> Any:
        @functools.wraps(original)
        def wait(tensor: Any) -> Any:
            if torch.compiler.is_compiling() or self._aside:
                return original(tensor)
            return self._timed(original, tensor, (), {})

        return wait

    def _timed(self, original: Any, work: Any, args: Any, kwargs: Any) -> Any:
        since = self._clock.mark()
        try:
            return original(work, *args, **kwargs)
        finally:
            self._clock.waited(since)

    def _keep(self, work: Any, what: tuple[Members, int] | Awaited, call: GroupCall | None = None) -> None:
        self._works[id(work)] = what, call
        if len(self._works) > _KEPT_WORKS:
            self._works.popitem(last=False)

    def _group(self, args: Any, kwargs: Any, place: int | None) -> Members | None:
        """Global ranks of the group a call is made on; None for SCOUT's own group, and where this rank is no member."""
        group = kwargs.get("group")
        if group is None and place is not None and len(args) > place:
            group = args[place]
        if isinstance(group, list) and group and isinstance(group[0], int):
            return tuple(group)
        group = _resolved(group)
        if not isinstance(group, c10d.ProcessGroup):
            group = c10d.group.WORLD
        if group is None:
            return None
        if group not in self._members:
            try:
                own = group.group_desc == _OWN_GROUP
                self._members[group] = None if own else tuple(dist.get_process_group_ranks(group))
            except (RuntimeError, KeyError):
                self._members[group] = None
        return self._members[group]


def _scouts(group: Any) -> bool:
    return str(getattr(group, "group_desc", "")).startswith(_OWN_GROUPS)


def _resolved(group: Any) -> Any:
    """The process group behind what functional collectives take for one: a mesh, a mesh and a dimension, or a name."""
    if isinstance(group, DeviceMesh):
        return group.get_group()
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        return group[0].get_group(group[1])
    if isinstance(group, str):
        return _resolve_process_group(c10d.GroupName(group))
    return group


def _timed_call(
    name: str, ranks: tuple[int, ...], what: Described, args: Any, kwargs: Any, overlapped: bool
) -> GroupCall:
    size = 0 if "object" in name else _bytes((*args, *kwargs.values()))  # an object may be anything, and of any size
    return GroupCall(ranks, what.fingerprint, name, size, overlapped)


def _bytes(values: Sequence[Any]) -> int:
    """What the tensors among a call's arguments hold."""
    return sum(
        value.numel() * value.element_size() if isinstance(value, torch.Tensor) else _bytes(value)
        for value in values
        if isinstance(value, (torch.Tensor, list))
    )


def _call_site() -> str:
    """File and line of the innermost frame that is neither torch's nor SCOUT's."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGES) or file.startswith(_DEMO):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "torch"
