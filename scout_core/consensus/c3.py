"""C3 verdicts: who among equivalent peers diverges, decided from what each of them contributed.

Pure functions of plain values. Every rank holds the same gathered evidence, so every rank reaches the same verdict
without another collective.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class C3Status(str, Enum):
    """What the evidence of one surface allows to be said."""

    AGREE = "Agree"
    ATTRIBUTED = "Attributed"
    INCONCLUSIVE = "Inconclusive"


@dataclass(frozen=True, kw_only=True)
class C3Result:
    """The verdict on one surface.

    `bitmap` and `evidence` are in peer-local order and equally long; True marks a divergent peer. The bitmap has a
    True exactly when `status` is Attributed: an Inconclusive verdict points at nobody, however odd one value looks.
    `evidence` holds what was compared, unchanged, with None for a peer that contributed nothing.

    Raises ValueError when the fields contradict each other.
    """

    status: C3Status
    bitmap: tuple[bool, ...]
    evidence: tuple[Hashable | None, ...]

    def __post_init__(self) -> None:
        if len(self.bitmap) != len(self.evidence):
            raise ValueError(f"bitmap has {len(self.bitmap)} peers but evidence has {len(self.evidence)}")
        if any(self.bitmap) != (self.status is C3Status.ATTRIBUTED):
            raise ValueError(f"a {self.status.value} verdict cannot have the bitmap {self.bitmap}")

    def to_json(self) -> dict[str, Any]:
        """A plain dict that strict JSON can hold: non-finite floats become strings and bytes become hex."""
        return {
            "status": self.status.value,
            "bitmap": list(self.bitmap),
            "evidence": [_plain(value) for value in self.evidence],
        }


def classify_exact(evidence: Sequence[Hashable | None]) -> C3Result:
    """Judge evidence that must be identical on every peer.

    Called with one value per peer, None where a peer has none. With n peers:

    - Agree: n >= 2, and every peer holds the same value.
    - Attributed: more than n / 2 peers hold one value and at least one other peer holds a different one. The
      bitmap marks those that differ.
    - Inconclusive otherwise: no strict majority, a single peer (nothing to compare with), or nobody differs but
      somebody gave no evidence. Peers without evidence count in n, and are never attributed.

    Values are the same when their types and values are: 1, True and 1.0 are three values, and so are 0.0 and -0.0,
    which differ in a bit. All NaNs are one value, since `nan != nan` would make agreement impossible. The same
    holds for the members of tuples and frozensets.

    Raises ValueError without peers and TypeError for unhashable evidence.
    """
    _require_peers(evidence)
    identities = [None if value is None else _identity(value) for value in evidence]
    counts = Counter(identity for identity in identities if identity is not None)
    favourite = counts.most_common(1)[0][0] if counts else None
    return _verdict(evidence, [None if identity is None else identity == favourite for identity in identities])


def classify_statistical(
    values: Sequence[float | None], *, relative_tolerance: float, absolute_tolerance: float
) -> C3Result:
    """Judge numbers that must be close on every peer.

    Called with one value per peer, None where a peer has none. The reference is the median of all finite values and
    the tolerance is `absolute_tolerance + relative_tolerance * abs(median)`. A peer diverges when it is not finite
    or is farther from the median than the tolerance. With n peers:

    - Agree: n >= 2, nobody diverges or is missing, and largest and smallest value are within the tolerance.
    - Attributed: somebody diverges, and those that do not are more than n / 2 and are all within the tolerance of
      each other.
    - Inconclusive otherwise, with the rules of `classify_exact` on missing evidence. Peers that are all NaN, or all
      the same infinity, are Inconclusive: that they are alike does not make them healthy.

    The median includes the judged peer on purpose. When a strict majority lies close together, so does this median,
    while the median of the *other* peers does not: for (1, 1, 5) it is 3 as seen by each healthy peer.

    Raises ValueError without peers, and for a tolerance that is negative or not finite.
    """
    _require_peers(values)
    for name, tolerance in (("relative_tolerance", relative_tolerance), ("absolute_tolerance", absolute_tolerance)):
        if not (math.isfinite(tolerance) and tolerance >= 0):
            raise ValueError(f"{name} must be finite and at least 0, not {tolerance}")
    finite = sorted(value for value in values if value is not None and math.isfinite(value))
    if not finite:
        return _inconclusive(values)
    median = _median_of_sorted(finite)
    tolerance = absolute_tolerance + relative_tolerance * abs(median)
    agrees = [None if value is None else math.isfinite(value) and abs(value - median) <= tolerance for value in values]
    close = [value for value in finite if abs(value - median) <= tolerance]
    if close and close[-1] - close[0] > tolerance:
        # Near the reference on both sides of it, yet not near each other: no majority that could testify.
        return _inconclusive(values)
    return _verdict(values, agrees)


def _verdict(evidence: Sequence[Hashable | None], agrees: Sequence[bool | None]) -> C3Result:
    """The verdict when `agrees` says of each peer whether it is with the others; None is missing evidence."""
    agreeing = sum(agree is True for agree in agrees)
    divergent = tuple(agree is False for agree in agrees)
    if agreeing == len(agrees) >= 2:
        return C3Result(status=C3Status.AGREE, bitmap=divergent, evidence=tuple(evidence))
    if any(divergent) and 2 * agreeing > len(agrees):
        return C3Result(status=C3Status.ATTRIBUTED, bitmap=divergent, evidence=tuple(evidence))
    return _inconclusive(evidence)


def _inconclusive(evidence: Sequence[Hashable | None]) -> C3Result:
    return C3Result(status=C3Status.INCONCLUSIVE, bitmap=(False,) * len(evidence), evidence=tuple(evidence))


def _require_peers(evidence: Sequence[Hashable | None]) -> None:
    if not evidence:
        raise ValueError("a verdict needs the evidence of at least one peer; pass None for a peer that has none")


def _identity(value: object) -> object:
    """A key that is equal for two values exactly when C3 takes them for the same evidence."""
    if isinstance(value, float):
        return (type(value), "nan" if math.isnan(value) else value.hex())
    if isinstance(value, complex):
        return (type(value), _identity(value.real), _identity(value.imag))
    if isinstance(value, tuple):
        return (type(value), *(_identity(member) for member in value))
    if isinstance(value, frozenset):
        return (type(value), frozenset(_identity(member) for member in value))
    return (type(value), value)


def _median_of_sorted(values: Sequence[float]) -> float:
    low, high = values[(len(values) - 1) // 2], values[len(values) // 2]
    # Halving first cannot overflow, but half of a subnormal may round to 0: hence the bounds.
    return min(high, max(low, low / 2 + high / 2))


def _plain(value: object) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(member) for member in value]
    if isinstance(value, frozenset):
        return sorted((_plain(member) for member in value), key=repr)
    return repr(value)
