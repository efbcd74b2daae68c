"""The memory tier: every kind of state comes back bit for bit; damage never does."""

from __future__ import annotations

import math
import random
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from scout_core.trust.files import UntrustedFile
from scout_core.trust.memory import HostMemory
from scout_core.trust.shard import Shards
from scout_core.trust.states import TrustState
from scout_core.trust.tree import StateError, flatten, rebuild

STATE = TrustState.RECOVERY_VERIFIED


def training_state() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()},
        "half": torch.randn(3, 2).bfloat16().t(),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "numbers": [1, -2.5, math.inf, True, None, "text", (), {3: 1 << 80}],
        "ordered": OrderedDict(a=torch.tensor(7)),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def shards(folder: Path, **change: Any) -> Shards:
    return Shards(folder, **{"run_id": "run", "topology_digest": "t", "world_size": 4, **change})


def written(folder: Path, step: int = 7, state: Any = None) -> Path:
    memory = HostMemory(owner=2)
    return shards(folder).write(memory.begin(step, STATE, state or training_state()).finish(), attempt=0, holder=2)


def test_state_comes_back_from_its_parts() -> None:
    state = training_state()
    flat = flatten(state)
    assert same(rebuild(flat.structure, flat.tensors), {**state, "ordered": {"a": torch.tensor(7)}})


@pytest.mark.parametrize("value", [object(), {1.5: 2}, {1, 2}, torch.empty(2, device="meta")])
def test_what_would_need_pickle_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(StateError, match=r"state\['a'\]"):
        flatten({"a": value})


def test_a_refusal_deep_inside_says_the_whole_way() -> None:
    with pytest.raises(StateError, match=r"state\['a'\]\[1\]\['b'\] has a key of type float; use strings"):
        flatten({"a": [0, {"b": {1.5: 2}}]})


def test_memory_and_disk_give_back_the_same_bits(tmp_path: Path) -> None:
    state = training_state()
    copy = HostMemory(owner=2).begin(7, STATE, state).finish()
    place = shards(tmp_path).write(copy, attempt=1, holder=2)
    back = shards(tmp_path).read(place, 2)
    assert same(copy.load(), dict(state)) and same(back.load(), dict(state)) and back.step == 7
    # the data is a plain safetensors file to everybody else
    foreign = safetensors.torch.load_file(place / "state.safetensors")
    assert len(foreign) == len(flatten(state).tensors)


def test_the_previous_copy_stays_until_the_next_is_complete() -> None:
    memory = HostMemory(owner=0)
    live = torch.zeros(1000)
    memory.begin(1, STATE, {"w": live}).finish()
    live.fill_(1)
    second = memory.begin(2, STATE, {"w": live})
    live.fill_(9)
    first = memory.latest
    assert first is not None and first.step == 1 and first.load()["w"].sum() == 0
    second.finish()
    latest = memory.latest
    assert latest is not None and latest.step == 2 and latest.load()["w"].sum() == 1000
    assert first.intact()


def test_state_that_changes_its_shape_between_captures_keeps_its_bits() -> None:
    memory = HostMemory(owner=0)
    states = [training_state(), {"w": torch.arange(5)}, training_state(), {"w": torch.ones(2, 3).t()}]
    for step, state in enumerate(states):
        before = memory.latest
        copy = memory.begin(step, STATE, state).finish()
        assert same(copy.load(), dict(state)) and memory.latest is copy
        assert before is None or same(before.load(), dict(states[step - 1]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("held", [True, False])
def test_on_a_device_every_kind_of_tensor_is_the_one_of_its_capture(held: bool) -> None:
    """Many sizes and dtypes, overwritten as soon as may be: after `hold`, or once the copy is complete."""
    memory = HostMemory(owner=0)
    sizes = [(), (0, 3), (7,), (3, 5), (1 << 14, 4), (1 << 20,)]
    live: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64):
        for shape in sizes:
            value = torch.randn(shape, device="cuda") * 100
            live[f"{dtype}{shape}"] = value.to(dtype)
            live[f"host{dtype}{shape}"] = value.to("cpu", dtype)
    live["turned"] = torch.randn(300, 200, device="cuda").t()
    for step in range(6):
        wanted = {name: tensor.cpu().clone() for name, tensor in live.items()}
        capture = memory.begin(step, STATE, live)
        if held:
            capture.hold()
        copy = None if held else capture.finish()
        for tensor in live.values():
            tensor.copy_(torch.roll(tensor.flatten(), 1).view(tensor.shape).logical_not())
        assert same((copy or capture.finish()).load(), wanted)


def test_damage_in_memory_is_found() -> None:
    memory = HostMemory(owner=0)
    copy = memory.begin(1, STATE, {"w": torch.ones(10)}).finish()
    copy.data[3] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        copy.load()


@pytest.mark.parametrize("change", [{"run_id": "other"}, {"topology_digest": "x"}, {"world_size": 2}])
def test_a_shard_of_another_run_or_topology_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    place = written(tmp_path)
    good, bad = shards(tmp_path, **change).find(2)
    assert not good and str(place) in str(bad[0])


def test_a_shard_under_another_name_is_refused(tmp_path: Path) -> None:
    place = written(tmp_path)
    place.rename(place.with_name("step-000000009-own"))
    shutil.copytree(place.parent, tmp_path / "rank-00001")
    for owner, word in ((2, "place of another"), (1, "is of rank 2")):
        good, bad = shards(tmp_path).find(owner)
        assert not good and word in str(bad[0])


@pytest.mark.parametrize("damage", ["flip", "hole", "short", "missing", "empty"])
def test_e12_damaged_data_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    place = written(tmp_path)
    data = place / "state.safetensors"
    raw = bytearray(data.read_bytes())
    if damage == "flip":
        raw[-20] ^= 1
    elif damage == "hole":
        raw[-64:] = bytes(64)
    elif damage == "short":
        raw = raw[:-1]
    elif damage == "empty":
        raw = bytearray()
    data.write_bytes(raw)
    if damage == "missing":
        data.unlink()
    with pytest.raises(UntrustedFile, match=r"state\.safetensors"):
        shards(tmp_path).read(place, 2)


def test_pruning_never_takes_the_verified_one(tmp_path: Path) -> None:
    store = shards(tmp_path)
    memory = HostMemory(owner=2)
    states = [STATE, *[TrustState.LATEST_GEMINI] * 4]
    for step, state in enumerate(states):
        store.write(memory.begin(step, state, {"w": torch.ones(1)}).finish(), attempt=0, holder=2)
        store.prune(2, 2)
    assert sorted(r.step for r in store.find(2)[0].values()) == [0, 3, 4]


def test_pruning_goes_by_what_became_of_a_copy_and_leaves_other_runs_alone(tmp_path: Path) -> None:
    memory = HostMemory(owner=2)
    for run, step in (("other", 900), ("other", 901)):
        foreign = memory.begin(step, STATE, {"w": torch.ones(1)}).finish()
        shards(tmp_path, run_id=run).write(foreign, attempt=0, holder=2)
    store = shards(tmp_path)
    for step in range(1, 7):
        store.write(memory.begin(step, TrustState.LATEST_GEMINI, {"w": torch.ones(1)}).finish(), attempt=0, holder=2)
    became = {1: STATE, 6: TrustState.REJECTED}
    store.prune(2, 2, lambda step, attempt: became.get(step))
    assert sorted(int(place.name.split("-")[1]) for place in (tmp_path / "rank-00002").iterdir()) == [1, 4, 5, 900, 901]


def test_the_same_bits_in_a_later_attempt_renew_the_record_and_not_the_data(tmp_path: Path) -> None:
    copy = HostMemory(owner=2).begin(7, TrustState.CANDIDATE, training_state()).finish()
    place = shards(tmp_path).write(copy, attempt=0, holder=2)
    before = (place / "state.safetensors").stat()
    copy.state = STATE
    shards(tmp_path).write(copy, attempt=1, holder=2)
    after, record = (place / "state.safetensors").stat(), shards(tmp_path).find(2)[0][place]
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert (record.attempt, record.state) == (1, STATE.value) and shards(tmp_path).read(place, 2).intact()
