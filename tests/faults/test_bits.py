"""Bits flip where they are told to, in every dtype and layout, and nowhere else."""

import pytest
import torch

from scout_core.faults import flip_bit
from scout_core.faults.bits import bit_width

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
]


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8).clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exactly_the_named_bit_changes_and_comes_back(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    before = octets(tensor)
    width = bit_width(tensor)
    for element in (0, 4, 5):
        for bit in (0, 3, width // 2, width - 1):
            flip_bit(tensor, element, bit)
            changed = before ^ octets(tensor)
            expected = torch.zeros_like(changed)
            expected[element * width // 8 + bit // 8] = 1 << bit % 8
            assert torch.equal(changed, expected)
            flip_bit(tensor, element, bit)
            assert torch.equal(before, octets(tensor))


def test_known_values() -> None:
    tensor = torch.tensor([1.0, 1.0])
    flip_bit(tensor, 1, 31)
    assert tensor.tolist() == [1.0, -1.0]
    flip_bit(tensor, 0, 23)
    assert tensor.tolist() == [0.5, -1.0]
    flags = torch.tensor([True, False])
    flip_bit(flags, 1, 0)
    assert flags.tolist() == [True, True]


def test_elements_of_a_view_that_is_not_contiguous() -> None:
    base = torch.zeros(3, 4)
    flip_bit(base.t()[1:, ::2], 3, 31)  # shape [3, 2]: element 3 is row 1, column 1, which is base[2, 2]
    assert torch.signbit(base).nonzero().tolist() == [[2, 2]]


def test_a_zero_dimensional_tensor() -> None:
    tensor = torch.tensor(2.0)
    flip_bit(tensor, 0, 31)
    assert tensor.item() == -2.0


def test_autograd_does_not_notice() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    product = (weight * weight).sum()
    flip_bit(weight, 0, 31)
    product.backward()
    assert weight.grad is not None and weight.grad.tolist() == [-2.0, 2.0]


@pytest.mark.parametrize(("element", "bit"), [(2, 0), (-1, 0), (0, 32), (0, -1)])
def test_a_place_outside_the_tensor_is_refused(element: int, bit: int) -> None:
    with pytest.raises(IndexError, match="outside"):
        flip_bit(torch.zeros(2), element, bit)
