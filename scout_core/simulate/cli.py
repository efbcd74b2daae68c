"""`scout simulate`: SCOUT's decisions in a job of any size, on one machine. Needs no running job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

Size = Annotated[int, typer.Option(min=1)]
_CANNOT = 2


def add_simulate_command(app: typer.Typer) -> None:
    """Add `simulate` to the `scout` command."""
    app.command("simulate")(_simulate)


def _simulate(
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the job.")],
    tp: Size = 1,
    pp: Size = 1,
    cp: Size = 1,
    ep: Size = 1,
    dp_shard: Size = 1,
    faults: Annotated[Path | None, typer.Option(help="Faults, as a JSON list or [[fault]] tables in TOML.")] = None,
    checks: Annotated[int, typer.Option(min=1, help="Checks to run.")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="Hidden layers of each pipeline stage.")] = 2,
    windows: Annotated[int, typer.Option(min=1, help="Turns in which live state and updates are compared.")] = 2,
    seed: Annotated[int, typer.Option(help="Of noise and intermittent faults.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the code that derives groups and judges evidence, times and collectives over synthetic ranks with faults.

    What is left of the ranks is replicated. Exit code 0: no false alarm, and every fault that was not attributed is
    explained by a boundary of what SCOUT promises. 1: otherwise. 2: the layout or the file of faults makes no sense.
    """
    from scout_core.config import ConfigError
    from scout_core.peers import Grid
    from scout_core.simulate import SimModel, load_faults, report_lines, simulate

    try:
        grid = Grid.of_sizes(world=ranks, tp=tp, pp=pp, cp=cp, ep=ep, dp_shard=dp_shard)
        wanted = load_faults(faults) if faults is not None else []
        model = SimModel(grid=grid, layers=layers, windows=windows)
        report = simulate(model, wanted, checks=checks, seed=seed, healthy=True)
    except (ConfigError, ValueError) as error:
        print(f"scout simulate: {error}", file=sys.stderr)
        raise typer.Exit(_CANNOT) from None
    if as_json:
        print(json.dumps(report.to_json(), allow_nan=False))
    else:
        print("\n".join(report_lines(report)))
    raise typer.Exit(0 if report.sound else 1)
