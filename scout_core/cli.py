"""The `scout` command. Typer and rich are used here only, and come with `pip install 'scout-suite[cli]'`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise SystemExit(f"scout: the command line needs {error.name}: pip install 'scout-suite[cli]'") from None

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import scout_core
from scout_core.config import ScoutConfig
from scout_core.doctor.command import Diagnosis, run_doctor
from scout_core.doctor.explain import (
    Incident,
    clearing_lines,
    evidence_lines,
    incident_lines,
    incidents,
    log_path,
    read_log,
    summary_lines,
)
from scout_core.doctor.findings import rank_text
from scout_core.doctor.job import JobError, launched
from scout_core.doctor.mesh import mesh_findings, parse_mesh
from scout_core.doctor.render import fact_lines, finding_lines
from scout_core.health.cli import add_health_command
from scout_core.oob.channel import sweep
from scout_core.oob.scratch import sweep_scratch
from scout_core.simulate.cli import add_simulate_command
from scout_core.trust.cli import add_trust_command

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Names the rank at fault in distributed training.")

_COLOURS = {"fatal": "bold red", "warning": "yellow", "info": "cyan"}
_CANNOT = 2


def main() -> None:
    """Entry point of the `scout` console script."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"scout {scout_core.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before a command."""


@app.command()
def doctor(
    in_job: Annotated[
        bool | None,
        typer.Option("--in-job/--local", help="Gather from every rank of a job. Default: if a launcher started this."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="How long to wait for other ranks, seconds.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Only remove what killed jobs of yours left on this host.")
    ] = False,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Only say what a mesh lets SCOUT compare, by its sizes: pp=2,dp_shard=4,tp=2 (outermost first)."
        ),
    ] = None,
) -> None:
    """Say what SCOUT would see of this machine or job, and what to repair.

    On one machine: `scout doctor`. In a job, on every rank: `torchrun ... --no-python scout doctor`, or without the
    command-line extra `torchrun ... -m scout_core.doctor`. In your script, where the model is known:
    `scout_core.doctor.examine(model, optimizer)`.

    Exit code 0: nothing to repair. 1: something is (a warning or fatal finding). 2: the ranks could not be gathered.
    """
    if clean:
        removed = sweep()
        folders = sweep_scratch()
        typer.echo(
            f"removed {len(removed)} segment(s) and {len(folders)} folder(s) of ended jobs"
            + "".join(f"\n  {name}" for name in (*removed, *folders))
        )
        raise typer.Exit(0)
    if mesh is not None:
        try:
            described = Diagnosis(facts=(), findings=mesh_findings(parse_mesh(mesh)))
        except ValueError as error:
            _fail(f"scout doctor --mesh: {error}")
        _print_diagnosis(described, as_json)
        raise typer.Exit(described.exit_code)
    try:
        diagnosis = run_doctor(in_job=launched() if in_job is None else in_job, timeout_s=timeout)
    except JobError as error:
        _fail(f"scout doctor: {error}")
    if diagnosis.speaks:
        _print_diagnosis(diagnosis, as_json)
    raise typer.Exit(diagnosis.exit_code)


@app.command()
def explain(
    target: Annotated[Path, typer.Argument(help="A run's folder (run_dir), or its events.jsonl.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell the incidents of a run: what, who, the evidence, what clears the others, and what to do.

    Exit code 0: the log was read, whatever it says. 2: it cannot be read.
    """
    path = log_path(target)
    try:
        records = read_log(path)
    except OSError as error:
        _fail(f"scout explain: cannot read {path}: {error.strerror}; name a run's folder or its events.jsonl")
    found = incidents(records.reports)
    if as_json:
        told = [incident.to_json() for incident in found]
        print(json.dumps({"type": "explanation", "incidents": told, "summary": summary_lines(records)}))
        return
    if not found:
        print("no incidents")
    console = Console()
    if console.is_terminal and found:
        console.print(_incident_table(found))
    else:
        for incident in found:
            print("\n".join([*incident_lines(incident), ""]))
    print("\n".join(summary_lines(records)))


@app.command()
def config(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print every configuration key with its default and meaning; in a pipe, as a TOML file that attach() can read."""
    keys = list(_keys(ScoutConfig))
    if as_json:
        print(json.dumps({name: {"default": default, "description": text} for name, default, text in keys}))
        return
    console = Console()
    if not console.is_terminal:
        print("\n".join(_toml(keys)))
        return
    table = Table("key", "default", "description")
    for name, default, text in keys:
        table.add_row(name, "None" if default is None else json.dumps(default), text)
    console.print(table)


def _fail(message: str) -> Any:
    print(message, file=sys.stderr)
    raise typer.Exit(_CANNOT)


def _print_diagnosis(diagnosis: Diagnosis, as_json: bool) -> None:
    if as_json:
        print(json.dumps(diagnosis.to_json(), allow_nan=False))
        return
    if diagnosis.facts or not diagnosis.findings:  # a mesh alone asks no rank
        print("\n".join([*fact_lines(diagnosis.facts), ""]))
    console = Console()
    lines = finding_lines(diagnosis.findings)
    if not console.is_terminal:
        print("\n".join(lines))
        return
    table = Table("", "finding", "ranks", "what", "fix")
    for finding in diagnosis.findings:
        ranks = rank_text(finding.ranks) if finding.ranks else "job"
        severity = Text(finding.severity, style=_COLOURS[finding.severity])
        table.add_row(severity, finding.id, ranks, Text(finding.message), Text(finding.fix))
    console.print(table)
    print(lines[-1])


def _incident_table(found: Sequence[Incident]) -> Table:
    table = Table("", "what", "who", "evidence", "what clears the others", "action", show_lines=True)
    for incident in found:
        report = incident.report
        table.add_row(
            Text(report.severity, style=_COLOURS[report.severity]),
            Text(f"{report.kind.value}, {incident.when}\n{report.message}"),
            Text(incident.who),
            Text("\n".join(evidence_lines(report))),
            Text("\n".join(clearing_lines(report))),
            Text(incident.action),
        )
    return table


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Dotted name, JSON-ready default and description of every field; plain fields before nested groups."""
    nested: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            nested.append((f"{prefix}{name}.", field.annotation))
        else:
            yield f"{prefix}{name}", _default(field), field.description or ""
    for name, group in nested:
        yield from _keys(group, name)


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return None
    return json.loads(json.dumps(value, default=str))


def _toml(keys: Sequence[tuple[str, Any, str]]) -> Iterator[str]:
    """A TOML file with the defaults; a key whose default is None is a comment, since TOML has no word for it."""
    section = ""
    for dotted, default, text in keys:
        own, _, name = dotted.rpartition(".")
        if own != section:
            section = own
            yield from ("", f"[{section}]")
        yield f"# {text}"
        # JSON's words for numbers, strings, booleans and lists of them are TOML's too.
        yield f"# {name} =" if default is None else f"{name} = {json.dumps(default)}"


add_health_command(app)
add_trust_command(app)
add_simulate_command(app)

if __name__ == "__main__":
    main()
