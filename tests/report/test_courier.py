"""Delivery to the manager: in order, whatever its hooks do, and decisions before all else."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest

from scout_core.manager_api import OrchestrationHooks
from scout_core.report.courier import Courier
from scout_core.report.desk import ReportDesk
from scout_core.report.trust_reports import checkpoint_report
from scout_core.trust.saver import Problem
from scout_core.trust.selection import Failure, select_recovery


def test_a_raising_or_slow_hook_neither_blocks_nor_loses_the_order() -> None:
    courier, gate, seen = Courier(bound=4), threading.Event(), []

    def slow(value: Any) -> None:
        gate.wait(10)
        seen.append(value)
        if value == 0:
            raise RuntimeError("the manager's own fault")

    started = time.monotonic()
    for value in range(20):
        courier.send("report_fault", slow, value)
    assert time.monotonic() - started < 1.0 and courier.dropped >= 15
    gate.set()
    assert courier.drain(10)
    assert seen == sorted(seen) and seen[0] == 0 and len(seen) == 20 - courier.dropped
    courier.close()


@pytest.mark.parametrize("how", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_a_hook_raises_the_next_is_called(how: type[BaseException]) -> None:
    courier, seen = Courier(), []

    def leave(value: Any) -> None:
        if value == 0:
            raise how
        seen.append(value)

    for value in range(3):
        courier.send("report_fault", leave, value)
    assert courier.drain(10) and seen == [1, 2]
    courier.close()


def test_a_decision_takes_the_place_of_reports_and_no_fault_comes_without_its_own() -> None:
    """A manager that is slow from the start: before each fault that reaches it came the decision that answers it."""
    gate, seen = threading.Event(), []

    def take(value: Any) -> None:
        gate.wait(10)
        seen.append((value.type, value.failed_step if value.type == "RecoveryDecision" else value.step))

    desk = ReportDesk(None, OrchestrationHooks(report_fault=take, report_recovery=take), first=True)
    desk._courier = Courier(bound=5)
    for step in range(1, 9):
        desk.take_decision(select_recovery(Failure(kind="sdc", step=step), []))
        desk.take_own(checkpoint_report(Problem(step=step, message="x")))
        desk.take_own(checkpoint_report(Problem(step=step, message="y")))
    gate.set()
    desk.close()
    decided = [step for kind, step in seen if kind == "RecoveryDecision"]
    assert decided[-1] == 8 and len(seen) <= 6
    for place, (kind, step) in enumerate(seen):
        assert kind == "RecoveryDecision" or ("RecoveryDecision", step) in seen[:place]


def test_the_thread_ends_with_what_was_queued() -> None:
    courier = Courier()
    courier.send("report_fault", lambda value: None, 1)
    courier.close()
    thread = courier._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    courier.send("report_fault", lambda value: sys.exit("called after the end"), 2)
    assert courier.drain(0)
