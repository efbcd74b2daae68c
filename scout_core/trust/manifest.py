"""Manifests of durable checkpoints: small sealed records that say what was written and how far it may be trusted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from scout_core.trust.files import UntrustedFile, file_digest, read_record, write_record
from scout_core.trust.states import TrustState

_SUFFIX = ".manifest.json"
_POLL_S = 0.05


class ManifestFile(BaseModel):
    """One file of a checkpoint: `path` relative to the checkpoint's folder, content digest, and who wrote it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rank: int = Field(ge=0)
    path: str = Field(min_length=1)
    bytes: int = Field(ge=1)
    digest: str


class Manifest(BaseModel):
    """One durable checkpoint. It is valid for the run, topology and world size it names, and for no other."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1] = 1
    type: Literal["CheckpointManifest"] = "CheckpointManifest"
    checkpoint_id: str = Field(pattern=r"^[A-Za-z0-9._-]{1,120}$")
    run_id: str
    attempt: int = Field(ge=0)
    step: int = Field(ge=0)
    world_size: int = Field(ge=1)
    topology_digest: str
    environment: dict[str, str]
    folder: str
    state: Literal["CANDIDATE", "RECOVERY_VERIFIED", "REJECTED", "QUARANTINED"]
    reason: str = ""
    files: tuple[ManifestFile, ...]
    open_loads: int = Field(default=0, ge=0)
    load_failures: int = Field(default=0, ge=0)

    @property
    def failures(self) -> int:
        """Failed loads; one that was begun and never ended counts: the process died in it."""
        return self.load_failures + self.open_loads


class ManifestStore:
    """The manifest folder. Reading is for everybody, writing for the manifest writer alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, checkpoint_id: str) -> Path:
        """Where the manifest of a checkpoint stands."""
        return self.folder / f"{checkpoint_id}{_SUFFIX}"

    def write(self, manifest: Manifest) -> None:
        """Publish or replace one manifest. Raises `OSError`."""
        write_record(self.path(manifest.checkpoint_id), manifest)

    def read(self, checkpoint_id: str) -> Manifest:
        """One manifest. Raises `UntrustedFile`."""
        path = self.path(checkpoint_id)
        manifest = read_record(path, Manifest)
        if manifest.checkpoint_id != checkpoint_id:
            raise UntrustedFile(path, f"is the manifest of {manifest.checkpoint_id}")
        return manifest

    def all(self) -> tuple[list[Manifest], list[UntrustedFile]]:
        """Every manifest, newest step first, and what was refused."""
        good: list[Manifest] = []
        bad: list[UntrustedFile] = []
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            try:
                good.append(self.read(path.name[: -len(_SUFFIX)]))
            except UntrustedFile as error:
                bad.append(error)
        return sorted(good, key=lambda m: (m.step, m.attempt), reverse=True), bad

    def update(self, checkpoint_id: str, **changes: object) -> Manifest:
        """Change fields of a manifest. Raises `UntrustedFile` or `OSError`."""
        old = self.read(checkpoint_id)
        new = Manifest.model_validate({**old.model_dump(), **changes})
        self.write(new)
        return new

    def may_prune(self, checkpoint_id: str) -> bool:
        """Whether a framework may delete this checkpoint: never the newest verified one, nor what waits behind it."""
        good, _ = self.all()
        verified = [m for m in good if m.state == TrustState.RECOVERY_VERIFIED.value]
        found = [m for m in good if m.checkpoint_id == checkpoint_id]
        if not found or not verified:
            return False
        return found[0].step < verified[0].step or found[0].state in ("REJECTED", "QUARANTINED")


def verify(manifest: Manifest) -> list[str]:
    """Everything wrong with the files of a checkpoint, naming file and rank; empty if all is as it was written."""
    problems = []
    for file in manifest.files:
        text = _problem(Path(manifest.folder), file)
        if text is not None:
            problems.append(text)
    named = {file.rank for file in manifest.files}
    missing = [rank for rank in range(manifest.world_size) if rank not in named]
    return problems + [f"the shard of rank {rank} is missing" for rank in missing]


def await_visible(
    folder: Path,
    files: Sequence[ManifestFile],
    deadline_s: float,
    sleep: Callable[[float], None] = time.sleep,
    *,
    content: bool = True,
) -> list[str]:
    """Wait until every file is visible with its size and, if `content`, its bytes; returns what is not in time.

    Shared storage may show a file to other hosts only after seconds. Local. Before a load only sizes are waited for:
    what is wrong in a file long written does not mend.
    """
    deadline = time.monotonic() + deadline_s
    look = _problem if content else _absence
    pending = list(files)
    while True:
        pending = [file for file in pending if look(folder, file) is not None]
        if not pending:
            return []
        if time.monotonic() >= deadline:
            return [text for file in pending if (text := look(folder, file)) is not None]
        sleep(_POLL_S)


def torn(folder: Path, files: Sequence[ManifestFile]) -> list[str]:
    """What is there and has another size than was written, which is damage and not lateness."""
    seen = [file for file in files if (folder / file.path).exists()]
    return [text for file in seen if (text := _absence(folder, file)) is not None]


def _absence(folder: Path, file: ManifestFile) -> str | None:
    path = folder / file.path
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path} (rank {file.rank}) cannot be read: {error.strerror}"
    return None if size == file.bytes else f"{path} (rank {file.rank}) has {size} bytes instead of {file.bytes}"


def _problem(folder: Path, file: ManifestFile) -> str | None:
    absent = _absence(folder, file)
    if absent is not None:
        return absent
    path = folder / file.path
    try:
        if file_digest(path) != file.digest:
            return f"{path} (rank {file.rank}) has other content than was written"
    except OSError as error:
        return f"{path} (rank {file.rank}) cannot be read: {error.strerror}"
    return None


def describe(rank: int, folder: Path, paths: Sequence[Path]) -> list[ManifestFile]:
    """What one rank wrote, with sizes and digests. Raises `UntrustedFile` for a file elsewhere, empty or unreadable."""
    files = []
    if not paths:
        raise UntrustedFile(folder, f"rank {rank} wrote no file")
    for given in paths:
        path = given if given.is_absolute() else folder / given
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UntrustedFile(path, f"rank {rank} wrote outside the checkpoint's folder {folder}")
        try:
            size = path.stat().st_size
            if size == 0:
                raise UntrustedFile(path, f"rank {rank} wrote an empty file")
            relative = str(path.resolve().relative_to(folder.resolve()))
            files.append(ManifestFile(rank=rank, path=relative, bytes=size, digest=file_digest(path)))
        except OSError as error:
            raise UntrustedFile(path, f"rank {rank} wrote a file that cannot be read: {error.strerror}") from None
    return files
