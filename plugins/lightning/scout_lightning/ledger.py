"""What is known of the checkpoints that Lightning wrote: sealed manifests in one folder, and which may be trusted."""

from __future__ import annotations

import logging
import platform
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from scout_core.trust.files import UntrustedFile, bytes_digest
from scout_core.trust.manifest import Manifest, ManifestFile, ManifestStore, describe, verify
from scout_core.trust.states import LOAD_FAILURES_ALLOWED, TrustState

logger = logging.getLogger("scout")
_FOLDER = "manifests"


def latest_verified(dirpath: str | Path, *, topology: str | None = None) -> str | None:
    """Path of the newest checkpoint recorded under `dirpath` that is RECOVERY_VERIFIED and whole; None: there is none.

    `dirpath` is that of the callback. Of several runs that saved there only the last to begin counts, and in it a later
    attempt before an earlier one, which it may have gone back behind. With `topology` others are refused. Every file is
    read and its digest compared; what is skipped is logged with its reason. Local to the caller, no collectives: under
    a strategy of several ranks let one rank ask.
    """
    found, refused = ManifestStore(Path(dirpath) / _FOLDER).all()
    for error in refused:
        logger.warning("SCOUT: skipped: %s", error)
    found = sorted(found, key=_age, reverse=True)
    for manifest in found:
        if manifest.state != TrustState.RECOVERY_VERIFIED.value:
            continue
        problems = _foreign(manifest, found[0].run_id, topology) or _failed(manifest) or verify(manifest)
        if not problems:
            return str(_place(manifest))
        logger.warning("SCOUT: %s of step %d is skipped: %s", _place(manifest), manifest.step, "; ".join(problems))
    return None


def _age(manifest: Manifest) -> tuple[int, int]:
    return manifest.attempt, manifest.step


def _foreign(manifest: Manifest, run_id: str, topology: str | None) -> list[str]:
    """Why a checkpoint is not one of this run and topology; empty if it is. Pure."""
    if manifest.run_id != run_id:
        return ["it is of an earlier run; give its path as ckpt_path to go on from it"]
    if topology not in (None, manifest.topology_digest):
        return [
            f"it is of {manifest.topology_digest}, not {topology}; give its path as ckpt_path to load it all the same"
        ]
    return []


def _failed(manifest: Manifest) -> list[str]:
    """Why a checkpoint is not to be loaded again; empty if it may. Pure."""
    if manifest.failures < LOAD_FAILURES_ALLOWED:
        return []
    return [f"loading it failed {manifest.failures} times; the checkpoint is bad, not the hardware"]


def _place(manifest: Manifest) -> Path:
    """The checkpoint itself: the file or the folder that all recorded files are in."""
    return Path(manifest.folder) / Path(manifest.files[0].path).parts[0]


def identity(path: Path) -> str:
    """The manifest id of a path: readable, and different for equal names in different folders. Pure."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", path.name)[:80]
    return f"{readable}-{bytes_digest(str(path).encode())[:12]}"


@dataclass(kw_only=True)
class Entry:
    """One checkpoint of this process. `state` may change while its file is still being written."""

    path: Path
    step: int
    state: TrustState
    reason: str = ""
    recorded: bool = False
    gone: bool = False


class Ledger:
    """Of the rank that writes manifests, rank 0; local to it. Safe to call from the thread of an asynchronous writer.

    A manifest appears only once the checkpoint's bytes are complete. `run_id` names the run that this fit begins, or
    that of the checkpoint which it goes on from; every fit in the folder is an attempt later than all before it.
    """

    def __init__(self, dirpath: Path, *, run_id: str, topology: str) -> None:
        self.store = ManifestStore(dirpath / _FOLDER)
        self.run_id = run_id
        self._topology = topology
        self._attempt = max((m.attempt + 1 for m in self.store.all()[0]), default=0)
        self._lock = threading.RLock()
        self._replaced: list[Path] = []
        self._pending: list[Entry] = []

    def expect(self, entry: Entry) -> None:
        """`complete` will be called once an asynchronous write has ended."""
        with self._lock:
            self._pending.append(entry)

    def complete(self, entry: Entry) -> None:
        """The bytes of this checkpoint are all on disk: write its manifest. A file that is not there has none."""
        listed = (
            None if entry.gone else self._listed(entry)
        )  # not under the lock, for which the training thread may wait
        with self._lock:
            self._pending = [other for other in self._pending if other is not entry]
            if entry.gone or listed is None:
                return
            manifest = Manifest(
                checkpoint_id=identity(entry.path),
                run_id=self.run_id,
                attempt=self._attempt,
                step=entry.step,
                world_size=1,  # one rank records every file, whichever ranks wrote them
                topology_digest=self._topology,
                environment={"torch": torch.__version__, "python": platform.python_version()},
                folder=str(entry.path.parent),
                state=entry.state.value,  # type: ignore[arg-type]
                reason=entry.reason,
                files=tuple(listed),
            )
            self.store.write(manifest)
            entry.recorded = True

    @staticmethod
    def _listed(entry: Entry) -> list[ManifestFile] | None:
        """Its files with their digests. Reads all of them."""
        files = sorted(p for p in entry.path.rglob("*") if p.is_file()) if entry.path.is_dir() else [entry.path]
        try:
            return describe(0, entry.path.parent, files)
        except UntrustedFile as error:
            logger.warning("SCOUT: checkpoint of step %d is not certified: %s", entry.step, error)
            return None

    def settle(self, entry: Entry, state: TrustState, reason: str) -> None:
        """A later check proved the checkpoint good, or bad. What changed on disk since is not trusted."""
        with self._lock:
            entry.state, entry.reason = state, reason
            if not entry.recorded or entry.gone:
                return
            name = identity(entry.path)
            try:
                problems = verify(self.store.read(name)) if state is TrustState.RECOVERY_VERIFIED else []
                if problems:
                    logger.warning("SCOUT: checkpoint of step %d is not certified: %s", entry.step, "; ".join(problems))
                    return
                self.store.update(name, state=state.value, reason=reason)
            except UntrustedFile as error:
                logger.warning("SCOUT: checkpoint of step %d is not certified: %s", entry.step, error)

    def begin_load(self, path: Path) -> None:
        """Count a load as failed until `loaded`: a process that dies in it cannot say so. Unknown paths are left."""
        with self._lock:
            name = identity(path)
            if self.store.path(name).exists():
                self.store.update(name, open_loads=self.store.read(name).open_loads + 1)

    def loaded(self, path: Path) -> None:
        """It is loaded on every rank."""
        with self._lock:
            name = identity(path)
            if self.store.path(name).exists():
                self.store.update(name, open_loads=0, load_failures=0)

    def quarantine_failed(self) -> None:
        """Before a load: quarantine what failed to load too often."""
        with self._lock:
            for manifest in self.store.all()[0]:
                why = _failed(manifest)
                if why and manifest.state != TrustState.QUARANTINED.value:
                    logger.warning("SCOUT: %s of step %d is quarantined: %s", _place(manifest), manifest.step, why[0])
                    name = manifest.checkpoint_id
                    self.store.update(name, state=TrustState.QUARANTINED.value, reason=why[0])

    def is_last_resort(self, path: Path) -> bool:
        """Whether this is the newest verified checkpoint, without which nothing could be trusted, or about to be it."""
        with self._lock:
            return self._is_newest_verified(path) or any(entry.path == path for entry in self._pending)

    def _is_newest_verified(self, path: Path) -> bool:
        """Of this run, by attempt and step, among those whose files are there: others protect nothing."""
        own = [m for m in self.store.all()[0] if m.run_id == self.run_id]
        verified = [m for m in own if m.state == TrustState.RECOVERY_VERIFIED.value and _place(m).exists()]
        return bool(verified) and _place(max(verified, key=_age)) == path

    def set_aside(self, path: Path) -> None:
        """Before `path` is written anew: what is known of it ends; the newest verified is moved aside, not lost.

        At every moment some manifest names the verified files where they are, so that an end in between loses nothing.
        """
        with self._lock:
            name = identity(path)
            if not self.store.path(name).exists():
                return
            if not self._is_newest_verified(path):
                self.forget(path)
                return
            old = self.store.read(name)
            try:
                self._move(path, old)
            except OSError as error:
                text = "the newest verified checkpoint %s, of step %d, could not be set aside and is overwritten: %s"
                logger.error(f"SCOUT: {text}", path, old.step, error)
                return
            self.forget(path)

    def _move(self, path: Path, old: Manifest) -> None:
        kept = path.with_name(f"{path.stem}-verified-step{old.step}{path.suffix}")
        if kept.exists():  # of an earlier attempt, which came as far
            kept = path.with_name(f"{path.stem}-verified-step{old.step}-attempt{self._attempt}{path.suffix}")
        moved = [f.model_copy(update={"path": str(Path(kept.name, *Path(f.path).parts[1:]))}) for f in old.files]
        self.store.write(old.model_copy(update={"checkpoint_id": identity(kept), "files": tuple(moved)}))
        try:
            path.replace(kept)
        except OSError:
            self.forget(kept)
            raise
        self._replaced.append(kept)

    def superseded(self) -> list[Path]:
        """Checkpoints kept only as the newest verified, which are it no more: to be deleted. Each is given once."""
        with self._lock:
            done = [path for path in self._replaced if not self.is_last_resort(path)]
            self._replaced = [path for path in self._replaced if path not in done]
            return done

    def keep(self, path: Path) -> None:
        """The job asked to delete this one, which is the newest verified: later."""
        with self._lock:
            if path not in self._replaced:
                self._replaced.append(path)

    def forget(self, path: Path) -> None:
        """The checkpoint is deleted or written anew."""
        with self._lock:
            self.store.path(identity(path)).unlink(missing_ok=True)
