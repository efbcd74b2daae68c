"""The append-only event log of a run: one strict JSON record a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventLog:
    """Appends records to `events.jsonl` in a run's folder.

    Each record is one write to a descriptor opened for appending, so that several writers on one local file system do
    not tear each other's lines. Local to the calling rank; raises `OSError` if the folder cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "events.jsonl"
        self._descriptor: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. Values that JSON has no word for become strings."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        line = json.dumps(record, default=str, allow_nan=False, separators=(",", ":")) + "\n"
        os.write(self._descriptor, line.encode())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
