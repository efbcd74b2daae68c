"""C3 verdicts on exact and statistical evidence."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scout_core.consensus.c3 import C3Result, C3Status, classify_exact, classify_statistical

NAN, INF = math.nan, math.inf
AGREE, ATTRIBUTED, INCONCLUSIVE = C3Status.AGREE, C3Status.ATTRIBUTED, C3Status.INCONCLUSIVE

few_values = st.lists(st.sampled_from([None, 0, 1, True, 1.0, "1", NAN, (1, 2)]), min_size=1, max_size=9)
numbers = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, 1.0, 1.001, 2.0, NAN, INF]))


def bits(result: C3Result) -> str:
    return "".join("x" if divergent else "." for divergent in result.bitmap)


@pytest.mark.parametrize(
    ("evidence", "status", "bitmap"),
    [
        ([7, 7], AGREE, ".."),
        ([7, 7, 7, 7], AGREE, "...."),
        ([7, 8], INCONCLUSIVE, ".."),
        ([7, 8, 7], ATTRIBUTED, ".x."),
        ([7, 8, 7, 8], INCONCLUSIVE, "...."),
        ([7, 8, 7, 9], INCONCLUSIVE, "...."),
        ([7, 8, 7, 9, 7], ATTRIBUTED, ".x.x."),
        ([7], INCONCLUSIVE, "."),
        ([None], INCONCLUSIVE, "."),
        ([None, None, None], INCONCLUSIVE, "..."),
        ([7, 7, None], INCONCLUSIVE, "..."),
        ([7, 7, 8, None], INCONCLUSIVE, "...."),
        ([7, 7, 7, 8, None], ATTRIBUTED, "...x."),
        ([7, None, None, 8], INCONCLUSIVE, "...."),
    ],
)
def test_exact_needs_a_strict_majority_of_all_peers(evidence: list[int | None], status: C3Status, bitmap: str) -> None:
    result = classify_exact(evidence)
    assert (result.status, bits(result)) == (status, bitmap)
    assert result.evidence == tuple(evidence)


@pytest.mark.parametrize("odd", [True, 1.0, "1", b"1", (1,), complex(1)])
def test_values_of_different_types_are_different_evidence(odd: Hashable) -> None:
    assert bits(classify_exact([1, odd, 1])) == ".x."
    assert bits(classify_exact([(5, 1), (5, odd), (5, 1)])) == ".x."
    assert bits(classify_exact([frozenset([1]), frozenset([odd]), frozenset([1])])) == ".x."


def test_nans_of_any_payload_are_one_value_also_inside_tuples() -> None:
    other_payload: float = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0123))[0]
    assert classify_exact([NAN, other_payload, float("nan")]).status is AGREE
    assert classify_exact([(1, NAN), (1, other_payload)]).status is AGREE
    assert bits(classify_exact([NAN, 1.0, other_payload])) == ".x."


def test_a_flipped_sign_of_zero_is_found() -> None:
    assert bits(classify_exact([0.0, 0.0, -0.0])) == "..x"


def test_no_peers_and_unhashable_evidence_are_errors() -> None:
    with pytest.raises(ValueError, match="at least one peer"):
        classify_exact([])
    with pytest.raises(ValueError, match="at least one peer"):
        classify_statistical([], relative_tolerance=0.1, absolute_tolerance=0)
    with pytest.raises(TypeError):
        classify_exact([[1], [1]])  # type: ignore[list-item]


@given(few_values, st.randoms(use_true_random=False))
def test_exact_permuting_peers_permutes_the_verdict(evidence: list[Hashable | None], rng: random.Random) -> None:
    order = rng.sample(range(len(evidence)), len(evidence))
    before, after = classify_exact(evidence), classify_exact([evidence[peer] for peer in order])
    assert after.status is before.status
    assert after.bitmap == tuple(before.bitmap[peer] for peer in order)


@given(few_values)
def test_exact_never_attributes_half_nor_a_missing_peer(evidence: list[Hashable | None]) -> None:
    result = classify_exact(evidence)
    assert 2 * sum(result.bitmap) < len(evidence)
    assert not any(divergent and value is None for divergent, value in zip(result.bitmap, evidence, strict=True))


@given(few_values)
def test_exact_agrees_only_when_everything_is_equal(evidence: list[Hashable | None]) -> None:
    distinct = {(type(value), "nan" if value != value else value) for value in evidence}
    everything_equal = len(evidence) > 1 and None not in evidence and len(distinct) == 1
    assert (classify_exact(evidence).status is AGREE) == everything_equal


@given(few_values)
def test_another_witness_of_the_majority_never_clears_the_divergent(evidence: list[Hashable | None]) -> None:
    result = classify_exact(evidence)
    if result.status is ATTRIBUTED:
        witness = next(
            value for value, bad in zip(evidence, result.bitmap, strict=True) if not bad and value is not None
        )
        assert classify_exact([*evidence, witness]).bitmap == (*result.bitmap, False)


def statistical(values: Sequence[float | None], relative: float = 0.1, absolute: float = 0.0) -> C3Result:
    return classify_statistical(values, relative_tolerance=relative, absolute_tolerance=absolute)


@pytest.mark.parametrize(
    ("values", "status", "bitmap"),
    [
        ([1.0, 1.05], AGREE, ".."),
        ([1.0, 1.3], INCONCLUSIVE, ".."),
        ([1.0, 1.15], INCONCLUSIVE, ".."),  # each within 10% of the middle, but not of each other
        ([1.0, 1.0, 5.0], ATTRIBUTED, "..x"),
        ([5.0, 1.0, 5.0], ATTRIBUTED, ".x."),
        ([1.0, 5.0, 9.0], INCONCLUSIVE, "..."),
        ([1.0, 1.0, 5.0, 5.0], INCONCLUSIVE, "...."),
        ([1.0, 1.02, 5.0, 0.98, -1.0], ATTRIBUTED, "..x.x"),
        ([0.91, 1.0, 1.09, 5.0], INCONCLUSIVE, "...."),  # the rest do not agree among themselves
        ([0.91, 1.0, 1.09], INCONCLUSIVE, "..."),
        ([-3.0, -3.1, -3.0], AGREE, "..."),
        ([1.0, NAN, 1.0], ATTRIBUTED, ".x."),
        ([1.0, INF, 1.0, 1.0, NAN], ATTRIBUTED, ".x..x"),
        ([1.0, NAN], INCONCLUSIVE, ".."),
        ([1.0, 1.0, NAN, -INF], INCONCLUSIVE, "...."),
        ([NAN, NAN, NAN], INCONCLUSIVE, "..."),
        ([INF, INF, INF], INCONCLUSIVE, "..."),
        ([INF, INF, 1.0], INCONCLUSIVE, "..."),
        ([1.0], INCONCLUSIVE, "."),
        ([1.0, 1.0, None], INCONCLUSIVE, "..."),
        ([1.0, 1.0, None, 5.0], INCONCLUSIVE, "...."),
        ([1.0, 1.0, 1.0, None, 5.0], ATTRIBUTED, "....x"),
        ([5e-324, 5e-324], AGREE, ".."),
        ([1.7e308, 1.7e308, 1.7e308, -1.7e308], ATTRIBUTED, "...x"),
    ],
)
def test_statistical_verdicts(values: list[float | None], status: C3Status, bitmap: str) -> None:
    result = statistical(values)
    assert (result.status, bits(result)) == (status, bitmap)


def test_absolute_tolerance_covers_values_around_zero() -> None:
    assert statistical([0.0, 1e-9, -1e-9], relative=0.1).status is INCONCLUSIVE
    assert statistical([0.0, 1e-9, -1e-9], relative=0.1, absolute=1e-8).status is AGREE
    assert bits(statistical([0.0, 1e-9, 1e-7], absolute=1e-8)) == "..x"


@pytest.mark.parametrize("bad", [-1e-9, NAN, INF])
def test_tolerances_are_checked(bad: float) -> None:
    with pytest.raises(ValueError, match="relative_tolerance"):
        statistical([1.0, 1.0], relative=bad)
    with pytest.raises(ValueError, match="absolute_tolerance"):
        statistical([1.0, 1.0], absolute=bad)


@given(st.lists(numbers, min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_statistical_permutes_and_never_attributes_half(values: list[float | None], rng: random.Random) -> None:
    order = rng.sample(range(len(values)), len(values))
    before, after = statistical(values), statistical([values[peer] for peer in order])
    assert (after.status, after.bitmap) == (before.status, tuple(before.bitmap[peer] for peer in order))
    assert 2 * sum(before.bitmap) < len(values)
    assert not any(divergent and value is None for divergent, value in zip(before.bitmap, values, strict=True))
    if before.status is AGREE:
        assert all(value is not None and math.isfinite(value) for value in values)


@given(
    st.lists(st.floats(-1e6, 1e6).filter(lambda v: v == 0 or abs(v) > 1e-6), min_size=1, max_size=9),
    st.integers(-20, 20),
    st.sampled_from([1.0, -1.0]),
)
def test_statistical_is_the_same_in_every_unit(values: list[float], exponent: int, sign: float) -> None:
    scaled = statistical([sign * math.ldexp(value, exponent) for value in values])  # exact: a power of two
    assert (scaled.status, scaled.bitmap) == (statistical(values).status, statistical(values).bitmap)


@given(
    st.lists(st.floats(0.98, 1.02), min_size=2, max_size=6),
    st.lists(st.sampled_from([0.0, 0.5, 1.5, 100.0, NAN, INF, -INF]), max_size=5),
    st.integers(0, 3),
)
def test_statistical_finds_all_outliers_of_a_close_majority(
    healthy: list[float], outliers: list[float], more: int
) -> None:
    assume(len(healthy) + more > len(outliers))
    result = statistical([*healthy, *outliers, *healthy[:1] * more])
    assert result.bitmap == (False,) * len(healthy) + (True,) * len(outliers) + (False,) * more
    assert result.status is (ATTRIBUTED if outliers else AGREE)


def test_json_is_plain_and_strict() -> None:
    result = classify_exact([(1, NAN, b"\x0f"), (1, INF, b"\x0f"), (1, NAN, b"\x0f"), None, (1, NAN, b"\x0f")])
    assert json.loads(json.dumps(result.to_json(), allow_nan=False)) == {
        "status": "Attributed",
        "bitmap": [False, True, False, False, False],
        "evidence": [[1, "NaN", "0f"], [1, "Infinity", "0f"], [1, "NaN", "0f"], None, [1, "NaN", "0f"]],
    }


def test_a_contradictory_result_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="bitmap has 1"):
        C3Result(status=AGREE, bitmap=(False,), evidence=(1, 1))
    with pytest.raises(ValueError, match="Agree verdict"):
        C3Result(status=AGREE, bitmap=(False, True), evidence=(1, 1))
    with pytest.raises(ValueError, match="Attributed verdict"):
        C3Result(status=ATTRIBUTED, bitmap=(False, False), evidence=(1, 1))
