"""Reading a rank's segment into plain values. Local to the observer; takes no lock and never makes the writer wait."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from scout_core.oob.layout import (
    AWAITED,
    AWAITED_LIST,
    AWAITED_OFFSET,
    CALL,
    FAREWELL,
    FAREWELL_BYTES,
    FAREWELL_OFFSET,
    GROUP_BYTES,
    GROUP_HEADER,
    GROUPS,
    MEMBERS,
    NAME_BYTES,
    NUMBER,
    PROGRESS,
    PROGRESS_OFFSET,
    RING,
    TEXT_BYTES,
    TEXT_HEADER,
    WORKER_LIST,
    WORKERS_OFFSET,
    Activity,
    CallState,
    Farewell,
    Phase,
    group_offset,
    name_offset,
    text_offset,
)
from scout_core.oob.records import Call, GroupView

_TRIES = 200


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress block. Times are of this host's monotonic clock, in ns."""

    number: int
    written_ns: int
    step: int
    micro: int
    stage: int
    phase: Phase
    activity: Activity
    slot: int
    name: str
    sequence: int
    since_ns: int
    usual_ns: int


class TornRecord(RuntimeError):
    """The writer was stopped in the middle of a write, or writes faster than anyone can read."""


def read_progress(memory: mmap.mmap) -> Progress:
    """The newest whole progress block. Raises `TornRecord` if none could be had."""
    end = PROGRESS_OFFSET + PROGRESS.size
    for _ in range(_TRIES):
        tail = NUMBER.unpack_from(memory, end - NUMBER.size)[0]
        data = memory[PROGRESS_OFFSET:end]
        if memory[PROGRESS_OFFSET:end] != data:
            continue
        values = PROGRESS.unpack(data)
        if values[0] and values[0] == values[-1] == tail:
            return Progress(
                number=values[0],
                written_ns=values[1],
                step=values[2],
                micro=values[3],
                stage=values[4],
                phase=Phase(values[5]),
                activity=Activity(values[6]),
                slot=values[7],
                name=_name(memory, values[8]),
                sequence=values[9],
                since_ns=values[10],
                usual_ns=values[11],
            )
    raise TornRecord("the progress record stayed torn")


def read_groups(memory: mmap.mmap, newest: int = RING) -> dict[int, GroupView]:
    """Groups by slot, each with its newest calls, oldest first."""
    found = {}
    for slot in range(GROUPS):
        data = memory[group_offset(slot) : group_offset(slot) + GROUP_BYTES]
        key, issued, count, start, stride, explicit, _, *listed = GROUP_HEADER.unpack_from(data)
        if not key:
            continue
        members = tuple(listed[: min(count, MEMBERS)]) if explicit else tuple(start + i * stride for i in range(count))
        calls = sorted(
            (CALL.unpack_from(data, GROUP_HEADER.size + i * CALL.size) for i in range(RING)), key=lambda c: int(c[0])
        )
        kept = [c for c in calls if 0 < c[0] <= issued and c[0] > issued - newest]
        found[slot] = GroupView(key=key, members=members, issued=issued, calls=tuple(_call(memory, c) for c in kept))
    return found


def read_farewell(memory: mmap.mmap) -> tuple[Farewell, str]:
    """How the process says it leaves, and its text."""
    how, size = FAREWELL.unpack_from(memory, FAREWELL_OFFSET)
    start = FAREWELL_OFFSET + FAREWELL.size
    return Farewell(how), memory[start : start + min(size, FAREWELL_BYTES)].decode(errors="replace")


def read_awaited(memory: mmap.mmap) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks to which, and from which, the newest point-to-point operation goes."""
    count, *values = AWAITED_LIST.unpack_from(memory, AWAITED_OFFSET)
    pairs = list(zip(values[::2], values[1::2], strict=True))[: min(max(count, 0), AWAITED)]
    return tuple(rank for rank, comes in pairs if not comes), tuple(rank for rank, comes in pairs if comes)


def read_workers(memory: mmap.mmap) -> tuple[int, ...]:
    """Process ids of the DataLoader workers."""
    count, *pids = WORKER_LIST.unpack_from(memory, WORKERS_OFFSET)
    return tuple(pids[:count])


def _call(memory: mmap.mmap, values: tuple[int, ...]) -> Call:
    sequence, fingerprint, text, state, step, passes = values
    return Call(
        sequence=sequence,
        fingerprint=fingerprint,
        text=_text(memory, text, fingerprint),
        state=CallState(state).name.lower(),
        step=step,
        passes=passes,
    )


def _text(memory: mmap.mmap, index: int, fingerprint: int) -> str:
    offset = text_offset(index)
    owner, size = TEXT_HEADER.unpack_from(memory, offset)
    if owner != fingerprint:
        return "(description overwritten)"
    start = offset + TEXT_HEADER.size
    return memory[start : start + min(size, TEXT_BYTES)].decode(errors="replace")


def _name(memory: mmap.mmap, index: int) -> str:
    if index < 0:
        return ""
    offset = name_offset(index)
    return memory[offset : offset + NAME_BYTES].rstrip(b"\0").decode(errors="replace")
