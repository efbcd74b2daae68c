"""Functional collectives, the compiler's callbacks, and what is known of loaders and files."""

from __future__ import annotations

import _thread
import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from scout_core.oob.calls import FUNCTIONS, described
from scout_core.oob.channel import Channel, Scope
from scout_core.oob.collectives import CollectiveWatch
from scout_core.oob.instrument import Checkpoints, CompileWatch, ModelWatch, Usual, WatchedLoader
from scout_core.oob.layout import Activity, Phase
from scout_core.oob.reader import read_awaited, read_groups, read_progress
from scout_core.oob.writer import Publisher
from scout_core.timing.live import LiveWatch
from scout_core.timing.step_clock import StepClock


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    made = Channel.create(Scope(run="t", attempt=0, pid=1, peers=(0,), rank=0), world=1, folder=tmp_path)
    yield made
    made.close(unlink=True, folder=tmp_path)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def calls(channel: Channel) -> list[str]:
    return [call.text.partition(" at ")[0] for g in read_groups(channel.memory).values() for call in g.calls]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_functional_collectives_are_calls_like_others(channel: Channel, alone: None) -> None:
    originals = [functional.all_reduce, functional.all_gather_tensor, functional.reduce_scatter_tensor]
    watch = CollectiveWatch(Publisher(channel.memory, (0,)))
    x, group = torch.ones(4), dist.group.WORLD
    results = [
        functional.all_reduce(x, "sum", group),
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.broadcast(x, 0, group),
        functional.all_to_all_single(x, None, None, group),
    ]
    assert [result.tolist() for result in results] == [[1.0] * 4] * 5
    assert calls(channel) == [
        "functional.all_reduce(float32[4], SUM)",
        "functional.all_gather_tensor(float32[4], dim=0)",
        "functional.reduce_scatter_tensor(float32[4], SUM)",
        "functional.broadcast(float32[4], src=0)",
        "functional.all_to_all_single(torch.float32, ())",
    ]
    watch.close()
    assert originals == [functional.all_reduce, functional.all_gather_tensor, functional.reduce_scatter_tensor]


def test_what_background_threads_do_is_neither_progress_nor_a_call(channel: Channel, alone: None) -> None:
    """An asynchronous checkpoint's writer goes on while training hangs. Backward runs in threads of C++ and counts."""
    publisher = Publisher(channel.memory, (0,))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watches = [CollectiveWatch(publisher), ModelWatch(publisher, model, dict(enumerate(model)))]
    x, beside_world = torch.ones(2), dist.new_group([0])
    loader = WatchedLoader([1, 2], "ahead", publisher)
    issued_here = dist.all_reduce(x, async_op=True)

    def beside() -> None:
        dist.barrier()
        dist.gather_object(1, [None], dst=0, group=beside_world)
        functional.all_reduce(x, "sum", dist.group.WORLD).sum()
        for work in (dist.all_reduce(x, async_op=True), issued_here):
            assert work is not None
            work.wait()
        model(x)
        finished.append(list(loader))

    before, digest, finished = read_progress(channel.memory), publisher.tally.digest, []
    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert finished == [[1, 2]] and read_progress(channel.memory) == before
    assert len(calls(channel)) == 1 and publisher.tally.digest == digest

    ended = threading.Event()
    _thread.start_new_thread(lambda: (dist.barrier(), ended.set()), ())  # unknown to Python, as those of C++ are
    assert ended.wait(30)
    assert len(calls(channel)) == 2 and publisher.tally.digest != digest
    for watch in watches:
        watch.close()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_names_that_a_module_imported_before_are_followed_too(
    channel: Channel, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported, others = ModuleType("users_training"), [functional.legacy_allreduce, dist.all_reduce]
    imported.reduce_all, imported.gather = dist.all_reduce, functional.all_gather_tensor  # type: ignore[attr-defined]
    before = dict(vars(imported))
    monkeypatch.setitem(sys.modules, "users_training", imported)
    watch = CollectiveWatch(Publisher(channel.memory, (0,)))
    imported.reduce_all(torch.ones(3))
    imported.gather(torch.ones(3), 0, dist.group.WORLD)
    assert calls(channel) == ["all_reduce(float32[3], SUM)", "functional.all_gather_tensor(float32[3], dim=0)"]
    assert functional.legacy_allreduce is others[0], "the compiler compares with it"
    watch.close()
    assert vars(imported) == before and dist.all_reduce is others[1]


@pytest.fixture
def four() -> Iterator[None]:
    """Rank 0 of four, whose peers are not there: collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("broadcast", "src"), ("reduce", "dst"), ("gather", "dst"), ("scatter", "src"),
        ("gather_object", "dst"), ("broadcast_object_list", "src"), ("scatter_object_list", "src"),
    ],
)  # fmt: skip
def test_a_root_is_compared_however_it_is_given(name: str, root: str, four: None) -> None:
    def fingerprint(**given: object) -> int:
        return described(name, FUNCTIONS[name][0], "a.py", (torch.ones(2),), given).fingerprint

    pair = dist.new_group([0, 2])
    inside = f"group_{root}"
    assert fingerprint(**{root: 2}, group=pair) == fingerprint(**{inside: 1}, group=pair)
    assert fingerprint(**{root: 0}) == fingerprint(**{inside: 0}) == fingerprint()
    assert fingerprint(**{root: 1}) == fingerprint(**{inside: 1}) != fingerprint(**{root: 0})


def test_single_sends_are_followed_and_batches_take_the_originals(channel: Channel, four: None) -> None:
    methods = [c10d.ProcessGroup.__dict__[name] for name in ("send", "recv", "recv_anysource")]
    send, receive, x = dist.isend, dist.irecv, torch.ones(2)
    watch = CollectiveWatch(Publisher(channel.memory, (0, 1, 2, 3)))
    pair = dist.new_group([0, 2])
    for issue, expected in (
        (lambda: dist.isend(x, 3), ((3,), ())),
        (lambda: dist.irecv(x, group=pair, group_src=1), ((), (2,))),
        (lambda: dist.batch_isend_irecv([dist.P2POp(send, x, 1), dist.P2POp(receive, x, 2)])[0], ((1,), ())),
    ):
        before = read_progress(channel.memory).number
        work = issue()
        assert work is not None and read_progress(channel.memory).number > before
        c10d.Work.wait(work)  # the fake group's work has a method of its own
        assert read_awaited(channel.memory) == expected
    watch.close()
    assert methods == [c10d.ProcessGroup.__dict__[name] for name in ("send", "recv", "recv_anysource")]


@pytest.mark.filterwarnings("ignore:.*ranks [+] tag:FutureWarning")
def test_functional_collectives_are_told_apart_by_group_however_it_is_given(channel: Channel, four: None) -> None:
    watch = CollectiveWatch(Publisher(channel.memory, (0, 1, 2, 3)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    name = mesh["dp"].get_group().group_name
    for group in (mesh["tp"], (mesh, 0), name, [0, 1], dist.group.WORLD):
        functional.all_reduce(torch.ones(2), "sum", group)
    seen = {g.members: g.issued for g in read_groups(channel.memory).values()}
    assert seen == {(0, 1): 2, (0, 2): 2, (0, 1, 2, 3): 1}
    watch.close()


def test_compiled_collectives_stay_the_compilers(channel: Channel, alone: None) -> None:
    """Traced code runs the original alone: it compiles as it did, and nothing is recorded."""
    watch = CollectiveWatch(Publisher(channel.memory, (0,)))

    @torch.compile(backend="eager", fullgraph=True)
    def reduced(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x, "sum", dist.group.WORLD) + 1

    assert reduced(torch.ones(3)).tolist() == [2.0] * 3
    watch.close()
    assert calls(channel) == []


def _in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


COMPILED = {
    "wrapped": lambda model, backend: torch.compile(model, backend=backend),
    "in place": _in_place,
    "in part": lambda model, backend: nn.Sequential(model[0], torch.compile(model[1], backend=backend)),
}


@pytest.mark.parametrize("how", list(COMPILED))
def test_passes_of_a_compiled_model_are_seen_and_its_code_stays_what_it_was(how: str, channel: Channel) -> None:
    def train(watched: bool) -> tuple[list[str], list[torch.Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        graphs: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
            graphs.append(graph.code)
            return graph

        plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout()))
        model, publisher = COMPILED[how](plain, backend), Publisher(channel.memory)
        publisher.boundary(1)
        watch = ModelWatch(publisher, model, {}) if watched else None
        for mode in (True, True, False, False, True):
            model.train(mode)
            model(torch.ones(2, 4)).sum().backward()
            if watched:
                passes.append((read_progress(channel.memory).micro, read_progress(channel.memory).phase))
        if watch is not None:
            watch.close()
            model(torch.ones(2, 4))
            assert read_progress(channel.memory).micro == 5
        return graphs, [parameter.grad for parameter in plain.parameters()]

    passes: list[tuple[int, Phase]] = []
    (bare, expected), (graphs, gradients) = train(watched=False), train(watched=True)
    assert graphs == bare and all(map(torch.equal, gradients, expected))
    assert passes == [(1, Phase.TRAIN), (2, Phase.TRAIN), (3, Phase.EVAL), (4, Phase.EVAL), (5, Phase.TRAIN)]


def test_hooks_are_nothing_in_a_step_that_is_compiled_as_a_whole(channel: Channel) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    publisher = Publisher(channel.memory)
    for inner, layers in ((model, dict(enumerate(model))), (torch.compile(model, backend="eager"), {})):
        torch._dynamo.reset()
        watch, before = ModelWatch(publisher, inner, layers), read_progress(channel.memory)
        step = torch.compile(lambda x, inner=inner: inner(x).sum(), backend="eager", fullgraph=True)
        step(torch.ones(2, 4))
        assert read_progress(channel.memory) == before
        watch.close()


def test_a_watched_model_can_be_copied_and_the_copys_passes_are_seen(channel: Channel) -> None:
    model, publisher = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Publisher(channel.memory)
    publisher.boundary(1)
    watches = [ModelWatch(publisher, model, {}), LiveWatch(model, StepClock(torch.device("cpu"), 1, lambda: 0))]
    average = copy.deepcopy(model).eval()
    average(torch.ones(1, 2))
    assert (read_progress(channel.memory).micro, read_progress(channel.memory).phase) == (1, Phase.EVAL)
    for watch in watches:
        watch.close()


def test_the_compiler_says_when_it_compiles(channel: Channel) -> None:
    publisher = Publisher(channel.memory)
    publisher.boundary(1)
    watch, seen = CompileWatch(publisher), []
    watch.look()

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.append(read_progress(channel.memory).phase)
        return graph

    compiled = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
    for size in (3, 4, 4):  # compiled, compiled anew, known
        compiled(torch.ones(size))
        assert publisher.phase is Phase.TRAIN
    assert seen == [Phase.COMPILE] * 2
    watch.close()
    torch.compile(lambda x: x * 3, backend=backend)(torch.ones(2))
    assert seen[2:] == [Phase.TRAIN]


def test_a_loader_publishes_its_next_and_is_itself_in_all_else(channel: Channel) -> None:
    publisher, seen = Publisher(channel.memory), []

    class Source:
        batch_size = 7

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            for i in range(3):
                seen.append((read_progress(channel.memory).activity, read_progress(channel.memory).name))
                yield i

    loader = WatchedLoader(Source(), "train", publisher)
    assert list(loader) == [0, 1, 2] and len(loader) == 3 and loader.batch_size == 7
    assert seen == [(Activity.DATALOADER, "train")] * 3
    assert read_progress(channel.memory).activity is Activity.NONE


def test_the_first_next_of_each_pass_is_not_held_to_the_usual_time(channel: Channel) -> None:
    """Workers are started anew for each pass over the data."""
    publisher, seen = Publisher(channel.memory), []

    class Source:
        def __iter__(self) -> Iterator[int]:
            for i in range(3):
                seen.append(read_progress(channel.memory).usual_ns > 0)
                yield i

    loader = WatchedLoader(Source(), "train", publisher)
    assert [list(loader), list(loader)] == [[0, 1, 2]] * 2
    assert seen == [False, True, True] * 2


def test_a_checkpoint_write_has_its_phase_and_a_failed_one_no_usual_time(channel: Channel) -> None:
    publisher = Publisher(channel.memory)
    publisher.boundary(1)
    files = Checkpoints(publisher)
    inside = None
    with suppress(OSError), files.io("write", "a"):
        inside = read_progress(channel.memory)
        raise OSError
    assert inside is not None
    assert (inside.phase, inside.activity, inside.name) == (Phase.CHECKPOINT, Activity.CHECKPOINT_WRITE, "a")
    assert publisher.phase is Phase.TRAIN
    with files.io("write", "a"):
        assert read_progress(channel.memory).usual_ns == 0
    with files.io("write", "a"):
        assert read_progress(channel.memory).usual_ns > 0


def test_the_usual_time_is_a_median_of_the_newest() -> None:
    usual = Usual()
    for duration in [10, 1000, 20]:
        usual.add(duration)
    assert usual.ns == 20
    for _ in range(100):
        usual.add(7)
    assert usual.ns == 7
