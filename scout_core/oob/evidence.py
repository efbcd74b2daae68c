"""The evidence bundle of one incident: what was known before anybody killed anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from scout_core.oob.records import RankView
from scout_core.report.fault_report import SCOUTFaultReport


def bundle_folder(run_dir: Path | None, incident_id: str) -> Path | None:
    """Where an incident's evidence goes; None when there is no run directory."""
    return run_dir / "bundles" / incident_id if run_dir is not None else None


def write_bundle(
    folder: Path | None, report: SCOUTFaultReport, views: Mapping[int, RankView], stacks: Mapping[int, str]
) -> str:
    """Write report, every rank's view (with its collective rings) and stacks by rank; the folder they are in.

    Empty when there is none, or it cannot be written: a report goes out all the same.
    """
    if folder is None:
        return ""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(report.model_dump(mode="json"), indent=1, default=str))
        ranks = {str(rank): view.to_json() for rank, view in sorted(views.items())}
        (folder / "ranks.json").write_text(json.dumps(ranks, indent=1))
        for rank, text in sorted(stacks.items()):
            (folder / f"stacks-rank{rank}.txt").write_text(text + "\n")
        return str(folder)
    return ""
