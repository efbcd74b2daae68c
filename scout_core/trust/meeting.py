"""What ranks tell each other at attach: who they are, how they are set up, and how the run stands."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from typing import Any

from scout_core.config import ConfigError, TrustConfig
from scout_core.peers import Coordinates
from scout_core.replay.guard import attempt
from scout_core.trust.channel import JobChannel
from scout_core.trust.durable import DurableCheckpointConfig
from scout_core.trust.files import bytes_digest
from scout_core.trust.places import Places, remember_places
from scout_core.trust.run_record import RunFolder, RunRecord


def meet(
    channel: JobChannel, place: Coordinates, config: TrustConfig, durable: DurableCheckpointConfig | None
) -> tuple[list[str], str]:
    """Host of every rank, and the digest of the job's topology. Every rank calls; one gather of JSON.

    A host is what `socket.gethostname()` calls it, as everywhere in SCOUT: two ranks that say the same name share
    memory and disk, and go together. Raises `ConfigError` on every rank when their trust settings differ.
    """
    own: dict[str, Any] = {"host": socket.gethostname(), "place": asdict(place)}
    own["trust"] = config.model_dump(mode="json", exclude={"gemini_dir"})
    own["durable"] = None if durable is None else [durable.interval, durable.visibility_s, durable.save_timeout_s]
    told = channel.gather_json(own)
    for rank, one in enumerate(told):
        if (one["trust"], one["durable"]) != (told[0]["trust"], told[0]["durable"]):
            raise ConfigError(f"trust settings must be the same on all ranks, but rank {rank} has others than rank 0")
    topology = bytes_digest(json.dumps([one["place"] for one in told], allow_nan=False).encode())
    return [one["host"] for one in told], topology


def begin(channel: JobChannel, folder: RunFolder, places: Places) -> tuple[RunRecord, bool, str | None]:
    """The run's record, whether it was known, and why an older one is not trusted. Every rank calls; rank 0 reads, and
    writes down the `places` where checkpoints lie.

    Raises `ConfigError` on every rank when another attach, of this job or of another, works in the same folder.
    """
    told: Any = None
    if channel.rank == 0:
        refused = folder.claim()
        told = {"refused": refused}
    told = channel.gather_json(told)[0]
    if told["refused"] is not None:
        raise ConfigError(f"{told['refused']}; give each job, and each attach() of one, a run_dir of its own")
    if channel.rank == 0:
        record, known, problem = folder.begin()
        attempt("writing down where checkpoints lie", lambda: remember_places(folder.folder, places))
        told = {"record": record.model_dump(mode="json"), "known": known, "problem": problem}
    told = channel.gather_json(told)[0]
    record = RunRecord.model_validate_json(json.dumps(told["record"], allow_nan=False))
    return record, told["known"], told["problem"]
