"""What the source packs is what every peer unpacks, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scout_core.peers import PeerGroup
from scout_core.replay.capture import Invocation, TensorMeta
from scout_core.replay.execute import Received
from scout_core.replay.isolation import AutocastState
from scout_core.replay.local_tensors import Distribution
from scout_core.replay.transport import Parcel, agree_on_shapes, carry

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)


class Wire:
    """A broadcast between two peers that take turns: the source's bytes are kept for the one that comes after."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def peer(self, position: int) -> PeerGroup:
        wire, source = self, position == 0

        class Peer(PeerGroup):
            def broadcast(self, buffer: torch.Tensor, source_position: int) -> None:
                assert source_position == 0
                if source:
                    wire.sent.append(buffer.clone())
                else:
                    buffer.copy_(wire.sent.pop(0))

        return Peer(ranks=(0, 1), rank=position, control=None, data=None)


def tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(tuple(shape), generator=generator)
    return (
        (noise > 0)
        if dtype is torch.bool
        else (noise * 50).to(torch.int64 if dtype is torch.uint8 else dtype).to(dtype)
    )


def call(tensors: list[torch.Tensor], gradients: dict[int, torch.Tensor], keep: bool = True, **more) -> Invocation:
    return Invocation(
        step=1,
        arguments=((), {}),
        input_metas=[TensorMeta.of(t) for t in tensors],
        inputs=tensors if keep else None,
        autocast=AutocastState.current(),
        training=True,
        gradient_metas={i: TensorMeta.of(t) for i, t in gradients.items()},
        gradients=gradients if keep else {},
        **more,
    )


def send(sent: list[Parcel], expected: list[Parcel]) -> tuple[dict[str, Received], dict[str, Received]]:
    wire = Wire()
    kept = carry(sent, wire.peer(0), 0)
    arrived = carry(expected, wire.peer(1), 0)
    assert wire.sent == []
    return kept, arrived


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*flat)


items = st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES))


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(items, max_size=4), st.lists(items, max_size=3)), min_size=1, max_size=3))
def test_everything_arrives_bit_for_bit(recipes) -> None:
    sent, expected, tensors = [], [], {}
    for number, (inputs, outputs) in enumerate(recipes):
        given_inputs = [tensor(*item, seed) for seed, item in enumerate(inputs)]
        gradients = {3 * i: tensor(*item, 99 + i) for i, item in enumerate(outputs)}
        key = f"hidden:{number}"
        tensors[key] = [*given_inputs, *gradients.values()]
        for parcels, keep in ((sent, True), (expected, False)):
            parcels.append(Parcel(recipe_id=key, module=nn.Identity(), invocation=call(given_inputs, gradients, keep)))
    if not any(tensors.values()):
        return
    for side in send(sent, expected):
        for key, wanted in tensors.items():
            assert all(map(same, side[key].tensors(), wanted)) and len(side[key].tensors()) == len(wanted)


def test_what_arrives_shares_no_memory_with_what_lives_and_all_peers_have_equal_strides() -> None:
    live = torch.arange(12.0).reshape(3, 4).t()
    sent = Parcel(recipe_id="a", module=nn.Identity(), invocation=call([live], {}))
    empty = Parcel(recipe_id="a", module=nn.Identity(), invocation=call([live], {}, keep=False))
    for side in send([sent], [empty]):
        (arrived,) = side["a"].inputs
        assert arrived.is_contiguous() and arrived.data_ptr() != live.data_ptr() and torch.equal(arrived, live)
        assert arrived.data_ptr() % 64 == 0


def test_buffers_that_the_call_changes_travel_by_name() -> None:
    source, peer = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    source.running_mean.fill_(3.0)
    names = ("running_mean", "num_batches_tracked")
    x = torch.ones(1)
    parcels = [
        Parcel(recipe_id="a", module=module, invocation=call([x], {}, keep=module is source, changed_buffers=names))
        for module in (source, peer)
    ]
    _, arrived = send(parcels[:1], parcels[1:])
    assert set(arrived["a"].buffers) == set(names)
    assert arrived["a"].buffers["running_mean"].tolist() == [3.0, 3.0] and peer.running_mean.tolist() == [0.0, 0.0]


def test_a_peer_takes_over_the_sources_sizes() -> None:
    long, short = torch.ones(2, 7), torch.ones(2, 5)
    source = Parcel(recipe_id="a", module=nn.Identity(), invocation=call([long], {0: long}))
    peer = Parcel(recipe_id="a", module=nn.Identity(), invocation=call([short], {0: short}, keep=False))
    wire = Wire()
    agree_on_shapes([source], wire.peer(0), 0)
    agree_on_shapes([peer], wire.peer(1), 0)
    assert [meta.shape for meta in peer.invocation.metas()] == [(2, 7), (2, 7)]
    assert peer.invocation.shape() == source.invocation.shape()
    _, arrived = send([source], [peer])
    assert torch.equal(arrived["a"].inputs[0], long)


def test_a_peer_takes_over_the_whole_size_of_a_distributed_tensor_too() -> None:
    """An unevenly split sequence: the parts on these two are equally long, only what they are parts of is not."""

    def parcel(words: int) -> Parcel:
        invocation = call([torch.ones(2, 4)], {})
        whole = Distribution(mesh=None, placements=(), shape=torch.Size((2, words)), stride=(words, 1))
        invocation.input_metas = [replace(meta, distribution=whole) for meta in invocation.input_metas]
        return Parcel(recipe_id="a", module=nn.Identity(), invocation=invocation)

    source, peer = parcel(8), parcel(7)
    assert peer.invocation.shape() != source.invocation.shape()
    wire = Wire()
    agree_on_shapes([source], wire.peer(0), 0)
    agree_on_shapes([peer], wire.peer(1), 0)
    assert peer.invocation.metas() == source.invocation.metas()
    assert peer.invocation.shape() == source.invocation.shape()


@pytest.fixture(autouse=True)
def _same_noise() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    assert torch.equal(state, torch.get_rng_state())


def test_a_source_without_tensors_is_an_error_that_names_the_recipe() -> None:
    nothing = Parcel(recipe_id="hidden:4", module=nn.Identity(), invocation=call([torch.ones(1)], {}, keep=False))
    with pytest.raises(RuntimeError, match="hidden:4"):
        carry([nothing], Wire().peer(0), 0)
