"""The evidence bundle of one incident: what was known before anybody killed anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Report, every rank's view (with its collective rings), and stacks by rank."""

    report: Mapping[str, Any]
    views: Mapping[int, Mapping[str, Any]]
    stacks: Mapping[int, str]

    def write(self, folder: Path) -> Path:
        """Write the bundle into `folder`, made for it; returns the folder. Raises `OSError`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(self.report, indent=1, default=str))
        (folder / "ranks.json").write_text(json.dumps({str(r): v for r, v in sorted(self.views.items())}, indent=1))
        for rank, text in sorted(self.stacks.items()):
            (folder / f"stacks-rank{rank}.txt").write_text(text + "\n")
        return folder
