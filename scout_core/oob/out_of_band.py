"""The out-of-band path of one rank, composed: what `attach()` starts and the handle hands on to."""

from __future__ import annotations

import atexit
import functools
import mmap
import os
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import nn
from torch.distributed import distributed_c10d as c10d

from scout_core.config import OobConfig, ScoutConfig
from scout_core.consensus.readiness import DIGEST_FIELDS, Reason
from scout_core.consensus.standing import GROUP_WORDS
from scout_core.oob.channel import Channel, ChannelBusy, Scope, start_ticks, sweep
from scout_core.oob.collectives import CollectiveWatch
from scout_core.oob.digest import exchange, explain
from scout_core.oob.findings import Finding
from scout_core.oob.instrument import Checkpoints, CompileWatch, ModelWatch, WatchedLoader
from scout_core.oob.layout import SIZE, Farewell, Phase
from scout_core.oob.reader import read_farewell
from scout_core.oob.rendezvous import LOCAL, Meeting, Run, meeting_of, muster, this_run
from scout_core.oob.scratch import make_scratch, sweep_scratch
from scout_core.oob.seat import Seat
from scout_core.oob.supervisor import STACKS_SIGNAL, ObserverLost, Supervisor, register_stacks
from scout_core.oob.tally import TalliedCalls
from scout_core.oob.writer import Publisher
from scout_core.peers import PeerGroup
from scout_core.replay.guard import logger
from scout_core.timing.live import LiveWatch
from scout_core.timing.step_clock import NO_CLOCK, Clock

T = TypeVar("T")
_attached = 0
_live: weakref.WeakSet[Publisher] = weakref.WeakSet()


def _forget_in_child() -> None:
    for publisher in list(_live):
        publisher.detach()


os.register_at_fork(after_in_child=_forget_in_child)


class OutOfBand:
    """Publisher, patches, observer and supervisor of one rank. Every rank in `peers` constructs one at attach.

    No collectives; the ranks agree on the rendezvous through the job's store. `watched` are the ranks whose observers
    confer if they are not too many, else and when empty those of the peers; `stage` those of them that go through the
    same layers. `on_report(record, deliver)` and `on_lost(reason)` are called in a thread of this process. `clock` is
    told what live steps wait for. With `oob_enabled=False` everything here does nothing.
    """

    def __init__(
        self,
        config: ScoutConfig,
        peers: PeerGroup,
        *,
        watched: tuple[int, ...] = (),
        stage: tuple[int, ...] = (),
        root: nn.Module,
        layers: Mapping[int, nn.Module],
        compiled: bool,
        on_report: Callable[[dict[str, Any], bool], None],
        on_lost: Callable[[str], None],
        clock: Clock = NO_CLOCK,
    ) -> None:
        global _attached
        _attached += 1
        self._config: OobConfig = config.oob
        self._peers = peers
        self._watched = watched if 1 < len(watched) <= config.oob.oob_max_ranks else peers.ranks
        self._role = min(stage, default=0)
        self._on_lost = on_lost
        self._clock = clock
        self._lost = ""
        self._raised = False
        self._publisher: Publisher | None = None
        self._supervisor: Supervisor | None = None
        self._undo: list[Callable[[], None]] = []
        self._channel: Channel | None = None
        if not config.oob.oob_enabled:
            return
        sweep()
        sweep_scratch()
        run = this_run()
        scope = Scope(
            run=run.run, attempt=run.attempt, pid=os.getpid(), peers=peers.ranks, rank=peers.rank, ordinal=_attached
        )
        problem = self._prepare(scope)
        # without a segment the calls are counted all the same: the digests of a check are to be those of its peers
        memory = self._channel.memory if self._channel is not None else mmap.mmap(-1, SIZE)
        self._publisher = publisher = Publisher(memory, peers.ranks)
        self._undo.append(publisher.detach)  # what training still holds of it writes nowhere then
        _live.add(publisher)
        self._start_observer(config, run, on_report, problem)
        self._undo.append(CollectiveWatch(publisher, clock).close)
        self._undo.append(ModelWatch(publisher, root, {} if compiled else layers).close)
        if not compiled:
            self._undo.append(LiveWatch(root, clock).close)
        self._compiler = CompileWatch(publisher)
        self._compiler.look()
        self._undo.append(self._compiler.close)
        self._undo.append(_watch_exceptions(publisher))
        self._undo.append(_watch_exit(publisher, memory))

    @property
    def enabled(self) -> bool:
        """Whether this rank publishes."""
        return self._publisher is not None

    @property
    def observer_pid(self) -> int | None:
        """Process id of this rank's observer, None without one and when it was lost."""
        return self._supervisor.process.pid if self._supervisor is not None and not self._lost else None

    @property
    def digest(self) -> int:
        """Rolling word over the collectives since the last check; 0 when nothing is published."""
        return self._publisher.tally.digest if self._publisher is not None else 0

    def boundary(self, step: int) -> None:
        """An optimizer step is done. Raises `ObserverLost` once when protection is gone and the policy is to stop."""
        if self._publisher is None:
            return
        self._publisher.boundary(step)
        self._compiler.look()
        if self._lost and self._config.oob_failure == "raise" and not self._raised:
            self._raised = True
            raise ObserverLost(
                f"the out-of-band observer of rank {self._peers.rank} is lost ({self._lost}); "
                "restart the job, or set oob_failure='warn' to go on without it"
            )

    def group_words(self, ranks: Sequence[int]) -> list[int]:
        """For a check among these ranks: words over the collectives since the last one, by process group."""
        return self._publisher.tally.words(ranks) if self._publisher is not None else [0] * GROUP_WORDS

    def explain_digest(self, reasons: Sequence[Reason], partners: PeerGroup) -> tuple[Finding | None, bool]:
        """The first divergent call, where a check's reasons say that words differ, and whether this column tells it.

        Every peer calls after a check, and every one of their `partners`. No collective when words agree; else one
        object gather among the partners, unless the peers alone know of it, and one among the peers.
        """
        fields = {reason.field for reason in reasons}
        if fields.isdisjoint(DIGEST_FIELDS):
            return None, True
        if "collective_digest" not in fields:
            partners = PeerGroup(ranks=(self._peers.rank,), rank=self._peers.rank, control=None)
        own = self._publisher.tally.calls() if self._publisher is not None else TalliedCalls(groups={}, calls=[])
        return explain(exchange(own, self._peers, partners)), partners.position == 0

    def reset_digest(self) -> None:
        """Begin a new digest: the calls so far have been compared."""
        if self._publisher is not None:
            self._publisher.tally.reset()

    def watch_loader(self, loader: Iterable[T], name: str) -> Iterable[T]:
        """The loader, its `next()` calls published; the loader itself when nothing is published."""
        return loader if self._publisher is None else WatchedLoader(loader, name, self._publisher, self._clock)

    def checkpoint_io(self, direction: Literal["read", "write"], name: str) -> AbstractContextManager[None]:
        """A block that reads or writes a checkpoint."""
        if direction not in ("read", "write"):
            raise ValueError(f"direction={direction!r}; give 'read' or 'write'")
        return self._io(direction, name)

    @contextmanager
    def _io(self, direction: str, name: str) -> Iterator[None]:
        if self._publisher is None or not self._publisher.training.here():  # a saver's thread holds nobody up
            yield
            return
        self._clock.spoil()
        self._files = getattr(self, "_files", None) or Checkpoints(self._publisher)
        with self._files.io(direction, name):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A block in the phase `startup`, `compile`, `train`, `eval`, `checkpoint` or `teardown`, with its grace."""
        phase = Phase[name.upper()]
        publisher = self._publisher  # the block may close
        if publisher is None or not publisher.training.here():
            yield
            return
        self._clock.spoil()
        before = publisher.phase
        publisher.set_phase(phase)
        try:
            yield
        finally:
            publisher.set_phase(before)

    def close(self) -> None:
        """Take off every patch and hook, see the observer off, remove the segment. A second call does nothing."""
        if self._publisher is None:
            return
        publisher, self._publisher = self._publisher, None
        publisher.farewell(Farewell.CLOSED)
        if self._supervisor is not None:
            self._supervisor.close()
        while self._undo:
            self._undo.pop()()

    # -- start ----------------------------------------------------------------------------------------------------

    def _prepare(self, scope: Scope) -> str:
        """Make what the observer reads and writes; what stands in the way, which costs the rank its observer alone."""
        try:
            self._channel = channel = Channel.create(scope, world=self._peers.size)
            self._undo.append(lambda: channel.close(unlink=True))
            self._folder = self._state_folder()
            self._stacks = self._folder / f"stacks-{self._peers.rank}-{os.getpid()}"
            self._undo.append(register_stacks(self._stacks).close)
        except (OSError, ChannelBusy) as error:
            return str(error) or repr(error)
        return ""

    def _state_folder(self) -> Path:
        if self._config.hang_state_dir is not None:
            self._config.hang_state_dir.mkdir(parents=True, exist_ok=True)
            return self._config.hang_state_dir
        folder, remove = make_scratch()
        self._undo.append(remove)
        return folder

    def _start_observer(
        self, config: ScoutConfig, run: Run, on_report: Callable[[dict[str, Any], bool], None], problem: str
    ) -> None:
        """Start it and wait until it watches. A rank with a `problem` only tells the others not to wait for it."""
        rank, watched, timeout = self._peers.rank, self._watched, config.oob.oob_ready_timeout_s
        store: Any = None
        absent: tuple[int, ...] = ()
        nonce, leads = "", False
        try:
            if len(watched) > 1:
                store = c10d.PrefixStore(f"scout-oob/{run.attempt}/{watched[0]}/{_attached}", c10d._get_default_store())
                absent, nonce = muster(store, rank, watched, problem, timeout)
            if problem:
                raise ObserverLost(problem)
            present = tuple(each for each in watched if each not in absent)
            meeting = meeting_of(config.oob, run, present, _attached, "TORCHELASTIC_RUN_ID" in os.environ, nonce)
            if meeting.file is not None and rank == present[0]:
                self._undo.append(functools.partial(meeting.file.absolute().unlink, missing_ok=True))
            meets = meeting.file is None and len(present) > 1
            leads = meets and rank == present[0]
            assert self._publisher is not None
            self._publisher.stacks_signal(STACKS_SIGNAL)
            seat = self._seat(config, run, absent, meeting, leads)
            self._supervisor = Supervisor(seat, on_report, self._observer_lost)
            if meets:
                self._agree(store, meeting, leads)
            self._supervisor.hear("ready", timeout)
        except (ObserverLost, OSError, RuntimeError) as error:
            if leads:
                with suppress(RuntimeError):  # the store may be what is lost
                    store.set("where", f"||{error}")  # so that nobody waits for it
            self._observer_lost(str(error))

    def _seat(self, config: ScoutConfig, run: Run, absent: tuple[int, ...], meeting: Meeting, leads: bool) -> Seat:
        assert self._channel is not None
        return Seat(
            rank=self._peers.rank,
            peers=self._watched,
            absent=absent,
            role=self._role,
            pid=os.getpid(),
            thread=threading.get_native_id(),
            start_ticks=start_ticks(os.getpid()) or 0,
            launcher=os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0,
            channel=self._channel.name,
            token=self._channel.token.hex(),
            run=run.run,
            attempt=run.attempt,
            port=meeting.port if leads else None,
            file=meeting.file.absolute() if meeting.file is not None else None,
            run_dir=config.run_dir.absolute() if config.run_dir is not None else None,
            state_dir=self._folder.absolute(),
            stacks=self._stacks.absolute(),
            config=config.oob,
        )

    def _agree(self, store: Any, meeting: Meeting, leads: bool) -> None:
        """The first rank says through the job's store where its observer listens; every rank logs a move."""
        assert self._supervisor is not None
        timeout = self._config.oob_ready_timeout_s
        if leads:
            told = self._supervisor.hear("listening", timeout)
            address = meeting.address
            if address == LOCAL and not _one_host():
                address = socket.gethostname()
            store.set("where", f"{address}|{told['listening']}|{told['note']}")
        store.wait(["where"], timedelta(seconds=timeout))
        address, port, note = store.get("where").decode().split("|", 2)
        if not port:
            raise ObserverLost(f"the observer where all meet is lost: {note}")
        if note:
            logger.warning("SCOUT: out-of-band rendezvous: %s", note)
        if not leads:
            self._supervisor.tell({"address": address, "port": int(port)})

    def _observer_lost(self, reason: str) -> None:
        if not self._lost:
            self._lost = reason
            self._on_lost(reason)


def _one_host() -> bool:
    """Whether all ranks run on this host, as far as torchrun says."""
    return os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")


def _watch_exceptions(publisher: Publisher) -> Callable[[], None]:
    """Note the exception that ends the process before whoever handles it does; returns the undo."""
    before = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, Exception) or kind is KeyboardInterrupt:
            text = "".join(traceback.format_exception(kind, error, trace))
            publisher.farewell(Farewell.EXCEPTION, text)
        before(kind, error, trace)

    sys.excepthook = note

    def undo() -> None:
        if sys.excepthook is note:
            sys.excepthook = before

    return undo


def _watch_exit(publisher: Publisher, memory: mmap.mmap) -> Callable[[], None]:
    """Note that the interpreter ends in good order: on older kernels nobody tells the exit code of who was reaped."""

    def note() -> None:
        if read_farewell(memory)[0] is Farewell.NONE:  # an exception says more
            publisher.farewell(Farewell.FINISHED)

    atexit.register(note)
    return functools.partial(atexit.unregister, note)
