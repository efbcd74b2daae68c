"""The GEMINI tier on one rank: complete training state in host memory, double-buffered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from scout_core.trust.states import TrustState
from scout_core.trust.transfer import Layout, Transfer, lay_out, shapes_of, views
from scout_core.trust.tree import flatten, rebuild


@dataclass(kw_only=True, eq=False)
class Copy:
    """One copied state: `header` is what a safetensors file begins with, `data` uint8 `[bytes]` what follows it.

    `digest` covers both; it is None until the copy is complete, and a copy without one is never used.
    """

    step: int
    owner: int
    state: TrustState
    structure: Any
    header: bytes
    data: torch.Tensor
    digest: str | None = None

    def seal(self) -> str:
        """Take the digest of the content; the copy is complete from then on."""
        self.digest = self.content_digest()
        return self.digest

    def content_digest(self) -> str:
        """128-bit digest of what the file of this copy would hold."""
        digest = xxhash.xxh3_128(self.header)
        digest.update(self.data.numpy().data)
        return digest.hexdigest()

    def intact(self) -> bool:
        """Whether the content still is what was sealed."""
        return self.digest is not None and self.content_digest() == self.digest

    def load(self) -> Any:
        """The training state, as copies. Raises `ValueError` if the content is not what was sealed."""
        if not self.intact():
            raise ValueError(f"the memory copy of step {self.step} of rank {self.owner} is damaged")
        return rebuild(self.structure, [view.clone() for view in views(self.header, self.data)])


@dataclass(kw_only=True, eq=False)
class _Slot:
    """A buffer that is used again for as long as the layout stays."""

    layout: Layout | None = None
    data: torch.Tensor | None = None
    targets: list[torch.Tensor] = field(default_factory=list)


class HostMemory:
    """Two slots: one holds the newest complete copy while the other is written. Local to the rank.

    Between captures both hold one: the older is what a job falls back to when the newer is not complete on all ranks.
    """

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._slots = [_Slot(), _Slot()]
        self._layout: Layout | None = None
        self._streams: dict[torch.device, Any] = {}
        # by slot, newest first; replaced as a whole: what a signal interrupts must not hold a lock that a flush needs
        self._complete: tuple[tuple[int, Copy], ...] = ()

    @property
    def copies(self) -> list[Copy]:
        """The complete copies, newest first: none, one or two."""
        return [copy for _, copy in self._complete]

    @property
    def latest(self) -> Copy | None:
        """The newest complete copy, or None."""
        return next(iter(self.copies), None)

    def begin(self, step: int, state: TrustState, training_state: Any) -> Capture:
        """Start copying. State on the CPU is copied when it returns.

        On CUDA the copies run on a stream of their own, after what the training stream has queued so far; the training
        stream waits for them before its next kernel only through `Capture.hold`. They are launched by `Capture.finish`
        or `Capture.hold`, whichever comes first. Raises `StateError` or `TypeError` for state that cannot be kept.
        """
        flat = flatten(training_state)
        self._complete = self._complete[:1]
        slot = self._slots[1 - self._complete[0][0] if self._complete else 0]
        layout, data = self._fit(slot, flat.tensors)
        transfer = Transfer(layout=layout, sources=flat.tensors, data=data, targets=slot.targets, streams=self._streams)
        transfer.begin()
        copy = Copy(
            step=step, owner=self._owner, state=state, structure=flat.structure, header=layout.header, data=data
        )
        return Capture(self, self._slots.index(slot), copy, transfer)

    def complete(self, index: int, copy: Copy) -> None:
        """Make a sealed copy the newest; the one before stays until the next capture."""
        self._complete = ((index, copy), *self._complete[:1])

    def _fit(self, slot: _Slot, tensors: list[torch.Tensor]) -> tuple[Layout, torch.Tensor]:
        """The layout of this state and the slot's memory for it; both as they were while the state keeps its shape."""
        shapes = shapes_of(tensors)
        if self._layout is None or self._layout.shapes != shapes:
            self._layout = lay_out(shapes)
            for device in self._layout.devices:
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if slot.data is None or slot.layout is not self._layout:
            pinned = bool(self._layout.devices)
            slot.layout, slot.data = self._layout, torch.empty(self._layout.total, dtype=torch.uint8, pin_memory=pinned)
            slot.targets = views(self._layout.header, slot.data)
        return self._layout, slot.data


class Capture:
    """One copy under way."""

    def __init__(self, memory: HostMemory, index: int, copy: Copy, transfer: Transfer) -> None:
        self._memory = memory
        self._index = index
        self._transfer = transfer
        self.copy = copy

    def hold(self) -> None:
        """Let the training stream wait for the copies, on the device: the next update must not overwrite their source.

        Called before the next optimizer step writes; the forward and backward in between overlap with the copies.
        """
        self._transfer.hold()

    def finish(self) -> Copy:
        """Wait for the copies, seal and publish. On any thread; afterwards this copy is the newest.

        Raises `RuntimeError` when the copies failed; the one before then stays the newest.
        """
        self._transfer.wait()
        self.copy.seal()
        self._memory.complete(self._index, self.copy)
        return self.copy
