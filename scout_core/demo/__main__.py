"""`python -m scout_core.demo`: exits with 0 if every verdict was right, 1 if one was wrong, 2 if it could not run."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from scout_core.demo import show
from scout_core.demo.events import CHECK_INTERVAL, HEALTHY, Finished, Progress, Ready, Setup
from scout_core.demo.launch import RankDied, count_gpus, launch, plan
from scout_core.demo.scenarios import Scenario, build
from scout_core.demo.stalls import Stall, build_stalls

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo with these command-line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scout_core.demo", description=__doc__)
    parser.add_argument("--ranks", type=int, default=None, help="ranks to train on (4, or one for each of 3 GPUs)")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this scenario only; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there too")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="keep SCOUT's event log there")
    options = parser.parse_args(arguments)
    try:
        setup = plan(options.ranks, count_gpus(), tuple(options.only or ()))
    except ValueError as error:
        parser.error(str(error))
    scenarios: tuple[Scenario | Stall, ...] = (*build(setup.ranks, CHECK_INTERVAL), *build_stalls(setup.ranks))
    unknown = set(setup.only) - {scenario.name for scenario in scenarios}
    if unknown:
        known = ", ".join(scenario.name for scenario in scenarios)
        parser.error(f"--only {', '.join(sorted(unknown))} is no scenario; there are {known}")
    try:
        outcomes = _run(replace(setup, run_dir=options.run_dir), scenarios)
    except RankDied as error:
        print(f"The demo could not run: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; all ranks were ended.", file=sys.stderr)
        return _INTERRUPTED
    if options.json is not None:
        options.json.write_text(json.dumps([outcome.to_json() for outcome in outcomes], indent=1), encoding="utf-8")
    return 1 if any(outcome.problems for outcome in outcomes) else 0


def _run(setup: Setup, scenarios: Sequence[Scenario | Stall]) -> list[show.Outcome]:
    """Run everything on the screen; returns the outcomes in order."""
    started = time.monotonic()
    by_name: dict[str, Scenario | Stall | None] = {HEALTHY: None, **{scenario.name: scenario for scenario in scenarios}}
    outcomes: list[show.Outcome] = []
    with show.screen() as screen, closing(launch(setup)) as events:
        screen.progress(f"starting {setup.ranks} ranks")
        for event in events:
            if isinstance(event, Ready):
                screen.line(show.introduce(setup, event.parameters, event.text_bytes))
            elif isinstance(event, Progress):
                screen.progress(show.running(event))
            elif isinstance(event, Finished):
                outcome = show.Outcome.of(by_name[event.scenario], event)
                outcomes.append(outcome)
                for line in ("", *show.paragraph(outcome)):
                    screen.line(line)
        screen.line("")
        screen.table([show.row(outcome) for outcome in outcomes])
        wrong = sum(bool(outcome.problems) for outcome in outcomes)
        verdict = f"{wrong} of {len(outcomes)} verdicts are wrong." if wrong else "Every verdict is right."
        screen.line(f"\n{verdict} It took {time.monotonic() - started:.0f} s.\n\n{show.USAGE}")
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
