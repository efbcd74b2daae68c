"""Check results for tests of what is made of them, judged from evidence by the real rules."""

from collections.abc import Mapping, Sequence
from typing import Any

from scout_core.consensus.c3 import C3Status
from scout_core.replay.evidence import SURFACES, Observation
from scout_core.replay.result import ReplayResult
from scout_core.replay.verdict import PROOF_EXECUTIONS, judge_recipe

Odd = Mapping[str, Mapping[int, int]]


def executions(recipe_class: str, peers: int, *runs: Odd) -> list[list[Observation]]:
    """One list of observations per run; a run maps a surface to the words of the peers that do not hold 1 there."""
    names = SURFACES[recipe_class]
    return [
        [Observation(words=tuple(run.get(name, {}).get(p, 1) for name in names)) for p in range(peers)] for run in runs
    ]


def result_of(
    recipes: Mapping[str, Sequence[Odd]], *, step: int = 10, ranks: Sequence[int] = (0, 1, 2, 3), **fields: Any
) -> ReplayResult:
    """The result of a check in which each recipe of `recipes` ran as given (see `executions`)."""
    verdicts = {
        key: judge_recipe(
            key,
            key.partition(":")[0],
            executions(key.partition(":")[0], len(ranks), *runs),
            qualified=True,
            earlier_repeats=PROOF_EXECUTIONS,
            ranks=ranks,
        )
        for key, runs in recipes.items()
    }
    c3 = {f"{key}/{name}": r for key, v in verdicts.items() for name, r in v.surfaces.items()}
    statuses = {v.status for v in verdicts.values()}
    order = (C3Status.ATTRIBUTED, C3Status.INCONCLUSIVE)
    quiet = (False,) * len(ranks)
    values: dict[str, Any] = {
        "step": step,
        "peer_ranks": tuple(ranks),
        "status": next((s for s in order if s in statuses), C3Status.AGREE),
        "complete": C3Status.INCONCLUSIVE not in statuses,
        "sdc_bitmap": tuple(any(v.bitmap and v.bitmap[p] for v in verdicts.values()) for p in range(len(ranks))),
        "straggler_bitmap": quiet,
        "c3_results": c3,
        "verdicts": verdicts,
    }
    return ReplayResult(**{**values, **fields})
