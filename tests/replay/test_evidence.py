"""Rows of evidence: what goes in comes out on the other side, and every difference shows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_core.replay.evidence import (
    MARKS,
    MAX_SURFACES,
    ROW_WORDS,
    SURFACES,
    EvidenceBatch,
    Flags,
    Observation,
    fold,
    surfaces_of,
)
from scout_core.replay.isolation import Elapsed

words = st.integers(-(1 << 63), (1 << 63) - 1)
times = st.integers(0, 1 << 40)
flags = st.builds(Flags, **{name: st.booleans() for name in Flags.__dataclass_fields__})


@st.composite
def observations(draw: st.DrawFn) -> tuple[tuple[str, ...], Observation]:
    names = surfaces_of(draw(st.sampled_from(sorted(SURFACES))), lockstep=draw(st.booleans()))
    seen = Observation(
        words=draw(st.tuples(*[words] * len(names))),
        elapsed=Elapsed(wall_us=draw(times), wait_us=draw(times), collective_us=draw(times)),
        flags=draw(flags),
        marks=draw(st.tuples(*[words] * MARKS)),
        forward_marks=draw(st.integers(0, MARKS)),
    )
    return names, seen


@settings(deadline=None)
@given(observations())
def test_an_observation_survives_the_gather(item: tuple[tuple[str, ...], Observation]) -> None:
    names, seen = item
    row = torch.tensor(seen.encode(), dtype=torch.int64)
    assert row.numel() == ROW_WORDS and len(seen.words) <= MAX_SURFACES
    assert Observation.decode(row.tolist(), names) == seen


@settings(deadline=None)
@given(st.lists(words | st.none(), max_size=5), st.data())
def test_folding_tells_any_changed_moved_missing_or_added_word(sequence: list[int | None], data: st.DataObject) -> None:
    other = data.draw(st.lists(words | st.none(), max_size=5) | st.permutations(sequence))
    assert (fold(sequence) == fold(other)) == (list(other) == sequence)
    assert -(1 << 63) <= fold(sequence) < 1 << 63


def seen(surfaces: list, **more) -> Observation:
    batch = EvidenceBatch()
    batch.add(surfaces, **more)
    return batch.resolve()[0]


def test_one_flipped_bit_changes_its_own_surface_only() -> None:
    a, b = torch.arange(6.0), torch.ones(3)
    wrong = a.clone()
    wrong.view(torch.int32)[4] ^= 1
    healthy, faulty = seen([[a], [b, None], 7]), seen([[wrong], [b, None], 7])
    assert healthy.words[0] != faulty.words[0]
    assert healthy.words[1:] == faulty.words[1:] and healthy.words[2] == 7


def test_an_absent_gradient_is_not_a_gradient_of_zeros() -> None:
    assert seen([[None]]).words != seen([[torch.zeros(2)]]).words != seen([[]]).words


def test_recipes_are_read_back_in_order_and_each_tensor_keeps_its_signature() -> None:
    batch = EvidenceBatch()
    tensors = [torch.full((4,), float(value)) for value in range(3)]
    signed = [batch.add([[tensor, None]], elapsed=lambda: Elapsed(wall_us=5, wait_us=1)) for tensor in tensors]
    resolved = batch.resolve()
    assert [o.words for o in resolved] == [seen([[tensor, None]]).words for tensor in tensors]
    assert all(o.elapsed.busy_us == 4 for o in resolved)
    (first, absent) = batch.signatures_of(signed[0][0])
    assert first is not None and absent is None
    assert len({batch.signatures_of(s[0])[0] for s in signed}) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
def test_values_that_are_no_numbers_raise_the_flag_of_where_they_were_seen(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(5)
    tensor[3] = bad
    tensor = tensor.to(dtype)
    fine = [torch.ones(2), torch.zeros(0), None, torch.tensor([1 << 40])]
    assert seen([[]], replayed=[*fine, tensor]).flags == Flags(replay_nonfinite=True)
    assert seen([[]], state=[tensor, *fine]).flags == Flags(state_nonfinite=True)
    assert seen([[]], local=[torch.tensor(True), torch.tensor(False)]).flags == Flags(local_nonfinite=True)
    assert seen([[]], replayed=fine, state=fine, local=[torch.tensor(True)]).flags == Flags()


def test_the_largest_finite_number_is_one() -> None:
    assert seen([[]], replayed=[torch.full((1 << 10,), torch.finfo(torch.float32).max)]).flags == Flags()


def test_failure_and_missing_kernels_are_told() -> None:
    assert seen([0, 0], failed=True).flags == Flags(failed=True)
    assert seen([0], nondeterministic_op=True).flags == Flags(nondeterministic_op=True)
