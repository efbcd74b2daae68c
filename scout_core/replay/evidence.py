"""Evidence rows: what one peer says of every recipe of a check, packed so that one all-gather carries it all.

Each recipe has two executions' worth of words, since a first use and a dispute run it twice. Per-tensor signatures
stay on their device until every recipe has been queued; one copy then brings them to the host, where they are folded
into one 64-bit word per surface.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from scout_core.consensus.signature import signatures
from scout_core.replay.capture import all_finite
from scout_core.replay.isolation import NO_TIME, Elapsed

_MODULE = ("invocation", "rng", "parameter_state", "output", "input_gradient", "parameter_gradient")
SURFACES: dict[str, tuple[str, ...]] = {
    "embedding": _MODULE,
    "hidden": _MODULE,
    "output": _MODULE,
    "optimizer": ("gradient", "hyperparameters", "parameter_state", "optimizer_state", "updated_state"),
    "state": ("parameter_state", "optimizer_state"),
    "owner_update": (
        "gradient",
        "hyperparameters",
        "parameter_state",
        "optimizer_state",
        "updated_state",
        "owner_update",
    ),
    "at_rest": ("state_at_rest",),
}
"""Surfaces of a recipe class in the order in which blame is looked for: causes stand before what follows from them."""

COLLECTIVE_INPUT = "collective_input"
"""What a module's replay puts into the collectives it runs with its lockstep partners; no surface without partners."""

SHARED_STATE = "shared_state"
"""State that lockstep partners hold alike, compared among them and not among peers."""

MARKS = 8
"""Words over collective inputs, one each for the first seven; the last is over all that follow."""

MAX_SURFACES = max(len(names) for names in SURFACES.values()) + 1
ROW_WORDS = MAX_SURFACES + MARKS + 4


def surfaces_of(recipe_class: str, *, lockstep: bool) -> tuple[str, ...]:
    """Names of the words in an observation of a recipe class, in causal order. `lockstep`: the rank has partners."""
    names = SURFACES[recipe_class]
    if not lockstep or names is not _MODULE:
        return names
    place = names.index("output")
    return (*names[:place], COLLECTIVE_INPUT, *names[place:])


_FLAG_BITS = 16


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What a rank saw of values that are no numbers. `local` is before any reduction, on this rank's own data."""

    failed: bool = False
    local_nonfinite: bool = False
    replay_nonfinite: bool = False
    state_nonfinite: bool = False
    nondeterministic_op: bool = False

    def encode(self) -> int:
        bits = (
            self.failed,
            self.local_nonfinite,
            self.replay_nonfinite,
            self.state_nonfinite,
            self.nondeterministic_op,
        )
        return sum(bit << index for index, bit in enumerate(bits))

    @classmethod
    def decode(cls, word: int) -> Flags:
        names = ("failed", "local_nonfinite", "replay_nonfinite", "state_nonfinite", "nondeterministic_op")
        return cls(**{name: bool(word >> index & 1) for index, name in enumerate(names)})


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One peer's evidence from one execution of one recipe: a word per surface, time, flags.

    `marks` are words over the inputs of the collectives it ran, in order, `forward_marks` how many of those belong to
    the forward pass: they tell when corruption first showed, and so on which of the ranks in lockstep.
    """

    words: tuple[int, ...]
    elapsed: Elapsed = NO_TIME
    flags: Flags = Flags()
    marks: tuple[int, ...] = (0,) * MARKS
    forward_marks: int = 0

    def encode(self) -> list[int]:
        padding = [0] * (MAX_SURFACES - len(self.words))
        elapsed = self.elapsed
        flags = self.flags.encode() | self.forward_marks << _FLAG_BITS
        return [*self.words, *padding, *self.marks, elapsed.wall_us, elapsed.wait_us, elapsed.collective_us, flags]

    @classmethod
    def decode(cls, row: Sequence[int], names: Sequence[str]) -> Observation:
        """From a row of `ROW_WORDS`; `names` are the surfaces that it has."""
        wall, wait, collective, flags = row[MAX_SURFACES + MARKS : ROW_WORDS]
        return cls(
            words=tuple(row[: len(names)]),
            elapsed=Elapsed(wall_us=wall, wait_us=wait, collective_us=collective),
            flags=Flags.decode(flags),
            marks=tuple(row[MAX_SURFACES : MAX_SURFACES + MARKS]),
            forward_marks=flags >> _FLAG_BITS,
        )


@dataclass(frozen=True, kw_only=True)
class Presigned:
    """Signatures of tensors that will not be there any more when the evidence is put together."""

    vector: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Inputs of the collectives of one execution: a vector of signatures per call, `forward` of them before backward,
    and a label for every signature."""

    signed: Sequence[torch.Tensor | None] = ()
    forward: int = 0
    labels: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Signed:
    """Signatures of a list of tensors, still on their devices: `(device type, offset)` each, None for an absent one."""

    places: tuple[tuple[str, int] | None, ...]


class EvidenceBatch:
    """Collects tensors to sign and flags to raise, recipe after recipe, and reads all of them back at once."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], Observation]] = []
        self._vectors: dict[str, list[torch.Tensor]] = {}
        self._lengths: dict[str, int] = {}
        self._values: dict[str, list[int]] = {}

    def add(
        self,
        surfaces: Sequence[Sequence[torch.Tensor | None] | int | Presigned | Collectives],
        *,
        elapsed: Callable[[], Elapsed] | None = None,
        local: Sequence[torch.Tensor] = (),
        replayed: Sequence[torch.Tensor | None] = (),
        state: Sequence[torch.Tensor | None] = (),
        failed: bool = False,
        nondeterministic_op: bool = False,
    ) -> tuple[Signed | int, ...]:
        """Queue one execution's evidence; returns the signatures behind each surface, for `signatures_of`.

        `surfaces[i]` is the tensors of the i-th surface or their signatures, its ready-made word, or the inputs of the
        collectives. `local` holds
        bool scalars made while capturing; `replayed` and `state` hold tensors whose values must be finite. Queues work,
        waits for none.
        """
        calls = next((surface for surface in surfaces if isinstance(surface, Collectives)), Collectives())
        marked = [self._presigned(vector) for vector in calls.signed]
        inputs = Signed(places=tuple(place for mark in marked for place in mark.places))
        signed = self._sign(
            [
                inputs
                if isinstance(surface, Collectives)
                else self._presigned(surface.vector)
                if isinstance(surface, Presigned)
                else surface
                for surface in surfaces
            ]
        )
        local_flags = self._raise_flags(local)
        replay_flags = self._raise_flags(all_finite(replayed))
        state_flags = self._raise_flags(all_finite(state))

        def observation() -> Observation:
            return Observation(
                words=tuple(word if isinstance(word, int) else fold(self.signatures_of(word)) for word in signed),
                elapsed=elapsed() if elapsed is not None else NO_TIME,
                flags=Flags(
                    failed=failed,
                    local_nonfinite=not self._all_set(local_flags),
                    replay_nonfinite=not self._all_set(replay_flags),
                    state_nonfinite=not self._all_set(state_flags),
                    nondeterministic_op=nondeterministic_op,
                ),
                marks=_marks([fold(self.signatures_of(mark)) for mark in marked]),
                forward_marks=min(calls.forward, MARKS),
            )

        self._pending.append(observation)
        return signed

    def resolve(self) -> list[Observation]:
        """The observations in the order they were added. Waits once for each device's queued work."""
        self._values = {kind: torch.cat(vectors).tolist() for kind, vectors in self._vectors.items()}
        return [observation() for observation in self._pending]

    def signatures_of(self, signed: Signed) -> list[int | None]:
        """One signature per tensor, after `resolve`."""
        return [None if place is None else self._values[place[0]][place[1]] for place in signed.places]

    def _presigned(self, vector: torch.Tensor | None) -> Signed:
        """Signatures that were taken while the module ran; None where there was nothing to sign."""
        if vector is None:
            return Signed(places=(None,))
        start = self._push(vector)
        return Signed(places=tuple((vector.device.type, start + i) for i in range(vector.numel())))

    def _sign(self, surfaces: Sequence[Sequence[torch.Tensor | None] | int | Signed]) -> tuple[Signed | int, ...]:
        """Sign all tensors of all surfaces, one call per kind of device; what is signed already passes."""
        plain = [surface for surface in surfaces if not isinstance(surface, (int, Signed))]
        flat = [tensor for surface in plain for tensor in surface]
        places: list[tuple[str, int] | None] = [None] * len(flat)
        for kind in sorted({tensor.device.type for tensor in flat if tensor is not None}):
            chosen = [(i, t) for i, t in enumerate(flat) if t is not None and t.device.type == kind]
            start = self._push(signatures([tensor for _, tensor in chosen]))
            for offset, (index, _) in enumerate(chosen):
                places[index] = (kind, start + offset)
        remaining = iter(places)
        return tuple(
            surface
            if isinstance(surface, (int, Signed))
            else Signed(places=tuple(itertools.islice(remaining, len(surface))))
            for surface in surfaces
        )

    def _raise_flags(self, flags: Sequence[torch.Tensor]) -> Signed:
        places = [(flag.device.type, self._push(flag.reshape(1).to(torch.int64))) for flag in flags]
        return Signed(places=tuple(places))

    def _all_set(self, signed: Signed) -> bool:
        return all(self.signatures_of(signed))

    def _push(self, vector: torch.Tensor) -> int:
        kind = vector.device.type
        start = self._lengths.get(kind, 0)
        self._vectors.setdefault(kind, []).append(vector)
        self._lengths[kind] = start + vector.numel()
        return start


def _marks(words: Sequence[int]) -> tuple[int, ...]:
    """One word per collective; from the `MARKS`-th on one for all."""
    alone, rest = list(words[: MARKS - 1]), list(words[MARKS - 1 :])
    marks = [*alone, fold(rest)] if rest else alone
    return tuple(marks + [0] * (MARKS - len(marks)))


def fold(words: Sequence[int | None]) -> int:
    """One signed 64-bit word over a sequence of signed 64-bit words; absent entries count. Order matters."""
    packed = b"".join(b"\0" if word is None else b"\1" + struct.pack("<q", word) for word in words)
    return int(struct.unpack("<q", struct.pack("<Q", xxhash.xxh3_64_intdigest(packed)))[0])
