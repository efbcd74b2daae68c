"""A job with SCOUT ends in the same bits as one without, whatever its configuration, and its checks really check."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

import scout_core
from tests.distributed.live_state import differences, hooks, live_state
from tests.distributed.models import ALL_CASES, CASES, COMPILED, INDUCTOR, Job, break_block
from tests.distributed.pool import RankPool

STEPS, INTERVAL, FAULTY, BROKEN_LAYER = 20, 3, 2, 1
_BATCHES = 6


def watch(job: Job, interval: int = INTERVAL, **overrides: Any) -> tuple[scout_core.Scout, list[Any], list[str]]:
    """Attach SCOUT between two step hooks that compare the live state before its boundary with that after it."""
    before: list[dict[str, Any]] = []
    traces: list[str] = []
    results: list[Any] = []

    def save(*_: Any) -> None:
        before[:] = [live_state(job)]

    def compare(*_: Any) -> None:
        traces.extend(f"step {scout.step_count}: {key}" for key in differences(before[0], live_state(job)))
        if scout.last_result is not None and (not results or scout.last_result is not results[-1]):
            results.append(scout.last_result)

    job.optimizer.register_step_post_hook(save)
    options = {"straggler_absolute_ms": 1e4, **job.case.options, **overrides}
    scout = scout_core.attach(job.wrapped, job.optimizer, check_interval=interval, **options)
    job.optimizer.register_step_post_hook(compare)
    return scout, results, traces


def no_trace(name: str) -> dict[str, Any]:
    """Train one case with and without SCOUT and with a broken block on one rank; what every check said."""
    case = ALL_CASES[name]
    alone = Job(case)
    alone.train(STEPS)
    watched = Job(case)
    hooks_before = hooks(watched.wrapped)
    scout, results, traces = watch(watched)
    stray: list[str] = []
    for _ in range(STEPS):
        watched.step()
        if scout.step_count % INTERVAL != INTERVAL - 1:
            stray += _stray_hooks(hooks_before, hooks(watched.wrapped))
        if watched.attempts in (10, STEPS):
            before = live_state(watched), _counts(hooks(watched.wrapped))
            results.append(scout.check_now())
            traces += [f"check_now: {key}" for key in differences(before[0], live_state(watched))]
            traces += [f"check_now: {key}" for key in differences(before[1], _counts(hooks(watched.wrapped)))]
    scout.close()
    return {
        "scheduled": [result.status.value for result in results if not result.manual],
        "manual": [result.status.value for result in results if result.manual],
        "reasons": sorted({reason.message for result in results for reason in result.inconclusive_reasons}),
        "checked": sorted({recipe for result in results for recipe in result.checked_recipe_ids}),
        "reports": [(report.kind.value, report.message) for report in scout.reports],
        "active": scout.step_count,
        "traces": traces[:10],
        "stray": stray[:10],
        "left": differences(hooks_before, hooks(watched.wrapped)),
        "final": _final_differences(alone, watched),
        "fault": broken_block(name),
    }


def broken_block(name: str) -> dict[str, Any]:
    """A fault in one block on one rank: whom scheduled checks and one off schedule blamed, and for what."""
    job = Job(ALL_CASES[name])
    if dist.get_rank() == FAULTY:
        break_block(job, BROKEN_LAYER)
    scout, results, traces = watch(job, interval=1)
    job.train(3)
    scheduled = [result for result in results if f"hidden:{BROKEN_LAYER}" in result.checked_recipe_ids]
    now = scout.check_now()
    scout.close()
    return {
        "scheduled": [(result.status.value, result.sdc_ranks, result.sdc_sources) for result in scheduled],
        "now": (now.status.value, now.sdc_ranks, now.sdc_sources),
        "innocent": sorted({rank for result in [*results, now] for rank in result.sdc_ranks} - {FAULTY}),
        "traces": traces[:5],
    }


def run_batch(names: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        found[name] = no_trace(name)
        torch.compiler.reset()
        gc.collect()
    return found


def long_run(steps: int) -> dict[str, Any]:
    case = CASES["batch_norm"]
    alone = Job(case)
    alone.train(steps)
    watched = Job(case)
    scout, results, traces = watch(watched, interval=5)
    watched.train(steps)
    scout.close()
    return {
        "checks": len(results),
        "agreed": sum(result.status.value == "Agree" for result in results),
        "trustworthy": sum(result.trustworthy for result in results),
        "reports": len(scout.reports),
        "traces": traces[:10],
        "final": _final_differences(alone, watched),
    }


def test_300_steps_end_in_the_same_bits(ranks4: RankPool) -> None:
    for found in ranks4.run(long_run, 300, timeout=120):
        assert found == {"checks": 60, "agreed": 60, "trustworthy": 60, "reports": 0, "traces": [], "final": []}


@pytest.mark.parametrize("batch", range(_BATCHES))
def test_no_configuration_shows_a_trace(ranks4: RankPool, batch: int) -> None:
    names = sorted(CASES)[batch::_BATCHES]
    _judge(ranks4.run(run_batch, names, timeout=180))


def test_compiled_models_show_no_trace(ranks4: RankPool) -> None:
    _judge(ranks4.run(run_batch, sorted(COMPILED), timeout=240))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_models_compiled_by_inductor_show_no_trace(ranks4: RankPool) -> None:
    _judge(ranks4.run(run_batch, sorted(INDUCTOR), timeout=1700))


def _judge(by_rank: list[dict[str, dict[str, Any]]]) -> None:
    wrong = {}
    for rank, found in enumerate(by_rank):
        for name, seen in found.items():
            complaints = _complaints(name, seen)
            if complaints:
                wrong[f"{name} on rank {rank}"] = complaints
    assert not wrong, "\n".join(f"{where}: {what}" for where, what in wrong.items())


def _complaints(name: str, seen: dict[str, Any]) -> list[str]:
    """What a case did that it should not have."""
    reason = ALL_CASES[name].reason
    found = [f"{key}: {seen[key]}" for key in ("traces", "stray", "left", "final") if seen[key]]
    status = "Agree" if reason is None else "Inconclusive"
    off_schedule = "Agree" if ALL_CASES[name].whole_off_schedule else status
    if not seen["scheduled"] or set(seen["scheduled"]) != {status} or set(seen["manual"]) != {off_schedule}:
        found.append(f"statuses {seen['scheduled']} and {seen['manual']} for {seen['reasons']}")
    if [message for message in seen["reasons"] if reason is None or reason not in message] or (
        reason is not None and not seen["reasons"]
    ):
        found.append(f"reasons {seen['reasons']}")
    if seen["reports"]:
        found.append(f"false reports {seen['reports']}")
    expected = {"embedding", "output", "optimizer", *(f"hidden:{layer}" for layer in range(3))}
    if set(seen["checked"]) | ({"optimizer"} if reason else set()) != expected:
        found.append(f"checked only {seen['checked']}")
    fault = seen["fault"]
    surface = f"hidden:{BROKEN_LAYER}/output"
    for verdict, ranks, sources in [*fault["scheduled"], fault["now"]]:
        if verdict != "Attributed" or ranks != (FAULTY,) or surface not in sources:
            found.append(f"fault: {verdict} {ranks} {sources}")
    if not fault["scheduled"] or fault["innocent"] or fault["traces"]:
        found.append(f"fault: {fault}")
    return found


def _stray_hooks(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Hooks on a step that does not check, but for the one on the root."""
    root = {"._forward_pre_hooks", "._forward_pre_hooks_with_kwargs"}
    return [key for key in differences(before, now) if key not in root]


def _counts(found: dict[str, Any]) -> dict[str, int]:
    return {key: len(value) for key, value in found.items()}


def _final_differences(alone: Job, watched: Job) -> list[str]:
    """Differences between two jobs' states, identities and addresses left out."""
    return differences(_values(live_state(alone)), _values(live_state(watched)))


def _values(state: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in state.items():
        if isinstance(value, tuple) and len(value) == 4 and isinstance(value[3], torch.Tensor):
            kept[key] = value[3]
        elif not key.endswith(("._parameters", "._buffers", "._modules", ".params")) and _comparable(value):
            kept[key] = value
    return kept


def _comparable(value: Any) -> bool:
    """Whether a value means the same in another job: no addresses in it."""
    return not (isinstance(value, tuple) and len(value) == 2 and value[0] is not None) and not _has_address(value)


def _has_address(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_address, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_address, value))
    return isinstance(value, int) and abs(value) > 1 << 40
