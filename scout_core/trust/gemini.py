"""The GEMINI tier of one rank: capture, replication to a peer on another host, and flush to node-local disk."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch

from scout_core.trust.channel import JobChannel, partners
from scout_core.trust.memory import Capture, Copy, HostMemory
from scout_core.trust.shard import Judge, Shards
from scout_core.trust.states import TrustState

logger = logging.getLogger("scout")


class Gemini:
    """Begins captures on the training thread; sealing, replication and flushes happen on a thread of its own.

    Replication runs on a Gloo group that nothing else uses. All ranks begin the same captures (the boundary's vote
    sees to that), so their background exchanges pair up.
    """

    def __init__(
        self,
        memory: HostMemory,
        shards: Shards | None,
        channel: JobChannel | None,
        *,
        rank: int,
        attempt: int,
        hosts: list[str],
        flush_interval: int,
        judge: Judge = lambda step, attempt: None,
    ) -> None:
        """`judge` says what became of a capture since; it is asked on the background thread."""
        self.memory = memory
        self.failure: str | None = None
        self.kept = -1
        self._held: tuple[Copy, ...] = ()
        self._judge = judge
        self._shards = shards
        self._channel = channel
        self._rank = rank
        self._attempt = attempt
        self._ring = partners(hosts, rank) if channel is not None and channel.size > 1 else None
        self._replicates = self._ring is not None
        self._flush_interval = flush_interval
        self._captures = 0
        self._capture: Capture | None = None
        self._thread: threading.Thread | None = None
        self._disk = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether the last capture is still being sealed, replicated or flushed."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, step: int, state: TrustState, training_state: Any) -> None:
        """Copy the training state of this boundary. Every rank calls at the same step; nothing is waited for."""
        self._capture = self.memory.begin(step, state, training_state)
        self._captures += 1
        flush = self._flush_interval > 0 and self._captures % self._flush_interval == 0
        flush = flush or state is TrustState.CANDIDATE  # memory holds it no longer when the next cycle promotes it
        self._thread = threading.Thread(
            target=self._finish, args=(self._capture, flush), name="scout-gemini", daemon=True
        )
        self._thread.start()

    def take_failure(self) -> str | None:
        """What went wrong since the last call, if anything did. On the training thread."""
        failure, self.failure = self.failure, None
        return failure

    def copies(self) -> list[Copy]:
        """Complete copies, own and held, that were not rejected since, each with what became of it; the newest first.

        Up to two of each: a rank or host that is lost may have had the newest no more.
        """
        found = []
        for copy in sorted([*self.memory.copies, *self._held], key=lambda copy: -copy.step):
            state = self._judge(copy.step, self._attempt)
            if state is not TrustState.REJECTED:
                copy.state = state or copy.state
                found.append(copy)
        return found

    def hold(self) -> None:
        """Before an optimizer step writes: on CUDA, the training stream waits for the copies, the host does not."""
        if self._capture is not None:
            self._capture.hold()
            self._capture = None

    def settle(self, deadline_s: float) -> bool:
        """Wait for the last capture's background work; whether it ended in time."""
        if self._thread is not None:
            self._thread.join(deadline_s)
        return not self.busy

    def flush(self) -> None:
        """Put all complete copies, own and held, on node-local disk. On any thread; raises nothing."""
        if threading.current_thread() is not threading.main_thread():
            self._write_down(self.copies())
            return
        # a signal handler that interrupted it would wait for the disk, which nobody could give up
        writer = threading.Thread(
            target=self._write_down, args=(self.copies(),), name="scout-gemini-flush", daemon=True
        )
        writer.start()
        writer.join()

    def _write_down(self, copies: Sequence[Copy]) -> None:
        shards = self._shards
        if shards is None:
            return
        with self._disk:
            written = set()
            for copy in copies:
                if not copy.intact():
                    continue
                try:
                    shards.write(copy, self._attempt, self._rank)
                    shards.prune(copy.owner, self._rank, self._judge)
                    written.add((copy.owner == self._rank, copy.step))
                except OSError as error:
                    self.failure = f"flushing step {copy.step} to {shards.folder} failed: {error}"
                    logger.error("SCOUT: %s", self.failure)
            own = {step for mine, step in written if mine and (not self._replicates or (False, step) in written)}
            self.kept = max(own, default=self.kept)

    def _finish(self, capture: Capture, flush: bool) -> None:
        try:
            copy = capture.finish()
        except RuntimeError as error:
            self.failure = f"copying step {capture.copy.step} to host memory failed: {error}"
            logger.warning("SCOUT: %s", self.failure)
            return
        if self._ring is not None and self._channel is not None:
            try:
                self._replicate(copy, *self._ring)
            except (RuntimeError, ValueError) as error:
                self._ring = None
                self.failure = f"replication to another host is off from step {copy.step} on: {error}"
                logger.warning("SCOUT: %s", self.failure)
        if flush:
            # the ones before are on disk since their own flush, or were not to be flushed
            self._write_down([one for one in self.copies() if one.step == copy.step])

    def _replicate(self, copy: Copy, to: int, source: int) -> None:
        assert self._channel is not None
        meta = pack_meta(copy)
        incoming = _exchange_bytes(self._channel, meta, to, source)
        size = torch.zeros(1, dtype=torch.int64)
        self._channel.exchange(torch.tensor([copy.data.numel()]).view(torch.uint8), to, size.view(torch.uint8), source)
        self._held = self._held[:1]
        data = torch.empty(int(size.item()), dtype=torch.uint8)
        self._channel.exchange(copy.data, to, data, source)
        received = unpack_meta(bytes(incoming.numpy()), data)
        if not received.intact():
            raise ValueError(f"the copy received from rank {source} does not fit its digest")
        self._held = (received, *self._held)


def _exchange_bytes(channel: JobChannel, data: bytes, to: int, source: int) -> torch.Tensor:
    length = torch.zeros(1, dtype=torch.int64)
    channel.exchange(torch.tensor([len(data)]).view(torch.uint8), to, length.view(torch.uint8), source)
    into = torch.empty(int(length.item()), dtype=torch.uint8)
    channel.exchange(torch.frombuffer(bytearray(data), dtype=torch.uint8), to, into, source)
    return into


def pack_meta(copy: Copy) -> bytes:
    """Everything of a copy but its data, as JSON bytes."""
    values = {
        "step": copy.step,
        "owner": copy.owner,
        "state": copy.state.value,
        "structure": copy.structure,
        "header": copy.header[8:].decode(),
        "digest": copy.digest,
    }
    return json.dumps(values, allow_nan=False).encode()


def unpack_meta(meta: bytes, data: torch.Tensor) -> Copy:
    """A copy from `pack_meta` and its data, uint8 `[bytes]`; not verified yet."""
    values = json.loads(meta)
    header = values["header"].encode()
    return Copy(
        step=values["step"],
        owner=values["owner"],
        state=TrustState(values["state"]),
        structure=values["structure"],
        header=len(header).to_bytes(8, "little") + header,
        data=data,
        digest=values["digest"],
    )
