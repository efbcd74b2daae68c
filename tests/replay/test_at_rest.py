"""State that one rank owns alone: what changes at rest is seen, what the job writes is not judged, and blame."""

from __future__ import annotations

import pytest
import torch

from scout_core.consensus.c3 import C3Status
from scout_core.faults import flip_bit
from scout_core.replay.at_rest import AtRest
from scout_core.replay.evidence import Observation
from scout_core.replay.owner_verdict import judge_at_rest, settle_owner
from scout_core.replay.verdict import judge_recipe


def owned() -> list[tuple[str, str, torch.Tensor]]:
    return [("parameter_state", f"p{i}", torch.arange(8.0) + i) for i in range(3)]


def unseen_write(tensor: torch.Tensor) -> None:
    """A write that leaves no version behind, as a failing memory cell does."""
    before = tensor._version
    tensor.numpy()[3] += 1
    assert tensor._version == before


def test_what_changes_between_two_steps_is_named() -> None:
    state, rest = owned(), AtRest(1 << 20)
    rest.begin(state)
    unseen_write(state[1][2])
    rest.end()
    found = rest.take()
    assert (found.watched, found.changed) == (True, ("p1",))
    assert not rest.take().watched, "what was taken is gone"


def test_what_the_job_writes_is_not_judged() -> None:
    state, rest = owned(), AtRest(1 << 20)
    rest.begin(state)
    state[0][2].mul_(2)
    flip_bit(state[2][2], 0, 3)
    rest.end()
    assert rest.take().changed in ((), ("p2",))  # whether a drill's flip leaves a version behind is its own affair
    rest.begin(state)
    state[0][2].mul_(2)
    rest.end()
    assert rest.take().changed == ()


def test_windows_take_turns_over_everything() -> None:
    state, rest = owned(), AtRest(32)
    found: set[str] = set()
    for _ in range(3):
        rest.begin(state)
        for _, _, tensor in state:
            unseen_write(tensor)
        rest.end()
        found |= set(rest.take().changed)
    assert found == {"p0", "p1", "p2"}


def test_a_step_without_a_window_brings_nothing() -> None:
    rest = AtRest(1 << 20)
    rest.end()
    assert not rest.take().watched


@pytest.mark.parametrize(
    ("words", "status", "bitmap"),
    [
        ((0, 0, 0, 0), C3Status.AGREE, (False,) * 4),
        ((0, 0, 9, 0), C3Status.ATTRIBUTED, (False, False, True, False)),
        ((0, 9), C3Status.ATTRIBUTED, (False, True)),
        ((9, 9), C3Status.INCONCLUSIVE, (False, False)),
        ((9, 9, 9, 0), C3Status.INCONCLUSIVE, (False,) * 4),
        ((9, 8, 0, 0), C3Status.INCONCLUSIVE, (False,) * 4),
    ],
)
def test_a_minority_is_blamed_on_its_own_evidence(words, status, bitmap) -> None:
    verdict = judge_at_rest("at_rest", [Observation(words=(word,)) for word in words], range(len(words)))
    assert (verdict.status, verdict.bitmap) == (status, () if status is C3Status.AGREE else bitmap)


OWNER = ("gradient", "hyperparameters", "parameter_state", "optimizer_state", "updated_state", "owner_update")


def of_two(odd: dict[str, int], source: int):
    peers = [Observation(words=tuple(odd.get(name, 1) if p == 1 else 1 for name in OWNER)) for p in range(2)]
    return settle_owner(judge_recipe("owner_update", "owner_update", [peers, peers], qualified=True), source)


def test_between_two_peers_an_owner_contradicts_itself() -> None:
    verdict = of_two({"owner_update": 7}, source=1)
    assert (verdict.status, verdict.bitmap, verdict.basis) == (C3Status.ATTRIBUTED, (False, True), "self")


def test_two_peers_that_recompute_differently_blame_nobody() -> None:
    assert of_two({"updated_state": 7, "owner_update": 7}, source=1).status is C3Status.INCONCLUSIVE
