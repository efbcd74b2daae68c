"""The rank's side of the pool: what runs in each forked process."""

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

# Dumps the Python stacks of all threads. A real-time signal, since code under test may want the user signals.
STACKS_SIGNAL = signal.SIGRTMIN + 7
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class FunctionRef:
    """A module-level function, by name; the file finds test modules that are on no import path."""

    module: str
    file: str
    qualname: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> "FunctionRef":
        if "<" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} lives inside another function; ranks can only find module-level ones")
        return cls(module=fn.__module__, file=fn.__code__.co_filename, qualname=fn.__qualname__)

    def load(self) -> Callable[..., Any]:
        found: Any = _module(self.module, self.file)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        assert callable(found)
        return found


@dataclass(frozen=True, kw_only=True)
class Call:
    """One function for every rank. `payload` is pickled apart: it may need the function's module to be unpickled."""

    function: FunctionRef
    payload: bytes
    world: int
    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """An exception that a rank's function raised: its type's name, its text and the formatted traceback."""

    rank: int
    kind: str
    message: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a call came to: a value, or a failure."""

    value: Any = None
    failure: RankFailure | None = None


@dataclass(frozen=True, kw_only=True)
class RankSeat:
    """What a rank needs to take its place."""

    rank: int
    world_size: int
    backend: str
    store_port: int
    stacks_file: str


def rank_main(seat: RankSeat, link: Connection) -> None:
    """Answer calls until the parent hangs up."""
    _die_with_parent()
    with open(seat.stacks_file, "w") as stacks:
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        store = _take_seat(seat)
        gc.collect()
        gc.freeze()  # what the fork server imported is never garbage; collecting after a call need not walk it
        link.send_bytes(b"ready")
        try:
            while True:
                link.send_bytes(_answer(seat, store, pickle.loads(link.recv_bytes())))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            _leave_world()
        faulthandler.unregister(STACKS_SIGNAL)


def _answer(seat: RankSeat, store: Any, call: Call) -> bytes:
    # The one broad catch: whatever a test's function raises belongs to the test, in the parent.
    try:
        function = call.function.load()
        args, kwargs = pickle.loads(call.payload)
        _enter_world(seat, store, call)
        reply = pickle.dumps(Reply(value=function(*args, **kwargs)))
    except Exception as error:  # noqa: BLE001
        failure = RankFailure(
            rank=seat.rank, kind=type(error).__name__, message=str(error), traceback=traceback.format_exc().rstrip()
        )
        reply = pickle.dumps(Reply(failure=failure))
    return reply


def _enter_world(seat: RankSeat, store: Any, call: Call) -> None:
    """A process group, group names counted from zero, and a seed for this call alone."""
    import torch
    import torch.distributed as dist

    _leave_world()
    # Longer than the caller waits, so that a stuck collective is shown by its stacks and not cut short by Gloo.
    timeout = timedelta(seconds=call.deadline_s + 30)
    store.set_timeout(timeout)
    dist.init_process_group(
        seat.backend,
        store=dist.PrefixStore(f"call{call.world}", store),
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timeout,
    )
    dist.barrier()  # Gloo's own start waits for nobody: a rank that ends at once would break the others' start
    torch.manual_seed(0)


def _leave_world() -> None:
    """Not before every rank has answered: to one still inside a collective it would look like a crash of this one."""
    import torch.distributed as dist

    gc.collect()  # modules and reducers of the earlier call hold its groups
    if dist.is_initialized():
        dist.destroy_process_group()


def _take_seat(seat: RankSeat) -> Any:
    """This process as one that torchrun started; returns its connection to the store, the only one it opens."""
    import torch
    import torch.distributed as dist

    from scout_core.config import OobConfig, ScoutConfig

    # An observer process at each of the hundreds of attaches would take longer than the tests; those of the
    # out-of-band path switch it on.
    OobConfig.model_fields["oob_enabled"].default = False
    OobConfig.model_rebuild(force=True)
    ScoutConfig.model_rebuild(force=True)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(seat.rank),
        WORLD_SIZE=str(seat.world_size),
        LOCAL_RANK=str(seat.rank),
        LOCAL_WORLD_SIZE=str(seat.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(seat.store_port),
        GLOO_SOCKET_IFNAME="lo",
    )
    return dist.TCPStore("127.0.0.1", seat.store_port, is_master=False)


def _module(name: str, file: str) -> Any:
    if name in sys.modules:
        return sys.modules[name]
    if importlib.util.find_spec(name.partition(".")[0]) is not None:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _die_with_parent() -> None:
    """SIGKILL for this process as soon as the fork server ends, which it does when the tests' process does.

    The server ends once nobody holds the writing end of its pipe. Python (3.10 to 3.14) hands that end to every
    child so that it can use the same server; a rank gives it up, or it would keep its own parent alive.
    """
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() == 1:  # the parent went before the request was in force
        os._exit(1)
