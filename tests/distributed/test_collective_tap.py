"""Collectives of a replay: each is seen with what a rank puts in, and a rank that breaks off keeps nobody waiting."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from scout_core.consensus.signature import signatures
from scout_core.peers import build_peer_group
from scout_core.replay.collective_tap import CollectiveTap
from scout_core.replay.lockstep import Lockstep, PartnerFailed
from tests.distributed.pool import RankPool


def issue(name: str, given: torch.Tensor) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    group, parts = dist.group.WORLD, list(given.chunk(world))
    out = torch.empty_like(given)
    wide = [torch.empty_like(given) for _ in range(world)]
    calls: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(given),
        "all_reduce async": lambda: dist.all_reduce(given, async_op=True).wait(),
        "reduce": lambda: dist.reduce(given, 0),
        "broadcast": lambda: dist.broadcast(given, 0),
        "all_gather": lambda: dist.all_gather(wide, given),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.cat(wide), given),
        "reduce_scatter": lambda: dist.reduce_scatter(out.chunk(world)[0], [part.clone() for part in parts]),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(out.chunk(world)[0].clone(), given),
        "all_to_all_single": lambda: dist.all_to_all_single(out, given),
        "gather": lambda: dist.gather(given, wide if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(out, [given] * world if rank == 0 else None, 0),
        "send": lambda: dist.send(given, 1) if rank == 0 else dist.recv(out, 0) if rank == 1 else None,
        "functional all_reduce": lambda: functional.all_reduce(given, "sum", group).sum(),
        "functional all_gather": lambda: functional.all_gather_tensor(given, 0, group).sum(),
        "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(given, "sum", 0, group).sum(),
        "functional all_to_all": lambda: functional.all_to_all_single(given, None, None, group).sum(),
    }
    calls[name]()


ALL = (
    "all_reduce",
    "all_reduce async",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "gather",
    "scatter",
    "send",
    "functional all_reduce",
    "functional all_gather",
    "functional reduce_scatter",
    "functional all_to_all",
)


def tapped(names: tuple[str, ...], changed: int) -> dict[str, Any]:
    """Per collective: the word over this rank's input and the bytes, when rank `changed` puts in another value."""
    found = {}
    for name in names:
        given = torch.arange(8.0) + (dist.get_rank() == changed)
        tap = CollectiveTap(torch.device("cpu"), signatures, lambda index, operator: None)
        with tap:
            issue(name, given)
        words = [None if word is None else word.tolist() for word in tap.signed]
        found[name] = (words, [call.size for call in tap.calls], [call.ranks for call in tap.calls])
    return found


def test_every_collective_shows_what_a_rank_puts_in(ranks4: RankPool) -> None:
    healthy, odd = ranks4.run(tapped, ALL, -1), ranks4.run(tapped, ALL, 0)
    for name in ALL:
        words, sizes, members = healthy[0][name]
        assert len(words) == 1, f"{name} was not seen"
        assert sizes[0] >= 32 and members[0] == (0, 1, 2, 3), name
        assert odd[0][name][0] != words, f"{name}: another input must have another word"
        assert odd[2][name][0] == healthy[2][name][0], f"{name}: on other ranks nothing changed"
    for name in ("broadcast", "scatter"):
        assert healthy[1][name][0] == [None], f"{name}: only its root puts something in"


def breaks_off(at: int, rehearsed: bool) -> list[str]:
    """Two collectives, of which rank 1 raises before the one of index `at`; what each of two runs ended in."""
    partners = build_peer_group((0, 1, 2, 3), None, 20.0)
    lockstep = Lockstep(partners, partners, shard_peers=False)
    ends = []

    def work(fails: bool, tap: CollectiveTap) -> float:
        total = torch.ones(4)
        for index in range(2):
            if fails and index == at and dist.get_rank() == 1:
                raise ValueError("out of memory")
            dist.all_reduce(total)
        return float(total[0])

    for run in range(2 if rehearsed else 1):
        fails = run == 1 or not rehearsed
        try:
            value, _ = lockstep.run(("hidden:0", 1), torch.device("cpu"), signatures, partial(work, fails))
            ends.append(f"value {value:g}")
        except (ValueError, PartnerFailed) as error:
            ends.append(type(error).__name__)
    dist.barrier()
    return ends


@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_that_breaks_off_the_first_time_keeps_its_partners_out(at: int, ranks4: RankPool) -> None:
    ends = ranks4.run(breaks_off, at, False, timeout=30)
    assert ends[1] == ["ValueError"]
    assert [ends[rank] for rank in (0, 2, 3)] == [["PartnerFailed"]] * 3


@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_that_breaks_off_later_completes_the_sequence(at: int, ranks4: RankPool) -> None:
    ends = ranks4.run(breaks_off, at, True, timeout=30)
    assert ends[1] == ["value 16", "ValueError"]
    assert all(ends[rank][1].startswith("value") for rank in (0, 2, 3)), "partners go through"
