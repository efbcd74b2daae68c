"""What the demo prints: a paragraph per scenario, a table, and live progress where there is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from scout_core.demo.events import CHECK_INTERVAL, CLEAN_STEPS, HEALTHY_STEPS, Finished, Progress, Setup
from scout_core.demo.judge import Observed, judge
from scout_core.demo.scenarios import Scenario
from scout_core.demo.stalls import Stall
from scout_core.report.fault_report import SCOUTFaultReport

USAGE = (
    "In your own script it is one line on every rank, after DDP and the optimizer exist:\n\n"
    "    scout = scout_core.attach(model, optimizer, check_interval=50)\n"
)
_HEAD = ("fault", "injected on", "SCOUT says", "surface", "after", "checkpoint", "verdict")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished scenario and its judgement; `scenario` is None for the healthy stretch."""

    scenario: Scenario | Stall | None
    finished: Finished
    problems: tuple[str, ...]

    @classmethod
    def of(cls, scenario: Scenario | Stall | None, finished: Finished) -> Outcome:
        problems = judge(scenario.expected if scenario is not None else None, finished.observed)
        return cls(scenario=scenario, finished=finished, problems=problems)

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        observed = self.finished.observed
        return {
            "scenario": self.finished.scenario,
            "right": not self.problems,
            "problems": list(self.problems),
            "injected_ranks": list(self.scenario.ranks) if self.scenario is not None else [],
            "injected_after_step": self.finished.injected_after,
            "reported_at_step": observed.step,
            "steps_to_report": observed.steps,
            "checkpoint_trusted": observed.trusted,
            "checks": observed.checks,
            "reports": [report.model_dump(mode="json") for report in (*observed.early, *observed.reports)],
            "log": list(self.finished.log),
        }


class Screen(Protocol):
    """Somewhere to print, with one line that is overwritten while a scenario runs."""

    def line(self, text: str) -> None: ...

    def progress(self, text: str) -> None: ...

    def table(self, rows: Sequence[Sequence[str]]) -> None: ...


class PlainScreen:
    """Plain lines, for a pipe or where rich is not installed."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def progress(self, text: str) -> None:
        """Nothing: a pipe has no line to overwrite."""

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
        for row in (_HEAD, tuple("-" * width for width in widths), *rows):
            self.line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def screen() -> Iterator[Screen]:
    """The screen that fits standard output."""
    if not sys.stdout.isatty():
        yield PlainScreen()
        return
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        yield PlainScreen()
        return
    console = Console(highlight=False)
    with console.status("") as status:

        class RichScreen:
            def line(self, text: str) -> None:
                console.print(text, markup=False)

            def progress(self, text: str) -> None:
                status.update(text)

            def table(self, rows: Sequence[Sequence[str]]) -> None:
                table = Table(*_HEAD)
                for row in rows:
                    table.add_row(*row, style=None if row[-1] == "right" else "bold red")
                console.print(table)

        yield RichScreen()


def introduce(setup: Setup, parameters: int, text_bytes: int) -> str:
    """What is about to run, in one line."""
    place = f"{setup.gpus} GPU{'s' if setup.gpus > 1 else ''}" if setup.gpus else "the CPU"
    return (
        f"{setup.ranks} ranks on {place} over {setup.backend} train a byte-level GPT of {parameters / 1e6:.2f} M "
        f"parameters on {text_bytes / 1e3:.0f} kB of English; SCOUT checks every {CHECK_INTERVAL} steps."
    )


def running(event: Progress) -> str:
    """One line about the newest step."""
    check = f"  check: {event.check}" if event.check is not None else ""
    return f"{event.scenario}: step {event.step}  loss {event.loss:.2f}{'  faulty' if event.injected else ''}{check}"


def paragraph(outcome: Outcome) -> list[str]:
    """The lines about one finished scenario."""
    scenario, finished, observed = outcome.scenario, outcome.finished, outcome.finished.observed
    if scenario is None:
        lines = [f"healthy stretch: {HEALTHY_STEPS} steps to loss {finished.loss:.2f}, {observed.checks} checks"]
        lines += [] if outcome.problems else ["  SCOUT       no alarm; every checkpoint would be trusted"]
    else:
        lines = [
            f"{scenario.title} ({scenario.name})",
            f"  injected    {_who(scenario.ranks, observed)}: {scenario.where}, after step {CLEAN_STEPS}",
            *_said(observed),
        ]
    lines += [f"  WRONG       {problem}" for problem in outcome.problems]
    lines += [f"  log         {text.rstrip()}" for text in finished.log if outcome.problems]
    return lines


def row(outcome: Outcome) -> tuple[str, ...]:
    """The table's row about one finished scenario."""
    scenario, observed = outcome.scenario, outcome.finished.observed
    first = next(iter((*observed.early, *observed.reports)), None)
    return (
        scenario.title if scenario is not None else "none (healthy stretch)",
        _who(scenario.ranks, observed) if scenario is not None else "-",
        _verdict(first) if first is not None else "nothing",
        (first.surface or "-") if first is not None else "-",
        _after(observed) or "-",
        {True: "trusted", False: "not trusted", None: "-" if scenario is not None else "trusted"}[observed.trusted]
        if not observed.untrusted_early
        else "not trusted",
        "WRONG" if outcome.problems else "right",
    )


def _said(observed: Observed) -> list[str]:
    if not observed.reports:
        return []
    first = observed.reports[0]
    later = len(observed.reports) - 1
    place = f" at {first.surface}" if first.surface is not None else ""
    lines = [
        f"  SCOUT       {_verdict(first)}{place}: {first.status} (basis: {first.basis}), {_after(observed)} later",
        *(f"  evidence    {text}" for text in _evidence(first)),
    ]
    if later:
        lines.append(f"  and later   {later} more report{'s' if later > 1 else ''} of the same")
    if observed.trusted is not None:
        trusted = "would be trusted" if observed.trusted else "would not be trusted"
        lines.append(f"  checkpoint  of step {observed.step} {trusted}")
    return lines


def _after(observed: Observed) -> str:
    """How long after the injection the first report came: in steps where a check found it, else in seconds."""
    if observed.seconds is not None:
        return f"{observed.seconds:.1f} s"
    return f"{observed.steps} step{'s' if observed.steps != 1 else ''}" if observed.steps is not None else ""


def _verdict(report: SCOUTFaultReport) -> str:
    return f"{report.kind.value}, {_ranks(report.ranks)}"


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no rank blamed"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _who(ranks: Sequence[int], observed: Observed) -> str:
    return _ranks(ranks) if len(ranks) == 1 else "every rank"


def _evidence(report: SCOUTFaultReport) -> list[str]:
    """What accuses the rank and what clears the others, one fact a line."""
    evidence = report.evidence
    peers = evidence.get("peer_ranks", [])
    lines = []
    signatures = next(iter(evidence.get("signatures", {}).values()), None)
    if signatures is not None:
        lines.append("  ".join(f"rank {r}: {str(word)[:8]}" for r, word in zip(peers, signatures, strict=True)))
    for recipe, times in evidence.get("times_ms", {}).items():
        each = "  ".join(f"rank {r}: {time:.1f} ms" for r, time in zip(peers, times, strict=True))
        lines.append(f"{recipe} took  {each}")
    if evidence.get("tensors"):
        lines.append(_difference(evidence))
    if "states" in evidence:  # of the observers, which clear each rank by what it was doing
        return [report.message, *(f"rank {rank}: {text}" for rank, text in report.exonerating.items())]
    cleared = next(iter(report.exonerating.items()), None)
    if cleared is not None:
        lines.append(f"{cleared[0].replace('_', ' ')}: {', '.join(map(str, cleared[1]))}")
    return lines or [report.message]


def _difference(evidence: dict[str, Any]) -> str:
    text = f"in {', '.join(evidence['tensors'])}"
    if evidence.get("differing_elements") is not None:
        count, largest = max(evidence["differing_elements"]), max(evidence["largest_difference"])
        text += f": {count} of {evidence['elements']} elements differ, by up to {largest:.3g}"
    return text
