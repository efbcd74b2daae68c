"""What there is to go back to: durable manifests, and what the ranks hold in memory and on their disks."""

from __future__ import annotations

from dataclasses import asdict

from scout_core.trust.channel import JobChannel
from scout_core.trust.holdings import Holding, LocalHoldings
from scout_core.trust.saver import DurableTier
from scout_core.trust.selection import Available
from scout_core.trust.states import TrustState


def durable_available(durable: DurableTier | None) -> list[Available]:
    """The durable checkpoints as selection wants them. Reads the manifests; local."""
    if durable is None:
        return []
    return [
        Available(
            source="durable",
            step=manifest.step,
            state=TrustState(manifest.state),
            run_id=manifest.run_id,
            topology_digest=manifest.topology_digest,
            checkpoint_id=manifest.checkpoint_id,
            load_failures=manifest.failures,
        )
        for manifest in durable.store.all()[0]
    ]


def gather_holdings(channel: JobChannel, local: LocalHoldings) -> list[Holding]:
    """What every rank holds. Every rank calls; one gather of JSON."""
    told = channel.gather_json([{**asdict(h), "state": h.state.value} for h in local.list()])
    return [Holding(**{**one, "state": TrustState(one["state"])}) for rank in told for one in rank]
