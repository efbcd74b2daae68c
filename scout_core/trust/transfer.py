"""Bringing live tensors to host memory with as little of the training thread's time as can be.

What the training thread does for each tensor is what a capture costs. So a layout is worked out once for as long as the
state keeps its shape; small tensors on a device are gathered there by one kernel and leave in one piece; and the copies
that remain are launched by one call, which holds no interpreter lock, on the thread that later seals the copy.

The stagers of `torch.distributed.checkpoint` (`DefaultStager`, `StateDictStager`) also reuse pinned memory and copy off
the training thread, but do not fit: their stream neither waits for the training stream nor can that be made to wait for
it, so the host must be held until all is copied; and each storage has a place of its own, which the next staging
overwrites, where here one run of bytes per capture is sealed, sent in chunks and written, and the one before stays.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

SMALL_BYTES = 64 << 10
"""Up to this size a device-to-host copy takes longer to launch than to run, on PCIe and faster links."""
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""Words of the safetensors format for dtypes."""
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
Shape = tuple[torch.dtype, torch.Size, torch.device]


def views(header: bytes, data: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in `data` uint8 `[bytes]`, in their numbers' order, sharing its memory."""
    entries = json.loads(header[8:])
    found = []
    for index in range(len(entries)):
        entry = entries[str(index)]
        start, stop = entry["data_offsets"]
        found.append(data[start:stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"]))
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Gathered:
    """Small tensors of one device that lie side by side in the copy: bytes `start` to `stop`.

    `buffer` uint8 `[stop - start]` on the device is where they are put together; `targets` are its views of one dtype
    each, by the numbers in `members`.
    """

    device: torch.device
    start: int
    stop: int
    buffer: torch.Tensor
    members: list[list[int]]
    targets: list[list[torch.Tensor]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Where each tensor of a state goes, worked out for tensors of `shapes`. `header` begins a safetensors file.

    `host` are the numbers of tensors that are copied at once, as those in host memory are, `direct` those that leave
    their CUDA device one by one, `gathered` the others.
    """

    shapes: list[Shape]
    header: bytes
    total: int
    host: list[int]
    direct: dict[torch.device, list[int]]
    gathered: list[Gathered]

    @property
    def devices(self) -> list[torch.device]:
        """The devices that copies leave."""
        return list(dict.fromkeys([*self.direct, *(one.device for one in self.gathered)]))


def shapes_of(tensors: Sequence[torch.Tensor]) -> list[Shape]:
    """What a layout depends on."""
    return [(t.dtype, t.shape, t.device) for t in tensors]


def lay_out(shapes: list[Shape], small_bytes: int = SMALL_BYTES) -> Layout:
    """Header and places. Wide elements first, so that all are aligned without gaps. Raises `TypeError` for a dtype.

    Tensors of at most `small_bytes` on a device come after the others of their element size, together.
    """
    sizes = [dtype.itemsize * shape.numel() for dtype, shape, _ in shapes]
    small = [
        device if device.type == "cuda" and size <= small_bytes else None
        for (_, _, device), size in zip(shapes, sizes, strict=True)
    ]
    order = sorted(range(len(shapes)), key=lambda i: (-shapes[i][0].itemsize, str(small[i] or ""), str(shapes[i][0])))
    entries: dict[str, Any] = {}
    places: dict[int, tuple[int, int]] = {}
    position = 0
    for index in order:
        dtype, shape, _ = shapes[index]
        name = NAMES.get(dtype)
        if name is None:
            raise TypeError(f"a tensor of {dtype} cannot be kept; convert it, for instance with view()")
        places[index] = (position, position + sizes[index])
        entries[str(index)] = {"dtype": name, "shape": list(shape), "data_offsets": list(places[index])}
        position += sizes[index]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    together: dict[tuple[torch.device, int], list[int]] = {}
    direct: dict[torch.device, list[int]] = {}
    for index in order:
        device, gather = shapes[index][2], small[index]
        if gather is not None:
            together.setdefault((gather, shapes[index][0].itemsize), []).append(index)
        elif device.type == "cuda":
            direct.setdefault(device, []).append(index)
    return Layout(
        shapes=shapes,
        header=len(text).to_bytes(8, "little") + text,
        total=position,
        host=[index for index, (_, _, device) in enumerate(shapes) if device.type != "cuda"],
        direct=direct,
        gathered=[_gather(device, indices, shapes, places) for (device, _), indices in together.items()],
    )


def _gather(
    device: torch.device, indices: list[int], shapes: list[Shape], places: dict[int, tuple[int, int]]
) -> Gathered:
    start, stop = places[indices[0]][0], places[indices[-1]][1]
    buffer = torch.empty(stop - start, dtype=torch.uint8, device=device)
    members: dict[torch.dtype, list[int]] = {}
    targets: dict[torch.dtype, list[torch.Tensor]] = {}
    for index in indices:
        dtype, shape, _ = shapes[index]
        part = buffer[places[index][0] - start : places[index][1] - start]
        members.setdefault(dtype, []).append(index)
        targets.setdefault(dtype, []).append(part.view(dtype).reshape(shape))
    return Gathered(
        device=device,
        start=start,
        stop=stop,
        buffer=buffer,
        members=list(members.values()),
        targets=list(targets.values()),
    )


@dataclass(kw_only=True, eq=False)
class Transfer:
    """One run of the copies of a layout into `data`, whose views are `targets`. Begun on the training thread.

    `sources` are held until the copies are done: so their memory cannot be given to others meanwhile.
    """

    layout: Layout
    sources: list[torch.Tensor]
    data: torch.Tensor
    targets: list[torch.Tensor]
    streams: dict[torch.device, Any]
    _ready: dict[torch.device, Any] = field(default_factory=dict)
    _events: dict[torch.device, Any] = field(default_factory=dict)
    _launched: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Copy what is in host memory, gather what is small, and mark the place in the training stream to copy from."""
        for one in self.layout.gathered:
            for targets, members in zip(one.targets, one.members, strict=True):
                torch._foreach_copy_(targets, [self.sources[i] for i in members])
        for device in self.layout.devices:
            self._ready[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready[device].record(torch.cuda.current_stream(device))
        _copy(self.targets, self.sources, self.layout.host, non_blocking=False)

    def launch(self) -> None:
        """Launch what is left, once, on streams of their own. On any thread; a second caller waits for the first."""
        with self._lock:
            if self._launched:
                return
            self._launched = True
            for device, ready in self._ready.items():
                with torch.cuda.stream(self.streams[device]):
                    self.streams[device].wait_event(ready)
                    _copy(self.targets, self.sources, self.layout.direct.get(device, []), non_blocking=True)
                    for one in self.layout.gathered:
                        if one.device == device:
                            self.data[one.start : one.stop].copy_(one.buffer, non_blocking=True)
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record(self.streams[device])
                    self._events[device] = event

    def hold(self) -> None:
        """Let the training streams wait for the copies; the host waits at most until all are launched."""
        self.launch()
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Wait until every copy is done. On any thread. Raises `RuntimeError` when they could not all be launched."""
        self.launch()
        if self._events.keys() != self._ready.keys():
            raise RuntimeError("the copies to host memory could not be launched")
        for event in self._events.values():
            event.synchronize()
        self.sources = []


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor], indices: list[int], *, non_blocking: bool) -> None:
    if indices:
        chosen = [targets[i] for i in indices]
        torch._foreach_copy_(chosen, [sources[i] for i in indices], non_blocking=non_blocking)
