"""Case C11: a kernel that is chosen anew on one rank rounds otherwise there, and no device is at fault."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.cases.test_section_b_c import QUIET, Answer, agreed, kinds, run
from tests.distributed.models import Block, Case, Job, LanguageModel
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.distributed


def split_sum(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What `linear` computes, by a kernel that adds up four parts of the contraction."""
    total = linear.bias
    for a, w in zip(x.chunk(4, -1), linear.weight.chunk(4, 1), strict=True):
        total = total + a @ w.T
    return total


def retuned(tie_break: str) -> list[Answer]:
    """After two steps rank 2's device picks another kernel for one product, which repeats itself bit for bit."""
    job = Job(Case(model=lambda: LanguageModel(lambda: Block(dropout=0.0))))

    def each(job: Job, number: int) -> None:
        if number == 2 and dist.get_rank() == 2:
            mix = job.model.blocks[1].mix
            mix.forward = lambda x: split_sum(mix, x)
        job.step()

    return run(job, 7, each, tie_break=tie_break, **QUIET)


def test_c11_another_choice_of_kernel_on_one_rank_is_a_note_and_no_corruption(ranks4: RankPool) -> None:
    answers = agreed(ranks4.run(retuned, "reference", timeout=60))
    assert all(answer["sdc"] == () for answer in answers)
    ((kind, severity, ranks, action, _, message),) = answers[-1]["reports"]
    assert (kind, severity, ranks, action) == ("nondeterministic", "info", (), "continue")
    assert "rank 2 rounds otherwise" in message and "choice of kernel" in message and "hidden:1" in message


def test_c11_without_a_reference_it_cannot_be_told_from_a_fault(ranks4: RankPool) -> None:
    answers = agreed(ranks4.run(retuned, "off", timeout=60))
    assert kinds(answers) == {("sdc", (2,))}
