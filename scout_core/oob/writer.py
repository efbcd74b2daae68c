"""The publisher: writes this rank's progress into its segment. Local to the rank, one writing thread at a time."""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from scout_core.oob.fingerprints import Described, group_key
from scout_core.oob.layout import (
    AWAITED,
    AWAITED_LIST,
    AWAITED_OFFSET,
    CALL,
    FAREWELL,
    FAREWELL_BYTES,
    FAREWELL_OFFSET,
    GROUP_HEADER,
    GROUPS,
    MEMBERS,
    NAME_BYTES,
    NAMES,
    PROGRESS,
    PROGRESS_OFFSET,
    RING,
    SIGNAL_OFFSET,
    TEXT_BYTES,
    TEXT_HEADER,
    TEXTS,
    WORKER_LIST,
    WORKERS,
    WORKERS_OFFSET,
    Activity,
    CallState,
    Farewell,
    Phase,
    call_offset,
    group_offset,
    name_offset,
    text_offset,
)
from scout_core.oob.tally import Members, Tally
from scout_core.threads import TrainingThread

_now = time.monotonic_ns
_pack_progress = PROGRESS.pack_into
_pack_call = CALL.pack_into
_pack_issued = struct.Struct("<Q").pack_into
_KEPT_COUNTS = 1024


class Publisher:
    """Progress of one rank. Each method writes at once; none blocks, allocates shared memory or raises for full tables.

    `tally` counts the collectives for the readiness contract. Only what `training` says is training's may be written:
    what goes on beside it is no progress of the rank. The thread that makes the publisher is that of training.
    """

    def __init__(self, memory: mmap.mmap, peers: Sequence[int] = ()) -> None:
        self._memory = memory
        self.tally = Tally(peers)
        self.training = TrainingThread()
        self._number = 0
        self._step = 0
        self._micro = 0
        self._stage = 0
        self._passes = 0
        self._phase = int(Phase.STARTUP)
        self._activity = 0
        self._slot = -1
        self._name = -1
        self._sequence = 0
        self._since = 0
        self._usual = 0
        self._failed = False
        self._stack: list[tuple[int, int, int, int, int, int]] = []
        self._slots: dict[Members, int] = {}
        self._resting: OrderedDict[Members, int] = OrderedDict()
        self._issued: list[int] = [0] * GROUPS
        self._next_slot = 0
        self._texts: dict[int, int] = {}
        self._names: dict[str, int] = {}
        self._lock = threading.Lock()
        self.publish()

    def publish(self) -> None:
        """Write the progress block: the hot path."""
        number = self._number + 1
        self._number = number
        _pack_progress(
            self._memory,
            PROGRESS_OFFSET,
            number,
            _now(),
            self._step,
            self._micro,
            self._stage,
            self._phase,
            self._activity,
            self._slot,
            self._name,
            self._sequence,
            self._since,
            self._usual,
            number,
        )

    def layer(self, stage: int) -> None:
        """The forward pass came to layer `stage` (from 1); 0 is before the pass."""
        self._stage = stage
        self.publish()

    def begin_pass(self) -> None:
        """A forward pass of the whole model begins."""
        self._micro += 1
        self._passes += 1
        self._stage = 0
        self.publish()

    def boundary(self, step: int) -> None:
        """Optimizer step number `step` is done, and a collective's error that training survived with it."""
        self._step = step
        if self._failed:
            self.farewell(Farewell.NONE)
        self._micro = self._stage = 0
        if self._phase == Phase.STARTUP:
            self._phase = int(Phase.TRAIN)
        self.publish()

    @property
    def phase(self) -> Phase:
        """The phase last written."""
        return Phase(self._phase)

    def set_phase(self, phase: Phase) -> None:
        """Enter a phase."""
        self._phase = int(phase)
        self.publish()

    def enter(self, activity: Activity, name: str, usual_ns: int = 0) -> None:
        """Begin an activity with this name; `usual_ns` is how long it takes as a rule, 0 when unknown."""
        self._push()
        self._activity, self._slot, self._name = int(activity), -1, self._name_index(name)
        self._sequence, self._since, self._usual = 0, _now(), usual_ns
        self.publish()

    def leave(self) -> None:
        """End the activity begun last."""
        if self._stack:
            self._activity, self._slot, self._name, self._sequence, self._since, self._usual = self._stack.pop()
        self.publish()

    def begin_call(self, members: Members, what: Described) -> tuple[Members, int]:
        """A collective is issued on the group with these global ranks: they and its sequence number name the call."""
        with self._lock:
            slot = self._slot_of(members)
            sequence = self._issued[slot] + 1
            self._issued[slot] = sequence
            text = self._texts.get(what.fingerprint)
            if text is None:
                text = self._write_text(what)
            self._write_call(slot, sequence, what.fingerprint, text, CallState.INSIDE)
            _pack_issued(self._memory, group_offset(slot) + 8, sequence)
            self.tally.add(members, what, self._step)
            self._push()
            self._activity, self._slot, self._sequence = int(Activity.COLLECTIVE), slot, sequence
            self._since, self._usual, self._name = _now(), 0, -1
        self.publish()
        return members, sequence

    def end_call(self, members: Members, sequence: int, state: CallState) -> None:
        """The call returned or raised."""
        slot = self._slots.get(members)
        if slot is not None:
            offset = call_offset(slot, sequence)
            found = CALL.unpack_from(self._memory, offset)
            if found[0] == sequence:
                _pack_call(self._memory, offset, *found[:3], int(state), *found[4:])
        self.leave()

    def wait_for(self, members: Members, sequence: int) -> None:
        """Wait for an asynchronous call; ends with `leave`."""
        with self._lock:
            slot = self._slot_of(members)  # others may have taken its own since
        self._push()
        self._activity, self._slot, self._sequence = int(Activity.COLLECTIVE), slot, sequence
        self._since, self._usual, self._name = _now(), 0, -1
        self.publish()

    def await_ranks(self, what: str, ranks: Sequence[tuple[int, bool]]) -> None:
        """Wait for other ranks in a point-to-point operation; ends with `leave`.

        `ranks`: global rank, and whether something is to come from it; of many the first.
        """
        kept = list(ranks)[:AWAITED]
        values = [value for rank, comes in kept for value in (rank, int(comes))]
        AWAITED_LIST.pack_into(self._memory, AWAITED_OFFSET, len(kept), *values, *[0] * (2 * AWAITED - len(values)))
        self.enter(Activity.POINT_TO_POINT, what)

    def farewell(self, how: Farewell, text: str = "") -> None:
        """Say how this process leaves, or what its last collective raised."""
        self._failed = how is Farewell.COLLECTIVE_FAILED
        data = text.encode(errors="replace")[-FAREWELL_BYTES:]
        self._memory[FAREWELL_OFFSET + FAREWELL.size : FAREWELL_OFFSET + FAREWELL.size + len(data)] = data
        FAREWELL.pack_into(self._memory, FAREWELL_OFFSET, int(how), len(data))

    def workers(self, pids: Sequence[int]) -> None:
        """The DataLoader worker processes there are now."""
        kept = list(pids)[:WORKERS]
        WORKER_LIST.pack_into(self._memory, WORKERS_OFFSET, len(kept), *kept, *[0] * (WORKERS - len(kept)))

    def stacks_signal(self, number: int) -> None:
        """The signal that makes this process write its Python stacks; 0 when there is none."""
        struct.pack_into("<i", self._memory, SIGNAL_OFFSET, number)

    def detach(self) -> None:
        """Write nowhere from now on: in a child process that shares the mapping by fork, and after the segment."""
        self._memory = mmap.mmap(-1, len(self._memory))

    def _push(self) -> None:
        if len(self._stack) > 64:  # more than any sane nesting: something never left
            del self._stack[0]
        self._stack.append((self._activity, self._slot, self._name, self._sequence, self._since, self._usual))

    def _write_call(self, slot: int, sequence: int, fingerprint: int, text: int, state: CallState) -> None:
        _pack_call(
            self._memory, call_offset(slot, sequence), sequence, fingerprint, text, int(state), self._step, self._passes
        )

    def _slot_of(self, members: Members) -> int:
        slot = self._slots.get(members)
        return slot if slot is not None else self._take_slot(members)

    def _take_slot(self, members: Members) -> int:
        """A slot for a group that has none; the oldest group's once all are taken, the first one's never.

        A group counts on where it was when it lost its slot, as its other members do that are in fewer groups.
        """
        slot = self._next_slot
        self._next_slot = slot + 1 if slot + 1 < GROUPS else 1
        for known in [m for m, s in self._slots.items() if s == slot]:
            del self._slots[known]
            self._resting[known] = self._issued[slot]
            if len(self._resting) > _KEPT_COUNTS:
                self._resting.popitem(last=False)
        self._slots[members] = slot
        issued = self._issued[slot] = self._resting.pop(members, 0)
        offset = group_offset(slot)
        self._memory[offset : offset + GROUP_HEADER.size + RING * CALL.size] = bytes(
            GROUP_HEADER.size + RING * CALL.size
        )
        stride = members[1] - members[0] if len(members) > 1 else 1
        regular = all(b - a == stride for a, b in pairwise(members))
        listed = members[:MEMBERS]
        GROUP_HEADER.pack_into(
            self._memory,
            offset,
            group_key(members),
            issued,
            len(members),
            members[0],
            stride,
            0 if regular else 1,
            0,
            *listed,
            *[0] * (MEMBERS - len(listed)),
        )
        return slot

    def _write_text(self, what: Described) -> int:
        index = len(self._texts) % TEXTS
        if len(self._texts) >= TEXTS:
            self._texts.clear()
            index = 0
        self._texts[what.fingerprint] = index
        data = what.text.encode(errors="replace")[:TEXT_BYTES]
        offset = text_offset(index)
        TEXT_HEADER.pack_into(self._memory, offset, what.fingerprint, len(data))
        self._memory[offset + TEXT_HEADER.size : offset + TEXT_HEADER.size + len(data)] = data
        return index

    def _name_index(self, name: str) -> int:
        index = self._names.get(name)
        if index is None:
            if len(self._names) >= NAMES:
                self._names.clear()
            index = len(self._names)
            self._names[name] = index
            data = name.encode(errors="replace")[: NAME_BYTES - 1]
            offset = name_offset(index)
            self._memory[offset : offset + NAME_BYTES] = data + bytes(NAME_BYTES - len(data))
        return index
