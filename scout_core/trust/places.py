"""Where a run keeps its checkpoint records when that is not in its own folder, for those who look at it later."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from scout_core.config import TrustConfig
from scout_core.trust.durable import DurableCheckpointConfig
from scout_core.trust.files import read_record, write_record

_NAME = "places.json"


class Places(BaseModel):
    """Absolute folders of rank 0; None: in the run's folder, which may have been moved since."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1] = 1
    type: Literal["ScoutPlaces"] = "ScoutPlaces"
    manifests: str | None = None
    gemini: str | None = None

    @classmethod
    def given(cls, config: TrustConfig, durable: DurableCheckpointConfig | None) -> Places:
        """What the caller of attach asked for."""
        return cls(
            manifests=_text(None if durable is None else durable.manifest_folder), gemini=_text(config.gemini_dir)
        )


def _text(folder: Path | None) -> str | None:
    return None if folder is None else str(folder.absolute())


def remember_places(run_dir: Path, places: Places) -> None:
    """Write down what is not where it usually is. On the manifest writer. Raises `OSError`."""
    path = run_dir / _NAME
    if places != Places() or path.exists():
        write_record(path, places)


def places_of(run_dir: Path) -> tuple[Path, Path]:
    """The folders of manifests and of GEMINI shards of a run. Raises `UntrustedFile` when their record is damaged."""
    path = run_dir / _NAME
    found = read_record(path, Places) if path.exists() else Places()
    return Path(found.manifests or run_dir / "manifests"), Path(found.gemini or run_dir / "gemini")
