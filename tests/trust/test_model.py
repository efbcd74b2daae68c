"""Any order of what can befall a job, told to the real `Trust` over real files: nothing contaminated is ever loaded.

A job of one rank, whose state says by itself whether it is corrupt. SCOUT is not told so: it hears only what checks
find, in the words of the functions that judge evidence.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scout_core.config import ScoutConfig
from scout_core.consensus.c3 import C3Status, classify_exact
from scout_core.peers import Coordinates
from scout_core.replay.evidence import Observation
from scout_core.replay.owner_verdict import OWNER_SURFACE, judge_at_rest, settle_owner
from scout_core.replay.reference import Obstacle
from scout_core.replay.result import ReplayResult
from scout_core.replay.tie_break import Statement, settle
from scout_core.replay.verdict import RecipeVerdict
from scout_core.trust import trust as trust_module
from scout_core.trust.durable import CheckpointContext, DurableCheckpointConfig, TorchSaveCallbacks
from scout_core.trust.manifest import Manifest, ManifestStore
from scout_core.trust.memory import HostMemory
from scout_core.trust.states import TrustState
from scout_core.trust.trust import Trust
from tests.trust.late import seen_late

CATALOG = ("embedding", "hidden:0", "output")
_MEMORY = Path("/dev/shm")


def _verdict(evidence: Sequence[int], surface: str = "output", **more: Any) -> RecipeVerdict:
    result = classify_exact(evidence)
    values = {"recipe_id": "hidden:0", "surfaces": {surface: result}, "bitmap": result.bitmap, **more}
    return RecipeVerdict(status=result.status, **values)


def _said(*ratios: float) -> list[Statement]:
    return [Statement(obstacle=Obstacle.NONE, signature=7, ratio=ratio) for ratio in ratios]


def _at_rest(*words: int) -> RecipeVerdict:
    return judge_at_rest("at_rest", [Observation(words=(word,)) for word in words], range(len(words)))


CORRUPT = {
    "majority": _verdict([1, 1, 2, 1], basis="majority"),
    "owner_update": settle_owner(_verdict([1, 2], OWNER_SURFACE, recipe_id="owner_update"), 0),
    "state_at_rest": _at_rest(0, 0, 5, 0),
    "reference": settle(_verdict([1, 2], persistence="persistent"), _said(0.5, 9.0), (0, 1)),
    "two without a reference": _verdict([1, 2]),
}
UNCLEAR = {
    "another kernel": settle(_verdict([1, 1, 2], basis="majority"), _said(0.1, 0.1, 0.2), (0, 1, 2)),
    "written unseen": _at_rest(1, 1, 0, 0),
    "no reference": settle(_verdict([1, 2], persistence="persistent"), _said(0.5, 0.5), (0, 1)),
}


def test_the_judges_say_what_the_model_takes_them_to_say() -> None:
    assert [v.basis for v in CORRUPT.values()] == ["majority", "self", "self", "reference", "none"]
    assert [v.status for v in CORRUPT.values()] == [C3Status.ATTRIBUTED] * 4 + [C3Status.INCONCLUSIVE]
    assert [v.status for v in UNCLEAR.values()] == [C3Status.INCONCLUSIVE] * 3


def told(step: int, recipes: Sequence[str], verdict: RecipeVerdict | None = None, **more: Any) -> ReplayResult:
    """The result of a check that found this in one recipe, and in the others nothing."""
    size = 4 if verdict is None else len(next(iter(verdict.surfaces.values())).bitmap)
    nobody = (False,) * size
    found = {} if verdict is None else {f"{verdict.recipe_id}/{name}": r for name, r in verdict.surfaces.items()}
    values: dict[str, Any] = {
        "peer_ranks": (0,) * size,  # the one rank there is stands for all
        "status": C3Status.AGREE if verdict is None else verdict.status,
        "complete": verdict is None or verdict.status is C3Status.ATTRIBUTED,
        "sdc_bitmap": nobody if verdict is None else verdict.bitmap or nobody,
        "sdc_sources": () if verdict is None or verdict.nondeterministic else tuple(found),
        "straggler_bitmap": nobody,
        "c3_results": found,
        "checked_recipe_ids": tuple(recipes),
    }
    return ReplayResult(step=step, **{**values, **more})


class Killed(BaseException):
    """The process ends here."""


class Dying(TorchSaveCallbacks):
    """Ends the process where it is told to."""

    def __init__(self) -> None:
        self.at: str | None = None

    def save_candidate(self, context: CheckpointContext, state: Any) -> Sequence[Path]:
        written = super().save_candidate(context, state)
        if self.at == "save":
            written[0].write_bytes(written[0].read_bytes()[:100])
        if self.at in ("save", "before commit"):
            raise Killed
        return written

    def commit_candidate(self, context: CheckpointContext) -> None:
        if self.at == "commit":
            raise Killed


class Job:
    """What `Trust` asks an adapter for. `corrupt` names the recipe that would show it."""

    def __init__(self, place: int) -> None:
        self.place, self.step, self.corrupt = place, 0, ""
        self.serial, self.fresh = 0, False  # which boundary's state this is, and whether it was made in this attempt
        self.wrong: list[str] = []  # what was raised here would be taken for one more bad load

    def layout(self) -> Any:
        return SimpleNamespace(coordinates=Coordinates(dp_replicate=self.place))

    def training_state(self) -> Any:
        weight = torch.full((64,), float(self.step))
        named = {"place": self.place, "step": self.step, "corrupt": self.corrupt, "serial": self.serial}
        return {**named, "weight": weight}

    def load_training_state(self, state: Any) -> None:
        if state["place"] != self.place:
            self.wrong.append("a state of another topology was loaded")
        if not torch.equal(state["weight"], torch.full((64,), float(state["step"]))):
            self.wrong.append("a torn state was loaded")
        self.step, self.corrupt, self.serial = state["step"], state["corrupt"], state["serial"]


class Life(RuleBasedStateMachine):
    """A run and all its attempts."""

    @initialize(
        dense=st.booleans(), gemini=st.booleans(), flush=st.booleans(), goes_on=st.booleans(), sampled=st.booleans()
    )
    def begins(self, dense: bool, gemini: bool, flush: bool, goes_on: bool, sampled: bool = False) -> None:
        """`goes_on`: after corruption was found the job is not restarted; it spreads until all ranks hold it alike.

        `sampled`: under the dense rule, a check sees a part of the catalog. Such a rule trusts what no check has seen,
        so only what some check did see is held against it.
        """
        self.dense, self.goes_on, self.sampled = dense, goes_on, sampled and dense
        self.folder = Path(tempfile.mkdtemp(dir=_MEMORY if _MEMORY.is_dir() else None))
        self.callbacks = Dying()
        self.saved: dict[str, tuple[int, bool]] = {}
        self.serial = 0
        self.found: set[int] = set()
        self.config = ScoutConfig.build(
            run_dir=self.folder,
            gemini=gemini,
            flush_interval=int(flush),
            certification="dense" if dense else "dynamic",
            on_fault="restart",
            restart_budget=99,
        )
        self.start(0)

    def start(self, place: int) -> None:
        self.job, self.callbacks.at = Job(place), None
        durable = DurableCheckpointConfig(callbacks=self.callbacks, folder=self.folder / "durable", visibility_s=0)
        adapter: Any = self.job
        self.trust = Trust(adapter, self.config, durable, CATALOG, lambda problem: None)
        step = self.trust.resume()
        assert step == self.job.step and not self.job.wrong, self.job.wrong
        decision = self.trust.last_decision
        assert self.job.serial not in self.found, "a state was loaded in which a check had found corruption"
        if step and (decision is None or decision.mode != "GEMINI") and not self.sampled:
            assert not self.job.corrupt, "a contaminated state was loaded"

    @rule(
        part=st.sampled_from([CATALOG, *[(name,) for name in CATALOG]]),
        how=st.sampled_from(sorted(CORRUPT)),
        slow=st.booleans(),
        late=st.sampled_from([False, False, True]),
    )
    def check(self, part: tuple[str, ...], how: str, slow: bool, late: bool) -> None:
        """A check that sees corruption if it looks there; the files of a save may be late for the manifest writer."""
        part = CATALOG if self.dense and not self.sampled else part
        seen = CORRUPT[how] if self.job.corrupt in part else None
        stragglers = {"straggler_bitmap": (False, True, False, False)} if slow and seen is None else {}
        self.boundary(lambda step: told(step, part, seen, **stragglers), late=late)

    @rule(what=st.sampled_from([*sorted(UNCLEAR), "nan", "incomplete", "broke off"]))
    def unclear(self, what: str) -> None:
        more: dict[str, Any] = {"nan": {"nonfinite": True}, "incomplete": {"complete": False}}.get(what, {})
        verdict = UNCLEAR.get(what)
        self.boundary(lambda step: None if what == "broke off" else told(step, CATALOG, verdict, **more))

    def boundary(self, result: Any, late: bool = False) -> None:
        self.job.step += 1
        self.serial += 1
        self.job.serial, self.job.fresh = self.serial, True

        def hidden(name: str) -> bool:  # from the manifest writer, not from the rank that wrote it
            frames = traceback.walk_stack(None) if name.endswith(".pt") else ()
            return any(frame.f_code.co_name == "await_visible" for frame, _ in frames)

        found = result(self.job.step)
        before = self.manifests()
        try:
            with seen_late(hidden, 600) if late else contextlib.nullcontext():
                _, decision = self.trust.boundary(self.job.step, found)
        except Killed:
            self.note(before)
            self.end(crash=True)
            self.start(self.job.place)
            return
        saved = self.note(before)
        assert not saved or (found is not None and found.trustworthy), "a state was kept that no check accepted"
        for manifest in saved if late else ():
            assert "not visible" in manifest.reason and manifest.state == "CANDIDATE"
        if decision is not None and self.goes_on:
            self.job.corrupt = self.job.corrupt and "alike everywhere"
        elif decision is not None:
            with contextlib.suppress(SystemExit):
                self.trust.leave(decision)
            self.end(crash=True)
            self.start(self.job.place)

    def note(self, before: dict[str, Manifest]) -> list[Manifest]:
        """What was saved since `before`, which is as corrupt as the job is."""
        saved = [manifest for key, manifest in self.manifests().items() if key not in before]
        self.saved |= {m.checkpoint_id: (self.job.serial, bool(self.job.corrupt)) for m in saved}
        return saved

    @property
    def contaminated(self) -> set[str]:
        """Durable checkpoints that must not be trusted."""
        seen = self.sampled
        return {key for key, (serial, bad) in self.saved.items() if serial in self.found or (bad and not seen)}

    def whole_catalog(self) -> ReplayResult:
        """A check out of turn. What it finds in a loaded state may have come since: its failed loads count instead."""
        seen = CORRUPT["majority"] if self.job.corrupt in CATALOG else None
        if seen is not None and self.job.fresh:
            self.found.add(self.job.serial)
        return told(self.job.step, CATALOG, seen)

    def manifests(self) -> dict[str, Manifest]:
        return {m.checkpoint_id: m for m in ManifestStore(self.folder / "manifests").all()[0]}

    @rule()
    def check_now(self) -> None:
        result = self.whole_catalog()
        self.trust.checked(result)
        self.trust.out_of_turn(self.job.step, result)

    @rule(where=st.sampled_from(CATALOG))
    def corrupts(self, where: str) -> None:
        self.job.corrupt = self.job.corrupt or where

    @rule(order=st.permutations(CATALOG), corrupts=st.booleans(), how=st.sampled_from(sorted(CORRUPT)))
    def cycle(self, order: Sequence[str], corrupts: bool, how: str) -> None:
        """A cycle, one recipe a check. Corruption may come after the check that would show it."""
        for recipe in order:
            self.check(part=(recipe,), how=how, slow=False, late=False)
            if corrupts:
                self.corrupts(where=order[0])

    @rule(at=st.sampled_from(["save", "before commit", "commit"]))
    def will_die(self, at: str) -> None:
        self.callbacks.at = at

    @rule(crash=st.booleans(), fewer=st.sampled_from([False, False, False, True]), late=st.booleans())
    def restarts(self, crash: bool, fewer: bool, late: bool) -> None:
        """Within the process or in another, with other ranks, or with files that are not to be seen yet."""
        self.end(crash)
        place = self.job.place + 1 if fewer else self.job.place
        with seen_late(lambda name: name.endswith(".pt"), 600) if late else contextlib.nullcontext():
            self.start(place)

    @rule(bit=st.integers(0, 7))
    def disk_damages_the_newest(self, bit: int) -> None:
        files = sorted((self.folder / "durable").rglob("*.pt"))
        if files:
            raw = bytearray(files[-1].read_bytes())
            raw[len(raw) // 2] ^= 1 << bit
            files[-1].write_bytes(raw)

    @rule(kind=st.sampled_from(["hang", "uncertain", "straggler", "sdc"]), restart=st.booleans())
    def asks(self, kind: Any, restart: bool) -> None:
        """`prepare_recovery` with all ranks accessible: the replay finds what there is to find."""
        decision = self.trust.prepare(kind, self.job.step, True, self.whole_catalog)
        if kind == "sdc" or (self.job.corrupt in CATALOG and kind != "straggler"):
            assert decision.mode != "GEMINI"
        assert decision.mode == "GEMINI" or decision.checkpoint_id not in self.contaminated
        if restart:
            self.end(crash=True)
            self.start(self.job.place)

    def end(self, crash: bool) -> None:
        self.trust.close()
        if crash:
            trust_module._SURVIVORS.clear()

    @invariant()
    def nothing_contaminated_is_verified_or_chosen(self) -> None:
        verified = {key for key, m in self.manifests().items() if m.state == "RECOVERY_VERIFIED"}
        assert not verified & self.contaminated
        decision = self.trust.prepare("inaccessible", self.job.step, False, None)
        assert decision.mode in ("RECOVERY_VERIFIED", "RESTART_FROM_SCRATCH")
        assert decision.checkpoint_id not in self.contaminated
        if decision.source == "durable":
            assert decision.checkpoint_id in verified

    def teardown(self) -> None:
        if hasattr(self, "trust"):
            self.end(crash=True)
            shutil.rmtree(self.folder)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=int(os.environ.get("SCOUT_MODEL_LIVES", "50")),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_a_candidate_of_an_earlier_attempt_is_not_promoted_with_its_step_of_this_one() -> None:
    life = Life()
    life.begins(dense=False, gemini=False, flush=False, goes_on=False)
    for recipe in CATALOG:
        life.check(part=(recipe,), how="majority", slow=False, late=False)
        life.corrupts(where="embedding")  # which has just been found clean, and is not looked at again in this cycle
    assert [m.state for m in life.manifests().values()] == ["CANDIDATE"] and life.contaminated
    life.restarts(crash=True, fewer=False, late=False)
    assert life.job.step == 0 and not life.job.corrupt
    for _ in range(2):
        for recipe in CATALOG:
            life.check(part=(recipe,), how="majority", slow=False, late=False)
    life.nothing_contaminated_is_verified_or_chosen()
    assert {(m.step, m.attempt): m.state for m in life.manifests().values()} == {
        (3, 0): "CANDIDATE",
        (3, 1): "RECOVERY_VERIFIED",
        (6, 1): "CANDIDATE",
    }
    life.teardown()


@pytest.mark.parametrize("dense", [True, False])
def test_a_candidate_falls_with_corruption_that_is_found_after_it_and_no_later_state_is_trusted(dense: bool) -> None:
    life = Life()
    life.begins(dense=dense, gemini=False, flush=False, goes_on=True)
    for corrupts in (True, False, False, False):
        life.cycle(order=CATALOG, corrupts=corrupts, how="state_at_rest")
        life.nothing_contaminated_is_verified_or_chosen()
    states = {m.step: m.state for m in life.manifests().values()}
    assert states == ({1: "RECOVERY_VERIFIED"} if dense else {3: "REJECTED"})
    life.restarts(crash=True, fewer=False, late=False)
    life.job.corrupt = ""  # what was loaded, or a start from scratch
    for _ in range(2):
        life.cycle(order=CATALOG, corrupts=False, how="majority")
    assert "RECOVERY_VERIFIED" in {m.state for m in life.manifests().values() if m.attempt == 1}
    life.teardown()


def test_corruption_that_a_check_out_of_turn_found_counts_too() -> None:
    life = Life()
    life.begins(dense=True, gemini=False, flush=False, goes_on=True)
    life.trust.checked(told(0, CATALOG, CORRUPT["majority"]))
    life.cycle(order=CATALOG, corrupts=False, how="majority")
    assert not life.manifests()
    life.teardown()


@pytest.mark.parametrize("asked", ["check_now", "hang"])
@pytest.mark.parametrize("gemini", [True, False])
def test_a_step_whose_sampled_check_was_clean_falls_when_the_whole_catalog_finds_corruption_in_it(
    gemini: bool, asked: str
) -> None:
    life = Life()
    life.begins(dense=True, gemini=gemini, flush=gemini, goes_on=True, sampled=True)
    life.check(part=("embedding",), how="majority", slow=False, late=False)
    life.corrupts(where="output")
    life.check(part=("embedding",), how="majority", slow=False, late=False)
    life.check_now() if asked == "check_now" else life.asks(kind="hang", restart=False)
    for kind in ("sdc", "hang", "straggler", "inaccessible"):
        decision = life.trust.prepare(kind, 2, True, life.whole_catalog)
        assert (decision.mode, decision.step) == (
            "GEMINI" if (kind, gemini) == ("straggler", True) else "RECOVERY_VERIFIED",
            1,
        )
    for crash in (True, False):
        life.restarts(crash=crash, fewer=False, late=False)
        assert life.job.step == 1
    assert {m.step: m.state for m in life.manifests().values()} == {1: "RECOVERY_VERIFIED", 2: "REJECTED"}
    life.teardown()


@pytest.mark.parametrize("gemini", [True, False])
@pytest.mark.parametrize("crash", [True, False])
def test_what_was_certified_after_the_first_sign_of_a_hardware_fault_is_never_loaded(gemini: bool, crash: bool) -> None:
    life = Life()
    life.begins(dense=True, gemini=gemini, flush=gemini, goes_on=True)
    for _ in range(3):
        life.check(part=CATALOG, how="majority", slow=False, late=False)
    for first_sign_after in (1, 2):
        decision = life.trust.hardware_fault(first_sign_after, (0,), ("its host",), taints=True)
        assert decision is not None and decision.step == (1 if first_sign_after == 1 else 2)
    life.restarts(crash=crash, fewer=False, late=False)
    followed = life.trust.last_decision
    assert life.job.step == 1 and followed is not None and followed.exclude_hosts == ("its host",)
    life.check(part=CATALOG, how="majority", slow=False, late=False)
    life.restarts(crash=crash, fewer=False, late=False)
    assert life.job.step == 2, "step 3 of the failing hardware is newer, and verified as far as it knew"
    assert {(m.step, m.attempt): m.state for m in life.manifests().values()} == {
        (1, 0): "RECOVERY_VERIFIED",
        (2, 0): "REJECTED",
        (3, 0): "REJECTED",
        (2, 1): "RECOVERY_VERIFIED",
    }
    life.teardown()


def test_a_hardware_fault_after_which_the_job_goes_on_being_certified_takes_nothing_back() -> None:
    life = Life()
    life.begins(dense=True, gemini=False, flush=False, goes_on=True)
    for step in (1, 2):
        life.check(part=CATALOG, how="majority", slow=False, late=False)
        if step == 1:
            life.trust.hardware_fault(0, (0,), (), taints=False)
    life.restarts(crash=True, fewer=False, late=False)
    assert life.job.step == 2
    life.teardown()


def three_steps(**more: bool) -> Life:
    """A life with three verified durable checkpoints."""
    life = Life()
    life.begins(dense=True, gemini=False, flush=False, goes_on=True, **more)
    for _ in range(3):
        life.check(part=CATALOG, how="majority", slow=False, late=False)
    return life


def test_checkpoints_that_cannot_be_seen_at_a_restart_are_not_taken_for_bad_ones() -> None:
    life = three_steps()
    for _ in range(3):
        life.restarts(crash=True, fewer=False, late=True)
        assert life.job.step == 0
    assert [m.state for m in life.manifests().values()] == ["RECOVERY_VERIFIED"] * 3
    life.restarts(crash=True, fewer=False, late=False)
    assert life.job.step == 3
    life.teardown()


def test_a_torn_checkpoint_is_tried_once_an_attempt_and_quarantined_by_the_second() -> None:
    life = three_steps()
    files = sorted((life.folder / "durable").rglob("*.pt"))
    files[-1].write_bytes(files[-1].read_bytes()[:-1])
    for state in ("RECOVERY_VERIFIED", "QUARANTINED"):
        life.restarts(crash=True, fewer=False, late=False)
        newest = max(life.manifests().values(), key=lambda m: m.step)
        assert life.job.step == 2 and newest.state == state
        life.trust._durable.proven(life.trust._loaded[2])  # type: ignore[union-attr,index]
    life.teardown()


@pytest.mark.timeout(60)
def test_with_manifests_that_cannot_be_written_a_bad_checkpoint_is_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life = three_steps()
    life.disk_damages_the_newest(bit=0)

    def full(store: ManifestStore, manifest: Manifest) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ManifestStore, "write", full)
    for _ in range(2):
        life.restarts(crash=True, fewer=False, late=False)
        assert life.job.step == 2
    life.teardown()


def test_a_load_that_fails_halfway_is_never_trained_on_as_if_from_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    life = three_steps()
    broken = [3]
    whole = Job.load_training_state

    def halfway(job: Job, state: Any) -> None:
        whole(job, state)
        if state["step"] in broken:
            raise RuntimeError("the optimizer refused its part")

    monkeypatch.setattr(Job, "load_training_state", halfway)
    life.restarts(crash=True, fewer=False, late=False)
    assert life.job.step == 2
    broken.extend((1, 2))
    with pytest.raises(RuntimeError, match="start the processes anew"):
        life.restarts(crash=True, fewer=False, late=False)
    life.teardown()


def test_of_two_attempts_captures_of_one_step_the_verified_one_is_loaded() -> None:
    life = Life()
    life.begins(dense=False, gemini=True, flush=False, goes_on=False)
    known_as = life.trust._record.run_id, life.trust._topology
    life.end(crash=True)
    survivors = []
    for attempt, state, corrupt in ((1, TrustState.CANDIDATE, "output"), (0, TrustState.RECOVERY_VERIFIED, "")):
        life.job.step, life.job.corrupt = 6, corrupt
        kept = {"step": 6, "state": life.job.training_state()}
        survivors.append((attempt, HostMemory(owner=0).begin(6, state, kept).finish()))
    trust_module._SURVIVORS[known_as] = survivors
    life.start(0)
    assert life.job.step == 6 and not life.job.corrupt
    life.teardown()
