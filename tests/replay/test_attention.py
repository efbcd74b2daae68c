"""The mode that makes attention repeat itself changes no value on the CPU and no setting after its backward."""

import pytest
import torch
from torch.nn import functional as F

from scout_core.replay.attention import DeterministicAttention
from scout_core.replay.isolation import deterministic_kernels


def attend(how: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 4, generator=generator).requires_grad_() for _ in range(3))
    calls = {
        "positional": lambda: F.scaled_dot_product_attention(q, k, v, None, 0.0, True),
        "keyword": lambda: F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True),
        "mixed": lambda: F.scaled_dot_product_attention(q, k, value=v, is_causal=True),
    }
    out = calls[how]()
    out.square().sum().backward()
    return [out.detach(), *(t.grad for t in (q, k, v))]


@pytest.mark.parametrize("how", ["positional", "keyword", "mixed"])
def test_values_and_gradients_are_those_without_it_and_settings_return(how: str) -> None:
    plain = attend(how)
    with deterministic_kernels(enabled=True, strict=False), DeterministicAttention():
        enclosed = attend(how)
        assert torch.is_deterministic_algorithms_warn_only_enabled(), "strict for attention alone"
    assert all(torch.equal(a, b) for a, b in zip(plain, enclosed, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
def test_attention_on_a_gpu_repeats_itself_bit_for_bit() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shape, dtype = (2, 8, 512, 64), torch.bfloat16
    qkv = [torch.randn(shape, generator=generator, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
    runs = set()
    for _ in range(10):
        with deterministic_kernels(enabled=True, strict=False), DeterministicAttention():
            gradients = torch.autograd.grad(F.scaled_dot_product_attention(*qkv, is_causal=True).float().sum(), qkv)
        runs.add(b"".join(g.view(torch.uint8).cpu().numpy().tobytes() for g in gradients))
    assert len(runs) == 1
