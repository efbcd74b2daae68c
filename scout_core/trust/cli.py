"""`scout trust ls|show|verify|select DIR`: what a run's folder holds and may be trusted. Needs no running job."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from scout_core.trust.decision import FailureKind
from scout_core.trust.files import UntrustedFile, read_record
from scout_core.trust.holdings import Holding, complete_steps
from scout_core.trust.manifest import Manifest, ManifestStore, verify
from scout_core.trust.places import places_of
from scout_core.trust.run_record import RunRecord
from scout_core.trust.selection import Available, Failure, select_recovery
from scout_core.trust.shard import ShardRecord, verify_data
from scout_core.trust.states import TrustState

_CANNOT = 2
Folder = Annotated[Path, typer.Argument(help="A run's folder (run_dir).")]
Manifests = Annotated[Path | None, typer.Option(help="Folder of the manifests. Default: where the run wrote them.")]
Gemini = Annotated[Path | None, typer.Option(help="Folder of GEMINI shards (gemini_dir). Default: as rank 0 had it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What a command looks at."""

    store: ManifestStore
    gemini: Path


def add_trust_command(app: typer.Typer) -> None:
    """Add the group `trust` to the `scout` command."""
    group = typer.Typer(no_args_is_help=True, help="Which checkpoints of a run may be trusted.")
    group.command("ls")(_ls)
    group.command("show")(_show)
    group.command("verify")(_verify)
    group.command("select")(_select)
    app.add_typer(group, name="trust")


def _ls(folder: Folder, manifests: Manifests = None, gemini: Gemini = None, as_json: AsJson = False) -> None:
    """List durable checkpoints and GEMINI shards with their states. Exit code 1: some record was refused."""
    run = _run(folder, manifests, gemini)
    known, refused = run.store.all()
    rows = [
        {"source": "durable", "step": m.step, "state": m.state, "id": m.checkpoint_id, "reason": m.reason}
        for m in known
    ]
    for place, record in _shards(run, refused):
        state = _became(folder, record)
        rows.append({"source": "gemini", "step": record.step, "state": state, "id": str(place), "reason": ""})
    rows.sort(key=lambda row: -int(str(row["step"])))
    if as_json:
        print(json.dumps({"checkpoints": rows, "refused": [str(error) for error in refused]}))
    else:
        for row in rows:
            print(f"{row['step']:>9}  {row['state']:<18} {row['source']:<8} {row['id']}  {row['reason']}".rstrip())
        if not (rows or refused):
            print(f"no checkpoint is recorded in {run.store.folder} or {run.gemini}")
        _print_refused(refused)
    raise typer.Exit(1 if refused else 0)


def _show(
    folder: Folder,
    checkpoint_id: Annotated[str, typer.Argument(help="Its id, from ls.")],
    manifests: Manifests = None,
) -> None:
    """Print one manifest, or a shard's record without its structure, as JSON. Exit code 2: none can be trusted."""
    shard = Path(checkpoint_id) / "state.json"
    try:
        if shard.is_file():
            print(json.dumps(read_record(shard, ShardRecord).model_dump(mode="json", exclude={"structure"}), indent=1))
            return
        print(json.dumps(_run(folder, manifests, folder).store.read(checkpoint_id).model_dump(mode="json"), indent=1))
    except UntrustedFile as error:
        _fail(str(error))


def _verify(folder: Folder, manifests: Manifests = None, gemini: Gemini = None) -> None:
    """Read every file and compare digests. Exit code 0: all are what was written; 1: some are not."""
    run = _run(folder, manifests, gemini)
    known, refused = run.store.all()
    problems = [str(error) for error in refused]
    for manifest in known:
        if manifest.state in ("CANDIDATE", "RECOVERY_VERIFIED"):
            problems += _told(f"step {manifest.step} {manifest.checkpoint_id}", verify(manifest))
    bad: list[UntrustedFile] = []
    for place, record in _shards(run, bad):
        try:
            verify_data(place, record)
            print(f"ok   step {record.step} {place}")
        except UntrustedFile as error:
            bad.append(error)
    problems += [str(error) for error in bad]
    for problem in problems:
        print(f"bad  {problem}")
    raise typer.Exit(1 if problems else 0)


def _select(
    folder: Folder,
    failure_kind: Annotated[str, typer.Option(help=f"One of {', '.join(get_args(FailureKind))}.")] = "sdc",
    step: Annotated[int | None, typer.Option(help="The step of the failure. Default: after everything.")] = None,
    manifests: Manifests = None,
    gemini: Gemini = None,
) -> None:
    """Print the decision for a failure, as JSON. Exit code 1: nothing to load.

    Durable checkpoints count, and GEMINI steps of which every rank's part is on this disk; memory and other disks are
    not seen.
    """
    if failure_kind not in get_args(FailureKind):
        _fail(f"--failure-kind {failure_kind} is none of {', '.join(get_args(FailureKind))}")
    try:
        record = read_record(folder / "run.json", RunRecord)
    except UntrustedFile as error:
        _fail(str(error))
    run = _run(folder, manifests, gemini)
    durable, refused = run.store.all()
    shards = [(place, shard) for place, shard in _shards(run, refused) if shard.run_id == record.run_id]
    _print_refused(refused)
    known = [(m.step, m.attempt, m.topology_digest) for m in durable if m.run_id == record.run_id]
    known += [(shard.step, shard.attempt, shard.topology_digest) for _, shard in shards]
    failure = Failure(
        kind=failure_kind,  # type: ignore[arg-type]
        step=max([one[0] for one in known], default=0) if step is None else step,
        run_id=record.run_id,
        attempt=record.attempt,
        topology_digest=max(known, key=lambda one: (one[1], one[0]))[2] if known else "",
    )
    available = [_available(manifest) for manifest in durable]
    available += _complete(record, [pair for pair in shards if pair[1].topology_digest == failure.topology_digest])
    decision = select_recovery(failure, available)
    print(decision.model_dump_json(indent=1))
    raise typer.Exit(0 if decision.available else 1)


def _available(manifest: Manifest) -> Available:
    return Available(
        source="durable",
        step=manifest.step,
        state=TrustState(manifest.state),
        run_id=manifest.run_id,
        topology_digest=manifest.topology_digest,
        complete=not verify(manifest),
        checkpoint_id=manifest.checkpoint_id,
        load_failures=manifest.failures,
    )


def _complete(run: RunRecord, shards: list[tuple[Path, ShardRecord]]) -> list[Available]:
    """The GEMINI steps of one topology that could be loaded from these shards, each verified to the last byte."""
    holdings = [
        Holding(
            holder=record.rank,
            owner=record.rank,
            step=record.step,
            state=TrustState(record.state),
            attempt=record.attempt,
            digest=record.digest,
            nearness=1,
        )
        for place, record in shards
        if _whole(place, record)
    ]
    return [
        Available(
            source="gemini",
            step=one.step,
            state=run.judgement(one.step, one.attempt) or one.state,
            run_id=run.run_id,
            topology_digest=shards[0][1].topology_digest,
            load_failures=run.loads.get(str(one.step), 0),
        )
        for one in complete_steps(holdings, shards[0][1].world_size if shards else 0)
    ]


def _whole(place: Path, record: ShardRecord) -> bool:
    try:
        verify_data(place, record)
    except UntrustedFile as error:
        _print_refused([error])
        return False
    return True


def _run(folder: Path, manifests: Path | None, gemini: Path | None) -> _Run:
    """Where to look: what the caller names, else what the run wrote down, else its own folder."""
    for named in (folder, manifests, gemini):
        if named is not None and not named.is_dir():
            _fail(f"scout trust: {named} is no folder; name a run's run_dir, and its folders if they lie elsewhere")
    if manifests is None or gemini is None:
        try:
            known = places_of(folder)
        except UntrustedFile as error:
            _fail(f"{error}; name the folders with --manifests and --gemini")
        manifests, gemini = manifests or known[0], gemini or known[1]
    return _Run(store=ManifestStore(manifests), gemini=gemini)


def _shards(run: _Run, refused: list[UntrustedFile]) -> Iterator[tuple[Path, ShardRecord]]:
    for path in sorted(run.gemini.glob("rank-*/step-*/state.json")):
        try:
            yield path.parent, read_record(path, ShardRecord)
        except UntrustedFile as error:
            refused.append(error)


def _became(folder: Path, shard: ShardRecord) -> str:
    """The state of a shard: what the run's record says became of it, else its own."""
    try:
        run = read_record(folder / "run.json", RunRecord)
    except UntrustedFile:
        return shard.state
    known = run.judgement(shard.step, shard.attempt) if run.run_id == shard.run_id else None
    return shard.state if known is None else known.value


def _told(what: str, problems: list[str]) -> list[str]:
    if not problems:
        print(f"ok   {what}")
    return [f"{what}: {problem}" for problem in problems]


def _print_refused(refused: list[UntrustedFile]) -> None:
    for error in refused:
        print(f"refused: {error}", file=sys.stderr)


def _fail(message: str) -> Any:
    print(message, file=sys.stderr)
    raise typer.Exit(_CANNOT)
