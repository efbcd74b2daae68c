"""Signatures miss no change of one bit, of order, of dtype or of shape, and say the same thing each time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from scout_core.consensus import signature
from scout_core.consensus.signature import MASK_64, combined_signature, signatures, tensor_signature

Sign = Callable[[torch.Tensor], int]


def _word_sum_signature(tensor: torch.Tensor) -> int:
    return int(signature._signatures_torch([tensor])[0]) & MASK_64


ALGORITHMS = {"cpu": tensor_signature, "word_sum": _word_sum_signature}
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]
# All lengths to 64, then around every length at which either algorithm changes its way of reading: xxh3 at 128, 240,
# 256 and 1024 bytes and at its blocks, the word sum at whole words.
SHORT = list(range(65))
BOUNDARY = [n + d for n in (128, 240, 256, 512, 1024, 2048, 4096) for d in (-1, 0, 1)]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(params=ALGORITHMS)
def sign(request: pytest.FixtureRequest) -> Sign:
    return ALGORITHMS[request.param]


def _raw(byte_count: int, dtype: torch.dtype = torch.uint8, device: str = "cpu") -> torch.Tensor:
    """uint8 [byte_count], random bits that are valid for dtype."""
    high = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(byte_count)
    return torch.randint(0, high, (byte_count,), dtype=torch.uint8, generator=generator).to(device)


def _missed_flips(sign: Sign, raw: torch.Tensor, view: torch.Tensor, positions: Iterator[int] | range) -> list[str]:
    """The single-bit changes of `raw` (uint8) at the byte positions that the signature of `view`, its alias, misses."""
    before = sign(view)
    missed = []
    for position in positions:
        for bit in range(8):
            raw[position] ^= 1 << bit
            if sign(view) == before:
                missed.append(f"byte {position} bit {bit} of {raw.numel()}")
            raw[position] ^= 1 << bit
    assert sign(view) == before
    return missed


def _head_middle_tail(length: int, item: int) -> Iterator[int]:
    """Byte positions of the first, the middle and the last element."""
    for element in sorted({0, length // 2, length - 1} if length else ()):
        yield from range(element * item, (element + 1) * item)


@pytest.mark.parametrize("byte_count", SHORT)
def test_every_bit_of_every_byte_counts(sign: Sign, byte_count: int) -> None:
    raw = _raw(byte_count)
    assert _missed_flips(sign, raw, raw, range(byte_count)) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_an_element_counts_at_head_middle_and_tail(dtype: torch.dtype) -> None:
    for length in SHORT + BOUNDARY + [1 << 20]:
        raw = _raw(length * dtype.itemsize, dtype)
        positions = _head_middle_tail(length, dtype.itemsize)
        assert _missed_flips(tensor_signature, raw, raw.view(dtype), positions) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_word_sum_sees_every_bit_of_an_element(dtype: torch.dtype) -> None:
    for length in [1, 2, 3, 5, 8, 17, 64, *BOUNDARY[::4]]:
        raw = _raw(length * dtype.itemsize, dtype)
        positions = _head_middle_tail(length, dtype.itemsize)
        assert _missed_flips(_word_sum_signature, raw, raw.view(dtype), positions) == []


def test_the_word_sum_sees_every_bit_of_a_long_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "_BLOCK_WORDS", 1 << 15)  # several blocks
    raw = _raw(1 << 20)
    whole = _word_sum_signature(raw)
    positions = iter([0, (1 << 18) - 1, 1 << 18, (1 << 20) - 1])
    assert _missed_flips(_word_sum_signature, raw, raw, positions) == []
    monkeypatch.undo()
    assert _word_sum_signature(raw) == whole


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 7, 33, 1000])
def test_strided_views_count_what_they_show_and_nothing_else(sign: Sign, dtype: torch.dtype, length: int) -> None:
    item = dtype.itemsize
    raw = _raw(3 * length * item, dtype)
    column = raw.view(dtype).reshape(length, 3)[:, 1]
    assert sign(column) == sign(column.clone())
    shown = [(3 * row + 1) * item + byte for row in {0, length // 2, length - 1} for byte in range(item)]
    assert _missed_flips(sign, raw, column, iter(shown)) == []
    before = sign(column)
    raw.view(dtype).reshape(length, 3)[:, 2].zero_()
    assert sign(column) == before


def test_views_are_signed_by_value(sign: Sign) -> None:
    real, imaginary = torch.randn(4, 3, 2, 5), torch.randn(6, dtype=torch.complex64)
    for view in (
        real.transpose(0, 3),
        real.to(memory_format=torch.channels_last),
        real[1:, ::2],
        real[:1].expand(4, -1, -1, -1),
        imaginary.conj(),
        imaginary.conj().imag,
        real[0, 0, 0, 0],
    ):
        assert sign(view) == sign(view.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg())
    assert sign(imaginary.conj()) != sign(imaginary)
    assert sign(imaginary.conj().imag) != sign(imaginary.imag)


def test_alignment_and_neighbours_do_not_count(sign: Sign) -> None:
    for length in (1, 5, 8, 13, 40, 300):
        values = _raw(length)
        expected = sign(values)
        for offset in range(9):
            for around in (0, 255):
                base = torch.full((length + 32,), around, dtype=torch.uint8)
                base[offset : offset + length] = values
                assert sign(base[offset : offset + length]) == expected


@pytest.mark.parametrize("length", [2, 3, 16, 17, 32, 33, 64, 500])
def test_the_order_of_words_counts(sign: Sign, length: int) -> None:
    step = signature._signed(signature.POSITION_STEP)
    counting = torch.arange(length)
    # The last two are the values for which a signature that keys positions carelessly cancels.
    for words in (_raw(8 * length).view(torch.int64), counting, -counting * step):
        before = sign(words)
        for other in {1, length // 2, length - 1}:
            swapped = words.clone()
            swapped[[0, other]] = words[[other, 0]]
            assert sign(swapped) != before
        assert sign(words.roll(1)) != before
        assert sign(words.flip(0)) != before


@pytest.mark.parametrize("difference", [1, 1 << 31, 1 << 63, (1 << 63) | (1 << 31), (1 << 63) | (1 << 30), MASK_64])
def test_equal_changes_of_two_words_do_not_cancel(sign: Sign, difference: int) -> None:
    words = _raw(8 * 256).view(torch.int64)
    before, flip = sign(words), signature._signed(difference)
    for first in range(0, 256, 16):
        for second in range(first + 1, 256, 16):
            changed = words.clone()
            changed[[first, second]] ^= flip
            assert sign(changed) != before


def test_dtype_shape_and_trailing_zeros_count(sign: Sign) -> None:
    zeros = [torch.zeros(n, dtype=dtype) for dtype in DTYPES for n in (0, 1, 2, 3, 4, 8, 64, 1000)]
    zeros += [torch.zeros(shape) for shape in ((), (1, 1), (2, 2), (4, 1), (1, 4), (0, 3), (3, 0), (8, 8), (64, 1))]
    assert len({sign(tensor) for tensor in zeros}) == len(zeros)
    halves = torch.randn(12).to(torch.bfloat16)
    assert sign(halves) != sign(halves.view(torch.float16))


def test_values_are_compared_by_bits(sign: Sign) -> None:
    assert sign(torch.tensor([0.0])) != sign(torch.tensor([-0.0]))
    assert sign(torch.tensor([float("nan")])) == sign(torch.tensor([float("nan")]))


def test_signatures_stay_what_they_are(sign: Sign) -> None:
    """Fixed values: every process, run and release must agree, since evidence is compared across them."""
    expected = {tensor_signature: 0xA39680990A6EC922, _word_sum_signature: 0x9447B60C432B4218}
    assert sign(torch.arange(1000, dtype=torch.int32).reshape(10, 100)) == expected[sign]


@given(st.integers(0, MASK_64))
def test_the_mixer_can_be_undone(word: int) -> None:
    """What makes 'a change within one word always changes the sum' true for all words, not only those tried above."""
    mixed = signature.mix_word(word)
    left, right = mixed >> 32, mixed & 0xFFFFFFFF
    rounds = list(zip(signature.ROUND_MULTIPLIERS, signature.ROUND_ADDENDS, strict=True))
    for multiplier, addend in reversed(rounds):
        product = (right * multiplier + addend) & MASK_64
        left, right = right, left ^ (product >> 32) ^ (product & 0xFFFFFFFF)
    assert (left << 32) | right == word


@given(st.binary(max_size=100))
def test_the_word_sum_is_its_definition(data: bytes) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    total = signature.metadata_code(torch.uint8, (len(data),))
    for index in range(0, len(data), 8):
        word = int.from_bytes(data[index : index + 8], "little") + index // 8 * signature.POSITION_STEP
        total += signature.mix_word(word & MASK_64)
    assert _word_sum_signature(tensor) == total & MASK_64


def test_a_list_gives_each_tensor_its_own_signature() -> None:
    tensors = [torch.randn(n) for n in range(20)] + [torch.zeros((), dtype=torch.float8_e5m2)]
    codes = signatures(tensors)
    assert codes.dtype is torch.int64 and codes.shape == (21,)
    assert [int(code) & MASK_64 for code in codes] == [tensor_signature(tensor) for tensor in tensors]
    assert signatures([]).shape == (0,)


def test_parameters_and_graph_tensors_are_signed_in_place() -> None:
    parameter = torch.nn.Parameter(torch.randn(8))
    assert tensor_signature(parameter) == tensor_signature(parameter.detach()) == tensor_signature(parameter * 1)
    with torch.inference_mode():
        assert tensor_signature(parameter.detach().clone()) == tensor_signature(parameter)


def test_a_combined_signature_changes_with_every_entry_and_their_order() -> None:
    tensors: list[torch.Tensor | None] = [torch.randn(n + 1) for n in range(8)]
    tensors[3] = None
    variants: list[list[torch.Tensor | None]] = [tensors, tensors[::-1], tensors[:-1], [*tensors, None], [None], []]
    for index in range(8):
        changed = list(tensors)
        entry = tensors[index]
        changed[index] = torch.zeros(1) if entry is None else entry + 1
        absent = list(tensors)
        absent[index] = None
        variants += [changed] if entry is None else [changed, absent]
    codes = {int(combined_signature(variant)) for variant in variants}
    assert len(codes) == len(variants)
    assert int(combined_signature(tensors)) == int(combined_signature(tensors)) == int(combined_signature(tensors, 0))
    assert combined_signature(tensors).shape == () and combined_signature([]).dtype is torch.int64


def test_extra_always_counts() -> None:
    tensors = [torch.ones(3)]
    extras = [0, 1, -1, *(1 << bit for bit in range(1, 64))]
    assert len({int(combined_signature(tensors, extra)) for extra in extras}) == len(extras)


def test_tensors_without_bytes_of_their_own_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    for tensor in (torch.ones(3, device="meta"), torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), fake):
        with pytest.raises(TypeError, match="cannot sign"):
            tensor_signature(tensor)
        with pytest.raises(TypeError, match="cannot sign"):
            signatures([tensor])


def test_a_dtensor_is_signed_by_its_local_shard() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        values = torch.randn(6, 2)
        sharded = distribute_tensor(values, init_device_mesh("cpu", (1,)), [Shard(0)])
        assert tensor_signature(sharded) == tensor_signature(values)
        gathered = sharded.redistribute(placements=[Replicate()], async_op=True)
        assert tensor_signature(gathered) == tensor_signature(values)
    finally:
        if started:
            dist.destroy_process_group()


def _cuda_cases() -> list[torch.Tensor]:
    """Lengths around words, chunks (65,536 bytes) and blocks, at every alignment."""
    base = _raw(500_000, device="cuda")
    lengths = [0, 1, 7, 8, 9, 63, 64, 65, 8191, 8192, 65_535, 65_536, 65_537, 131_072, 140_001, 400_000]
    cases = [base[offset : offset + length] for offset in range(17) for length in lengths]
    cases += [_raw(96, dtype).cuda().view(dtype) for dtype in DTYPES]
    return [*cases, torch.randn(64, 33, device="cuda").t(), torch.randn((), device="cuda")]


@pytest.mark.gpu
@needs_cuda
def test_triton_gives_the_bits_of_the_tensor_operations() -> None:
    pytest.importorskip("triton")
    cases = _cuda_cases()
    expected = signature._signatures_torch(cases)
    for _ in range(3):
        assert torch.equal(signatures(cases), expected)
    assert [tensor_signature(case) for case in cases[:40]] == [int(code) & MASK_64 for code in expected[:40]]


@pytest.mark.gpu
@needs_cuda
def test_triton_sees_every_bit_at_every_alignment() -> None:
    for offset in (0, 1, 2, 4, 8):
        raw = _raw(65_536 * 2 + 19 + offset, device="cuda")
        view = raw[offset:]
        positions = iter([offset, offset + 9, offset + 65_535, offset + 65_536, offset + 131_072, raw.numel() - 1])
        assert _missed_flips(tensor_signature, raw, view, positions) == []


@pytest.mark.gpu
@needs_cuda
def test_triton_reads_past_two_gibibytes() -> None:
    large = torch.zeros((5 << 29) + 3, dtype=torch.uint8, device="cuda")
    before = signatures([large])
    assert torch.equal(before, signature._signatures_torch([large]))
    large[-1] = 1
    assert not torch.equal(signatures([large]), before)


@pytest.mark.gpu
@needs_cuda
def test_cuda_signatures_do_not_wait_for_the_device() -> None:
    lengths = random.Random(0).sample(range(9999), 50)
    tensors: list[torch.Tensor | None] = [torch.randn(length, device="cuda") for length in lengths]
    tensors[7] = None
    present = [tensor for tensor in tensors if tensor is not None]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        codes, combined = signatures(present), combined_signature(tensors, extra=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert codes.device.type == "cuda" and combined.shape == ()
    assert torch.equal(combined, combined_signature(tensors, extra=5))
    assert not torch.equal(combined, combined_signature([*present, None], extra=5))


@pytest.mark.gpu
@needs_cuda
def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="share a device"):
        signatures([torch.ones(1), torch.ones(1, device="cuda")])
