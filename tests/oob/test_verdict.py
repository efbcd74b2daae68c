"""The verdict functions on gathered views: inputs as observers see them, outcomes by kind and rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.oob.records import Call, GroupView, ProcessView, RankView, Worker
from scout_core.oob.sequences import compare_tails, first_divergence
from scout_core.oob.verdict import judge

WORLD = (0, 1, 2, 3)
KEY = 7


def group(calls: str, members: tuple[int, ...] = WORLD, key: int = KEY, start: int = 1) -> GroupView:
    """A ring whose calls are letters: equal letters are equal calls."""
    ring = tuple(
        Call(sequence=start + i, fingerprint=ord(letter), text=f"{letter}() at a.py:1", state="returned", step=i)
        for i, letter in enumerate(calls)
    )
    return GroupView(key=key, members=members, issued=start + len(calls) - 1, calls=ring)


def waiting(rank: int, calls: str, **changes: object) -> RankView:
    """A rank stuck in the last of its calls."""
    seen = group(calls)
    base = RankView(
        rank=rank, quiet_s=9.0, threshold_s=3.0, step=5, activity="collective", group=KEY, sequence=seen.issued,
        groups=(seen,),
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def elsewhere(rank: int, calls: str, **changes: object) -> RankView:
    """A rank that is quiet outside any collective."""
    return replace(waiting(rank, calls), **({"activity": "none", "group": None, "sequence": 0} | changes))


def verdict(*views: RankView) -> tuple[str, tuple[int, ...]] | None:
    found = judge(views, WORLD)
    return None if found is None else (found.kind, found.ranks)


def others(calls: str, *, but: int) -> list[RankView]:
    return [waiting(rank, calls) for rank in WORLD if rank != but]


@pytest.mark.parametrize(
    ("calls", "how"),
    [("abd", "missing call"), ("abxcd", "extra call"), ("abdc", "wrong order"), ("abxd", "other call")],
)
def test_a_rank_whose_calls_do_not_match_is_named_with_the_first_one(calls: str, how: str) -> None:
    finding = judge([*others("abcde", but=2), waiting(2, calls)], WORLD)
    assert finding is not None and (finding.kind, finding.ranks) == ("collective_desync", (2,))
    assert finding.evidence["sequence"] == 3 and finding.evidence["how"] == how
    assert set(finding.exonerating) == {"0", "1", "3"}


def test_two_against_two_names_nobody() -> None:
    assert verdict(*[waiting(r, "aab" if r < 2 else "aac") for r in WORLD]) == ("collective_desync", ())


@pytest.mark.parametrize(
    ("fourth", "expected"),
    [
        ({"phase": "compile", "threshold_s": 60.0}, None),  # it may yet decide it
        ({"process": ProcessView(state="T")}, ("process_stall", (3,))),
        (None, ("collective_desync", ())),  # no answer
    ],
)
def test_two_against_one_of_four_is_no_majority(
    fourth: dict[str, object] | None, expected: tuple[str, tuple[int, ...]] | None
) -> None:
    late = [] if fourth is None else [elsewhere(3, "aa", **fourth)]
    assert verdict(waiting(0, "aab"), waiting(1, "aac"), waiting(2, "aab"), *late) == expected


def test_the_step_is_the_first_in_which_ranks_parted() -> None:
    """Each letter is a step. What the odd rank issued in the place of the call that it left out is of a later one."""
    own = group("abd")
    left_out = replace(own, calls=(*own.calls[:2], replace(own.calls[2], step=3)))
    finding = judge([*others("abcde", but=1), waiting(1, "", groups=(left_out,))], WORLD)
    assert finding is not None and (finding.ranks, finding.step) == ((1,), 2)


def test_all_inside_the_same_call_blames_no_rank() -> None:
    assert verdict(*[waiting(r, "abc") for r in WORLD]) == ("collective_hang", ())


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"process": ProcessView(state="T")}, "process_stall"),
        ({"process": ProcessView(state="R", cpu=1.0)}, "process_stall"),
        ({"exception": "Traceback\nValueError: x"}, "process_stall"),
        ({"activity": "dataloader", "activity_name": "train"}, "dataloader_stall"),
        ({"activity": "checkpoint_write"}, "checkpoint_io_stall"),
        ({"status": "exited", "process": ProcessView(state="Z", exit_code=-9)}, "process_exit"),
        ({"status": "exited", "process": ProcessView(state="Z", exit_code=1)}, "process_exit"),
        ({"status": "exited", "process": ProcessView(state="Z", exit_code=0)}, "collective_desync"),
        ({"status": "exited", "process": ProcessView(state="gone"), "farewell": "finished"}, "collective_desync"),
        ({"status": "exited", "process": ProcessView(state="gone")}, "process_exit"),
        ({"status": "closed"}, "collective_desync"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named_for_what_it_does(changes: dict[str, object], kind: str) -> None:
    assert verdict(*others("abc", but=1), elsewhere(1, "ab", **changes)) == (kind, (1,))


def test_a_rank_within_its_own_grace_is_waited_for() -> None:
    assert verdict(*others("abc", but=1), elsewhere(1, "ab", phase="compile", threshold_s=60.0)) is None


def test_a_stopped_process_has_no_grace() -> None:
    late = elsewhere(1, "ab", phase="compile", threshold_s=60.0, process=ProcessView(state="T"))
    assert verdict(*others("abc", but=1), late) == ("process_stall", (1,))


def test_a_stopped_worker_is_named_by_pid() -> None:
    late = elsewhere(1, "ab", activity="dataloader", workers=(Worker(pid=77, state="T"),), threshold_s=60.0)
    finding = judge([*others("abc", but=1), late], WORLD)
    assert finding is not None and finding.kind == "dataloader_stall" and "worker 77 is stopped" in finding.message


def test_every_rank_in_its_loader_is_the_storage_of_all() -> None:
    views = [elsewhere(r, "ab", activity="dataloader") for r in WORLD]
    assert verdict(*views) == ("dataloader_stall", ())


def test_victims_of_a_killed_rank_are_not_named() -> None:
    lost = {"farewell": "collective_failed", "farewell_text": "Connection closed by peer", "status": "exited"}
    dead = [replace(v, **lost, process=ProcessView(state="Z", exit_code=1)) for v in others("abc", but=2)]
    killed = elsewhere(2, "ab", status="exited", process=ProcessView(state="Z", exit_code=-9))
    assert verdict(*dead, killed) == ("process_exit", (2,))


def test_a_rank_that_handles_a_collectives_error_is_killed_first_hand() -> None:
    failed = {"farewell": "collective_failed", "farewell_text": "Connection closed by peer", "status": "exited"}
    killed = elsewhere(2, "abc", **failed, process=ProcessView(state="Z", exit_code=-9))
    assert verdict(*others("abc", but=2), killed) == ("process_exit", (2,))


@pytest.mark.parametrize(("code", "farewell"), [(0, "none"), (None, "finished")], ids=["known", "already reaped"])
def test_an_exit_of_all_at_the_end_is_no_fault(code: int | None, farewell: str) -> None:
    """A launcher may reap a rank before its observer looks; before Linux 6.15 the code is lost then."""
    ended = {"status": "exited", "process": ProcessView(state="Z", exit_code=code), "farewell": farewell}
    assert verdict(*[elsewhere(r, "abc", **ended) for r in WORLD]) is None
    assert verdict(*[elsewhere(r, "abc", **(ended if r == 2 else {"quiet_s": 0.0})) for r in WORLD]) is None


def test_ranks_asked_to_end_are_no_fault() -> None:
    ended = {"status": "exited", "process": ProcessView(state="Z", exit_code=-15)}
    assert verdict(*[elsewhere(r, "abc", **ended) for r in WORLD]) is None


def test_subgroups_have_sequences_of_their_own() -> None:
    """Two ranks did one more call on a group of their own; then all wait in one call of the world."""
    extra = group("zz", members=(1, 2), key=8)
    views = [waiting(r, "ab", groups=(group("ab"), extra) if r in (1, 2) else (group("ab"),)) for r in WORLD]
    assert verdict(*views) == ("collective_hang", ())


def test_a_chain_of_waits_leads_to_its_root() -> None:
    """Rank 0 waits for 1 in one group, 1 waits for 2 in another, and 2 spins."""
    first, second = group("a", members=(0, 1), key=1), group("a", members=(1, 2), key=2)
    views = [
        waiting(0, "", groups=(first,), group=1, sequence=1),
        waiting(1, "", groups=(second,), group=2, sequence=1),
        elsewhere(2, "", groups=()),
    ]
    found = judge(views, (0, 1, 2))
    assert found is not None and (found.kind, found.ranks) == ("process_stall", (2,))


def test_progress_anywhere_else_is_no_stall_of_all() -> None:
    views = [replace(elsewhere(r, "ab"), quiet_s=0.1 if r else 9.0) for r in WORLD]
    assert verdict(*views) is None


@given(
    calls=st.text(alphabet="abc", min_size=2, max_size=12),
    place=st.integers(min_value=0, max_value=11),
    who=st.sampled_from(WORLD),
    what=st.sampled_from(["missing", "extra", "other"]),
    depth=st.integers(min_value=2, max_value=12),
)
def test_whatever_one_rank_does_differently_no_other_is_named(
    calls: str, place: int, who: int, what: str, depth: int
) -> None:
    place %= len(calls)
    changed = {
        "missing": calls[:place] + calls[place + 1 :],
        "extra": calls[:place] + "x" + calls[place:],
        "other": calls[:place] + "x" + calls[place + 1 :],
    }[what]

    def ring(text: str) -> GroupView:
        full = group(text)
        return replace(full, calls=full.calls[-depth:])

    views = {r: ring(changed if r == who else calls) for r in WORLD}
    found = first_divergence(views)
    if found is not None:
        assert found.apart == (who,)
    finding = judge([replace(elsewhere(r, ""), groups=(v,)) for r, v in views.items()], WORLD)
    assert finding is None or set(finding.ranks) <= {who}


@given(st.text(alphabet="ab", max_size=8))
def test_equal_sequences_never_diverge(calls: str) -> None:
    assert first_divergence({r: group(calls) for r in WORLD}) is None


def test_tails_are_compared_as_far_as_both_go() -> None:
    assert compare_tails([2], [1, 2]) == "missing call"
    assert compare_tails([3], [1, 2]) == "other call"


def test_a_view_survives_its_way_through_json() -> None:
    view = waiting(2, "abc", workers=(Worker(pid=5, state="S"),), process=ProcessView(state="S", cpu=0.5))
    assert RankView.from_json(view.to_json()) == view
