"""Plans and windows: pure functions of the step that leave nothing out."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scout_core import ReplayHarnessConfig
from scout_core.replay.schedule import Piece, plan_all, plan_step, window

EVERYTHING = ("embedding", "hidden", "output", "optimizer")
intervals = st.none() | st.integers(0, 6)


def ids(step: int, layers: int = 3, available: tuple[str, ...] = EVERYTHING, **options) -> list[str] | None:
    plan = plan_step(step, ReplayHarnessConfig(**options), range(layers), available)
    return None if plan is None else [recipe.recipe_id for recipe in plan.recipes]


def test_a_common_interval_checks_everything_together_and_layers_take_turns() -> None:
    assert ids(9, check_interval=10) is None
    assert ids(10, check_interval=10) == ["embedding", "hidden:0", "output", "optimizer", "state"]
    assert [ids(10 * n, check_interval=10)[1] for n in range(1, 6)] == [f"hidden:{n % 3}" for n in range(5)]


def test_recipes_have_intervals_of_their_own_and_0_turns_one_off() -> None:
    options = {"check_interval": 4, "hidden_interval": 2, "output_interval": 0, "compare_parameters": False}
    assert ids(2, **options) == ["hidden:0"]
    assert ids(4, **options) == ["embedding", "hidden:1", "optimizer"]


def test_interval_0_leaves_manual_checks_only() -> None:
    config = ReplayHarnessConfig(check_interval=0)
    assert all(plan_step(step, config, range(3), EVERYTHING) is None for step in range(1, 200))
    manual = plan_all(7, 1, config, range(3), EVERYTHING)
    assert [recipe.recipe_id for recipe in manual.recipes] == [
        "embedding", "hidden:0", "hidden:1", "hidden:2", "output", "optimizer", "state",
    ]  # fmt: skip
    assert manual.manual and manual.step == 7


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_class_that_is_switched_off_is_off_for_manual_checks_too(name: str) -> None:
    manual = plan_all(1, 1, ReplayHarnessConfig(**{f"{name}_interval": 0}), range(3), EVERYTHING)
    assert name not in manual.classes and len(manual.classes) == 4


def test_what_the_model_does_not_have_is_never_due() -> None:
    assert ids(1, check_interval=1, available=("optimizer",), layers=0) == ["optimizer", "state"]
    assert ids(1, check_interval=1, available=(), layers=0) is None


@settings(deadline=None)
@given(st.integers(1, 6), intervals, intervals, intervals, intervals, st.integers(1, 5))
def test_each_recipe_is_due_exactly_at_multiples_and_every_layer_gets_its_turn(
    check: int, embedding: int | None, hidden: int | None, output: int | None, optimizer: int | None, layers: int
) -> None:
    own = {"embedding": embedding, "hidden": hidden, "output": output, "optimizer": optimizer}
    config = ReplayHarnessConfig(check_interval=check, **{f"{name}_interval": value for name, value in own.items()})
    seen: set[int | None] = set()
    ordinals, updates = [], []
    for step in range(1, 6 * layers + 1):
        plan = plan_step(step, config, range(layers), EVERYTHING)
        due = {name for name in EVERYTHING if config.interval(name) and step % config.interval(name) == 0}
        assert set(plan.classes if plan else ()) - {"state"} == due
        if plan is not None:
            seen |= {recipe.layer for recipe in plan.recipes if recipe.recipe_class == "hidden"}
            ordinals.append(plan.ordinal)
            updates += [plan.optimizer_ordinal] if "optimizer" in due else []
    assert config.interval("hidden") == 0 or seen == set(range(layers))
    assert ordinals == list(range(1, len(ordinals) + 1))
    assert updates == list(range(1, len(updates) + 1))


tables = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 4, 8])), max_size=8)


def elements(pieces: list[Piece]) -> list[tuple[int, int]]:
    return [(piece.index, element) for piece in pieces for element in range(piece.start, piece.stop)]


@settings(deadline=None)
@given(tables, st.integers(0, 50), st.integers(8, 200))
@example([(23, 4), (34, 2), (3, 1)], 36, 161)  # ends around in the element it began with
def test_a_window_keeps_to_its_budget_and_takes_no_element_twice(sizes, ordinal: int, budget: int) -> None:
    pieces = window(sizes, ordinal, budget)
    found = elements(pieces)
    assert len(found) == len(set(found)) and all(piece.start < piece.stop for piece in pieces)
    assert all(piece.start >= 0 and piece.stop <= sizes[piece.index][0] for piece in pieces)
    # an element that a border cuts through belongs to both sides
    assert sum(sizes[index][1] for index, _ in found) <= budget + 3 * 8


@settings(deadline=None)
@given(tables, st.integers(0, 50), st.integers(8, 200))
def test_consecutive_windows_cover_everything(sizes, first: int, budget: int) -> None:
    total = sum(count * width for count, width in sizes)
    covered = {e for n in range(-(-total // budget) + 1) for e in elements(window(sizes, first + n, budget))}
    assert covered == {(index, element) for index, (count, _) in enumerate(sizes) for element in range(count)}
