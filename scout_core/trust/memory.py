"""The GEMINI tier on one rank: complete training state in host memory, double-buffered."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from scout_core.trust.states import TrustState
from scout_core.trust.tree import Flat, flatten, rebuild

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""Words of the safetensors format for dtypes."""


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


def lay_out(flat: Flat) -> tuple[bytes, list[int], int]:
    """Header, byte offset of each tensor, total bytes. Wide elements first, so that all are aligned without gaps."""
    order = sorted(range(len(flat.tensors)), key=lambda i: -flat.tensors[i].element_size())
    entries: dict[str, Any] = {}
    offsets = [0] * len(order)
    position = 0
    for index in order:
        tensor = flat.tensors[index]
        name = _NAMES.get(tensor.dtype)
        if name is None:
            raise TypeError(f"a tensor of {tensor.dtype} cannot be kept; convert it, for instance with view()")
        size = tensor.numel() * tensor.element_size()
        offsets[index] = position
        entries[str(index)] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets, position


def views(header: bytes, data: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in `data` uint8 `[bytes]`, in their numbers' order, sharing its memory."""
    entries = json.loads(header[8:])
    dtypes = {name: dtype for dtype, name in _NAMES.items()}
    found = []
    for index in range(len(entries)):
        entry = entries[str(index)]
        start, stop = entry["data_offsets"]
        found.append(data[start:stop].view(dtypes[entry["dtype"]]).reshape(entry["shape"]))
    return found


@dataclass(kw_only=True, eq=False)
class _Slot:
    """A buffer that is used again for as long as the layout stays."""

    header: bytes = b""
    data: torch.Tensor | None = None
    targets: list[torch.Tensor] = field(default_factory=list)
    copy: Copy | None = None


class HostMemory:
    """Two slots: one holds the newest complete copy while the other is written. Local to the rank."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._slots = [_Slot(), _Slot()]
        self._stream: torch.cuda.Stream | None = None
        self._lock = threading.Lock()
        self._latest: int | None = None

    @property
    def latest(self) -> Copy | None:
        """The newest complete copy, or None."""
        with self._lock:
            return None if self._latest is None else self._slots[self._latest].copy

    def begin(self, step: int, state: TrustState, training_state: Any) -> Capture:
        """Start copying. Returns as soon as the copies are launched; on the CPU they are then done.

        On CUDA the copies run on a stream of their own, after what the training stream has queued so far; the training
        stream waits for them before its next kernel only through `Capture.hold`. Raises `StateError` or `TypeError`
        for state that cannot be kept.
        """
        flat = flatten(training_state)
        slot = self._slots[0 if self._latest is None else 1 - self._latest]
        slot.copy = None
        self._fit(slot, flat)
        assert slot.data is not None
        event = self._launch(flat, slot)
        copy = Copy(
            step=step, owner=self._owner, state=state, structure=flat.structure, header=slot.header, data=slot.data
        )
        return Capture(self, self._slots.index(slot), copy, event)

    def complete(self, index: int, copy: Copy) -> None:
        """Make a sealed copy the newest; the one before stays until the next capture."""
        with self._lock:
            self._slots[index].copy = copy
            self._latest = index

    def _fit(self, slot: _Slot, flat: Flat) -> None:
        header, _, total = lay_out(flat)
        if slot.data is not None and slot.header == header:
            return
        on_gpu = any(t.is_cuda for t in flat.tensors)
        slot.header, slot.data = header, torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        slot.targets = views(header, slot.data)

    def _launch(self, flat: Flat, slot: _Slot) -> torch.cuda.Event | None:
        device = next((t.device for t in flat.tensors if t.is_cuda), None)
        if device is None:
            for target, tensor in zip(slot.targets, flat.tensors, strict=True):
                target.copy_(tensor)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for target, tensor in zip(slot.targets, flat.tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event


class Capture:
    """One copy under way."""

    def __init__(self, memory: HostMemory, index: int, copy: Copy, event: torch.cuda.Event | None) -> None:
        self._memory = memory
        self._index = index
        self._event = event
        self.copy = copy

    def hold(self) -> None:
        """Let the training stream wait for the copies, on the device: the next update must not overwrite their source.

        Called before the next optimizer step writes; the forward and backward in between overlap with the copies.
        """
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def finish(self) -> Copy:
        """Wait for the copies, seal and publish. On any thread; afterwards this copy is the newest."""
        if self._event is not None:
            self._event.synchronize()
        self.copy.seal()
        self._memory.complete(self._index, self.copy)
        return self.copy
