"""The faults of the demo: what is injected where, and what SCOUT then has to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scout_core import faults
from scout_core.demo.job import LAYERS, WIDTH, Job
from scout_core.demo.judge import Expected
from scout_core.report.fault_report import FaultKind

SLOWDOWN_S = 0.02
_MANTISSA_BIT = 20  # changes a float32 by up to an eighth of it: no NaN, no spike in the loss, silent


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One fault. `ranks` get it; `inject` puts it in on one of them; `patience` is in optimizer steps.

    `linger` is how many steps are watched after the first report, in which nothing else may be reported.
    """

    name: str
    title: str
    where: str
    ranks: tuple[int, ...]
    inject: Callable[[Job], faults.Fault]
    expected: Expected
    patience: int
    linger: int = 0


def build(ranks: int, interval: int) -> tuple[Scenario, ...]:
    """The scenarios for a job of `ranks` ranks that checks every `interval` steps."""
    turn = interval * LAYERS  # steps in which each layer is checked once
    everyone = tuple(range(ranks))
    return (
        Scenario(
            name="output-bit",
            title="flipped bit in a hidden layer's output",
            where=f"bit {_MANTISSA_BIT} of one element of what blocks.2 returns, in every call",
            ranks=(2,),
            inject=lambda job: faults.corrupt_output(job.model.blocks[2], element=777, bit=_MANTISSA_BIT),
            expected=_corruption(2, "hidden:2/output"),
            patience=turn,
        ),
        Scenario(
            name="wrong-weight",
            title="wrong weight",
            where=f"bit {_MANTISSA_BIT} of one element of blocks.3.mix.weight, once",
            ranks=(1,),
            inject=lambda job: faults.corrupt_weight(
                job.model.get_parameter("blocks.3.mix.weight"), element=5 * WIDTH + 7, bit=_MANTISSA_BIT
            ),
            expected=_corruption(
                1, "hidden:3/parameter_state", "optimizer/parameter_state", tensor="blocks.3.mix.weight"
            ),
            patience=interval,
        ),
        Scenario(
            name="adam-moment",
            title="corrupted Adam moment",
            where=f"bit {_MANTISSA_BIT} of one element of exp_avg_sq of blocks.0.network.0.weight, once",
            ranks=(ranks - 1,),
            inject=lambda job: faults.corrupt_optimizer_state(
                job.optimizer,
                job.model.get_parameter("blocks.0.network.0.weight"),
                "exp_avg_sq",
                element=3 * WIDTH + 11,
                bit=_MANTISSA_BIT,
            ),
            expected=_corruption(ranks - 1, "optimizer/optimizer_state", tensor="blocks.0.network.0.weight.exp_avg_sq"),
            patience=interval,
        ),
        Scenario(
            name="embedding-row",
            title="corrupted embedding row",
            where=f"bit {_MANTISSA_BIT} of every element of the row for the letter e, once",
            ranks=(0,),
            inject=lambda job: faults.corrupt_rows(job.model.embedding, row=ord("e"), bit=_MANTISSA_BIT),
            expected=_corruption(0, "embedding/parameter_state", tensor="embedding.weight"),
            patience=interval,
        ),
        Scenario(
            name="slow-layer",
            title="slow layer",
            where=f"{SLOWDOWN_S * 1e3:.0f} ms more in every call of blocks.1",
            ranks=(2,),
            # on the host, since the ranks may share a GPU
            inject=lambda job: faults.slow_module(job.model.blocks[1], seconds=SLOWDOWN_S, on_host=True),
            expected=Expected(
                kind=FaultKind.COMPUTE_STRAGGLER,
                ranks=(2,),
                status="Attributed",
                surfaces=("hidden:1",),
                trusted=True,
            ),
            patience=4 * turn,
        ),
        Scenario(
            name="nondeterministic",
            title="nondeterministic kernel everywhere",
            where="last bits of what blocks.1 returns differ from call to call",
            ranks=everyone,
            inject=lambda job: faults.nondeterministic_kernel(job.model.blocks[1]),
            expected=Expected(
                kind=FaultKind.NONDETERMINISTIC,
                ranks=(),
                status="Inconclusive",
                surfaces=("hidden:1",),
                trusted=False,
            ),
            patience=turn,
            linger=turn,
        ),
    )


def _corruption(rank: int, *surfaces: str, tensor: str | None = None) -> Expected:
    return Expected(
        kind=FaultKind.SDC,
        ranks=(rank,),
        status="Attributed",
        surfaces=surfaces,
        trusted=False,
        tensor=tensor,
    )
