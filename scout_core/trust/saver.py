"""Writing, promoting, rejecting and loading durable checkpoints, together on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scout_core.replay.guard import Outcome, attempt
from scout_core.trust.channel import JobChannel
from scout_core.trust.durable import (
    CheckpointContext,
    CheckpointIo,
    DurableCheckpointConfig,
    GuardedCallbacks,
    unwatched,
)
from scout_core.trust.files import UntrustedFile
from scout_core.trust.manifest import Manifest, ManifestFile, ManifestStore, await_visible, describe, torn, verify
from scout_core.trust.states import LOAD_FAILURES_ALLOWED, TrustState


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something wrong with a checkpoint, told to people as a `checkpoint_bad` report. Equal on every rank."""

    step: int
    message: str
    ranks: tuple[int, ...] = ()
    checkpoint_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """What binds a checkpoint: it is of no use to any other run, topology or attempt order."""

    run_id: str
    attempt: int
    topology_digest: str
    environment: dict[str, str]


class DurableTier:
    """The durable checkpoints of this run. Rank 0 is the manifest writer."""

    def __init__(
        self,
        config: DurableCheckpointConfig,
        manifests: Path,
        channel: JobChannel,
        lineage: Lineage,
        io: CheckpointIo = unwatched,
    ) -> None:
        assert config.callbacks is not None, "Trust fills in the adapter's"
        self.store = ManifestStore(config.manifest_folder or manifests)
        self._config = config
        self._channel = channel
        self._lineage = lineage
        self._writer = channel.rank == 0
        self._calls = GuardedCallbacks(config.callbacks, channel.rank, 0, io)
        self._last_saved = 0

    def resume_at(self, step: int) -> None:
        """Count intervals from the step that was loaded."""
        self._last_saved = step

    def due(self, step: int) -> bool:
        """Whether a multiple of the interval was passed since the last save."""
        return step // self._config.interval > self._last_saved // self._config.interval

    def save(self, step: int, state: TrustState, training_state: Callable[[], Any]) -> list[Problem]:
        """Write the checkpoint of this boundary. Every rank calls; collectives: gathers, and those of the callback.

        Only when every rank's files are whole and visible to the writer is it a candidate, and then what `state` says.
        """
        self._last_saved = step
        context = self._context(f"step-{step:09d}-attempt-{self._lineage.attempt}", step)
        files, error = self._write(context, training_state)
        told = self._channel.gather_json({"files": [file.model_dump() for file in files], "error": error})
        failed = tuple(rank for rank, one in enumerate(told) if one["error"] is not None)
        all_files = tuple(ManifestFile.model_validate(file) for one in told for file in one["files"])
        if failed:
            why = "; ".join(f"rank {rank}: {told[rank]['error']}" for rank in failed)
            self._record(context, "REJECTED", why, all_files)
            return [self._problem(context, f"saving failed, the prior checkpoint is kept: {why}", failed)]
        late = await_visible(context.folder, all_files, self._config.visibility_s) if self._writer else []
        late = self._channel.gather_json(late)[0]
        if late:
            why = "; ".join(late)
            ranks = tuple(r for r in range(self._channel.size) if any(f"(rank {r})" in text for text in late))
            self._record(context, "CANDIDATE", f"not visible within {self._config.visibility_s:g} s: {why}", all_files)
            return [self._problem(context, f"files not visible to the manifest writer, not promoted: {why}", ranks)]
        trusted = state is TrustState.RECOVERY_VERIFIED
        return self._commit(context, "RECOVERY_VERIFIED" if trusted else "CANDIDATE", all_files)

    def _write(
        self, context: CheckpointContext, training_state: Callable[[], Any]
    ) -> tuple[list[ManifestFile], str | None]:
        def write() -> list[ManifestFile]:
            paths = self._calls.save(context, training_state())
            return describe(context.rank, context.folder, list(paths))

        outcome = attempt("saving a durable checkpoint", write)
        return outcome.value or [], None if outcome.failure is None else outcome.failure.error

    def _commit(self, context: CheckpointContext, state: str, files: tuple[ManifestFile, ...]) -> list[Problem]:
        error = None
        if self._writer:

            def commit() -> None:
                self._record(context, "CANDIDATE", "", files)
                self._calls.commit(context)
                if state != "CANDIDATE":
                    self.store.update(context.checkpoint_id, state=state)

            failure = attempt("committing a checkpoint", commit).failure
            error = None if failure is None else failure.error
        error = self._channel.gather_json(error)[0]
        return [] if error is None else [self._problem(context, f"not committed, stays unproven: {error}", ())]

    def settle(self, state: TrustState, steps: Sequence[int], reason: str) -> None:
        """Promote this attempt's candidates at `steps`, or reject what it saved there. Local to the manifest writer.

        An earlier attempt's candidate of the same step is another state: what later cycles found does not speak of it.
        """
        if not self._writer:
            return
        here = (self._lineage.run_id, self._lineage.attempt)
        for manifest in self.store.all()[0]:
            own = (manifest.run_id, manifest.attempt) == here
            open_to_it = manifest.state == "CANDIDATE" or (
                state is TrustState.REJECTED and manifest.state == "RECOVERY_VERIFIED"
            )
            if own and manifest.step in steps and open_to_it:
                if state is TrustState.RECOVERY_VERIFIED and (manifest.reason or verify(manifest)):
                    continue  # it never was whole
                self.mark(manifest, state, reason)

    def mark(self, manifest: Manifest, state: TrustState, reason: str) -> None:
        """Set a manifest's state; a rejected or quarantined one is told to the framework. On the manifest writer."""
        self.store.update(manifest.checkpoint_id, state=state.value, reason=reason)
        if state in (TrustState.REJECTED, TrustState.QUARANTINED):
            context = self._context(manifest.checkpoint_id, manifest.step, Path(manifest.folder), reason)
            attempt("calling quarantine_candidate", lambda: self._calls.quarantine(context))

    def quarantine_failed(self) -> list[Problem]:
        """Quarantine what failed to load too often. On the manifest writer, before a load."""
        problems = []
        for manifest in self.store.all()[0]:
            if manifest.failures >= LOAD_FAILURES_ALLOWED and manifest.state in ("CANDIDATE", "RECOVERY_VERIFIED"):
                why = f"loading it failed {manifest.failures} times; the checkpoint is bad, not the hardware"
                self.mark(manifest, TrustState.QUARANTINED, why)
                problems.append(Problem(step=manifest.step, message=why, checkpoint_id=manifest.checkpoint_id))
        return problems

    def begin_load(self, checkpoint_id: str) -> None:
        """Count a load as failed until `proven`: a process that dies in it cannot say so. On the manifest writer."""
        if self._writer:
            self.store.update(checkpoint_id, open_loads=self.store.read(checkpoint_id).open_loads + 1)

    def proven(self, checkpoint_id: str) -> None:
        """The loaded state passed its first check. On the manifest writer; elsewhere nothing."""
        if self._writer:
            self.store.update(checkpoint_id, open_loads=0, load_failures=0)

    def load(self, checkpoint_id: str, present: Any) -> tuple[Any, list[str]]:
        """This rank's verified state, or every rank's reasons why not. Every rank calls; collectives: gathers, those
        of the callback.

        The manifest writer tells the manifest, since its file may not be visible to other hosts yet; each rank waits
        up to `visibility_s` for all files, since frameworks read more than their own, and verifies its own. From then
        on the load counts as failed until `proven`: what cannot be seen was not damaged, and may be back next time.
        """
        known = attempt("reading a manifest", lambda: self.store.read(checkpoint_id)) if self._writer else Outcome()
        told = self._channel.gather_json(
            {"manifest": None if known.value is None else known.value.model_dump_json(),
             "error": None if known.failure is None else known.failure.error}
        )[0]  # fmt: skip
        if told["manifest"] is None:
            return None, [f"rank 0: {told['error']}"]
        manifest = Manifest.model_validate_json(told["manifest"])

        own = [file for file in manifest.files if file.rank == self._channel.rank]
        folder = Path(manifest.folder)
        late = await_visible(folder, manifest.files, self._config.visibility_s, content=False)
        seen = self._channel.gather_json({"late": "; ".join(late[:4]), "torn": bool(torn(folder, own))})
        if not any(one["torn"] for one in seen) and any(one["late"] for one in seen):
            return None, [f"rank {rank}: {one['late']}" for rank, one in enumerate(seen) if one["late"]]
        attempt("counting the load", lambda: self.begin_load(checkpoint_id))

        def read() -> Manifest:
            problems = late or verify(manifest.model_copy(update={"files": tuple(own), "world_size": 0}))
            if not own:
                problems = [f"the shard of rank {self._channel.rank} is missing"]
            if problems:
                raise UntrustedFile(folder, "; ".join(problems))
            return manifest

        verified = attempt("verifying a checkpoint", read)
        problems = self._all_reasons(verified.failure.error if verified.failure else None)
        if problems or verified.value is None:
            return None, problems
        context = self._context(checkpoint_id, verified.value.step, Path(verified.value.folder))
        loaded = attempt("loading a checkpoint", lambda: self._calls.load(context, present))
        return loaded.value, self._all_reasons(loaded.failure.error if loaded.failure else None)

    def _all_reasons(self, own: str | None) -> list[str]:
        told = self._channel.gather_json(own)
        return [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]

    def _record(self, context: CheckpointContext, state: Any, reason: str, files: tuple[ManifestFile, ...]) -> None:
        if not self._writer:
            return
        manifest = Manifest(
            checkpoint_id=context.checkpoint_id,
            run_id=self._lineage.run_id,
            attempt=self._lineage.attempt,
            step=context.step,
            world_size=self._channel.size,
            topology_digest=self._lineage.topology_digest,
            environment=self._lineage.environment,
            folder=str(context.folder),
            state=state,
            reason=reason,
            files=files,
        )
        self.store.write(manifest)

    def _context(
        self, checkpoint_id: str, step: int, folder: Path | None = None, reason: str = ""
    ) -> CheckpointContext:
        return CheckpointContext(
            checkpoint_id=checkpoint_id,
            step=step,
            folder=folder or self._config.folder.absolute() / checkpoint_id,
            rank=self._channel.rank,
            world_size=self._channel.size,
            reason=reason,
        )

    @staticmethod
    def _problem(context: CheckpointContext, message: str, ranks: tuple[int, ...]) -> Problem:
        return Problem(step=context.step, message=message, ranks=ranks, checkpoint_id=context.checkpoint_id)
