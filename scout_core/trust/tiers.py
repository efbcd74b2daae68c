"""Putting the two tiers together from what attach gave."""

from __future__ import annotations

import platform
from dataclasses import replace

import torch

from scout_core.adapter import FrameworkAdapter
from scout_core.config import ConfigError, ScoutConfig
from scout_core.trust.channel import JobChannel
from scout_core.trust.durable import CheckpointIo, DurableCheckpointConfig
from scout_core.trust.gemini import Gemini
from scout_core.trust.memory import HostMemory
from scout_core.trust.run_record import RunRecord
from scout_core.trust.saver import DurableTier, Lineage
from scout_core.trust.shard import Judge, Shards


def make_gemini(
    config: ScoutConfig, channel: JobChannel, shards: Shards, hosts: list[str], attempt: int, judge: Judge
) -> Gemini:
    """The memory tier. Every rank calls; makes a Gloo group when copies go to peers."""
    trust = config.trust
    replicate = trust.replicate and channel.size > 1
    return Gemini(
        HostMemory(channel.rank),
        shards,
        JobChannel(trust.agreement_timeout_s, "replicate") if replicate else None,
        rank=channel.rank,
        attempt=attempt,
        hosts=hosts,
        flush_interval=trust.flush_interval,
        judge=judge,
    )


def make_durable(
    durable: DurableCheckpointConfig,
    config: ScoutConfig,
    adapter: FrameworkAdapter,
    record: RunRecord,
    topology: str,
    io: CheckpointIo,
) -> DurableTier:
    """The durable tier. Every rank calls; makes a Gloo group whose timeout fits slow storage.

    Raises `ConfigError` when neither the caller nor the adapter has callbacks.
    """
    assert config.run_dir is not None
    callbacks = durable.callbacks or adapter.durable_callbacks()
    if callbacks is None:
        raise ConfigError(
            f"durable checkpoints need callbacks, and {type(adapter).__name__} has none of its own; "
            "give DurableCheckpointConfig(callbacks=TorchSaveCallbacks(), ...)"
        )
    lineage = Lineage(
        run_id=record.run_id,
        attempt=record.attempt,
        topology_digest=topology,
        environment={"torch": torch.__version__, "python": platform.python_version()},
    )
    channel = JobChannel(durable.save_timeout_s, "durable")
    return DurableTier(replace(durable, callbacks=callbacks), config.run_dir / "manifests", channel, lineage, io)
