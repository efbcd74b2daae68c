"""What observers tell each other, cut until it fits into one message of the mesh, and the status file of each."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from scout_core.oob.mesh import MESSAGE_BYTES
from scout_core.oob.records import RankView

SENT_CALLS = 32
"""Newest collectives of each group that a view carries when there is room."""
_ENVELOPE_BYTES = 1024


def view_message(view: RankView) -> dict[str, Any]:
    """A view as a record: with fewer calls of its groups, or none, if it would not fit."""
    for calls in (SENT_CALLS, 12, 4):
        record = replace(view, groups=tuple(replace(g, calls=g.calls[-calls:]) for g in view.groups)).to_json()
        if _fits(record):
            return record
    return replace(
        view, groups=(), exception=view.exception[-2000:], farewell_text=view.farewell_text[-2000:]
    ).to_json()


def report_message(record: dict[str, Any]) -> dict[str, Any]:
    """A report with the long texts of its evidence cut to their ends; with no evidence if it would not fit even so."""
    for length in (4000, 500):
        evidence = {k: v[-length:] if isinstance(v, str) else v for k, v in record["evidence"].items()}
        if _fits(short := {**record, "evidence": evidence}):
            return short
    return {**record, "evidence": {"bundle": record["evidence"].get("bundle", "")}}


def _fits(record: dict[str, Any]) -> bool:
    return len(zlib.compress(json.dumps(record).encode(), 1)) + _ENVELOPE_BYTES <= MESSAGE_BYTES


def write_status(path: Path, record: dict[str, Any]) -> None:
    """Replace a status file as a whole; a folder that cannot be written is no reason to stop watching."""
    with suppress(OSError):
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(record))
        scratch.replace(path)
