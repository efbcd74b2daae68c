"""The fixed layout of a progress record in shared memory: one writer, one reader on the same host.

All integers are little-endian. The progress block begins and ends with the same number, which grows with every write;
0 is never written. A reader that sees two different numbers, or two copies that differ, reads again.
"""

from __future__ import annotations

import struct
from enum import IntEnum

MAGIC = 0x31424F4F54554F53
VERSION = 2

HEADER = struct.Struct("<QIIiiQ16siii")  # magic, version, uid, pid, rank, start ticks, token, world, attempt, signal
SIGNAL_OFFSET = HEADER.size - 4
PROGRESS_OFFSET = 128
# number, monotonic ns, optimizer step, passes in it, layer position, phase, activity, group slot, name, sequence,
# ns since which the activity lasts, its usual ns, number again
PROGRESS = struct.Struct("<QqqiiiiiiQqqQ")
NUMBER = struct.Struct("<Q")
AWAITED_OFFSET = 208
AWAITED = 5
AWAITED_LIST = struct.Struct(f"<i{2 * AWAITED}i")  # count, then rank and direction (0: to it, 1: from it) of each
FAREWELL_OFFSET = 256
FAREWELL = struct.Struct("<iI")  # how the process leaves, bytes of text
FAREWELL_BYTES = 3824
WORKERS_OFFSET = 4096
WORKERS = 63
WORKER_LIST = struct.Struct(f"<i{WORKERS}i")

GROUPS_OFFSET = 4352
GROUPS = 16
MEMBERS = 64
GROUP_HEADER = struct.Struct(f"<QQiiiii{MEMBERS}i")  # key, issued, count, start, step, explicit, named, members
CALL = struct.Struct("<QQiiqq")  # sequence, fingerprint, description, state, optimizer step, forward passes so far
RING = 64
GROUP_BYTES = GROUP_HEADER.size + RING * CALL.size

TEXTS_OFFSET = GROUPS_OFFSET + GROUPS * GROUP_BYTES
TEXTS = 512
TEXT_HEADER = struct.Struct("<QH")  # fingerprint of what the text describes, bytes of text
TEXT_BYTES = 246
TEXT_SLOT = TEXT_HEADER.size + TEXT_BYTES
NAMES_OFFSET = TEXTS_OFFSET + TEXTS * TEXT_SLOT
NAMES = 64
NAME_BYTES = 64
SIZE = NAMES_OFFSET + NAMES * NAME_BYTES


class Phase(IntEnum):
    """What the job is doing; each has a grace of its own."""

    STARTUP = 0
    COMPILE = 1
    TRAIN = 2
    EVAL = 3
    CHECKPOINT = 4
    TEARDOWN = 5


class Activity(IntEnum):
    """What the training thread was inside of when it last wrote."""

    NONE = 0
    COLLECTIVE = 1
    DATALOADER = 2
    CHECKPOINT_READ = 3
    CHECKPOINT_WRITE = 4
    POINT_TO_POINT = 5


class Farewell(IntEnum):
    """How the process says it leaves."""

    NONE = 0
    CLOSED = 1
    EXCEPTION = 2
    COLLECTIVE_FAILED = 3
    FINISHED = 4


class CallState(IntEnum):
    """How far a collective call has come on its rank."""

    INSIDE = 1
    RETURNED = 2
    RAISED = 3


def group_offset(slot: int) -> int:
    """Where group `slot` begins."""
    return GROUPS_OFFSET + slot * GROUP_BYTES


def call_offset(slot: int, sequence: int) -> int:
    """Where the call with this sequence number (from 1) of group `slot` stands."""
    return group_offset(slot) + GROUP_HEADER.size + sequence % RING * CALL.size


def text_offset(index: int) -> int:
    """Where the description with this number stands."""
    return TEXTS_OFFSET + index % TEXTS * TEXT_SLOT


def name_offset(index: int) -> int:
    """Where the name of an activity stands."""
    return NAMES_OFFSET + index % NAMES * NAME_BYTES
