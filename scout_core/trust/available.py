"""What there is to go back to: durable manifests, and what the ranks hold in memory and on their disks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from scout_core.trust.channel import JobChannel
from scout_core.trust.holdings import Holding, LocalHoldings
from scout_core.trust.saver import DurableTier
from scout_core.trust.selection import Available
from scout_core.trust.states import TrustState, retained


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


def still_on_disk(known: Sequence[int], fresh: int | None, states: Mapping[int, TrustState]) -> tuple[int, ...]:
    """Steps that every rank has on disk and does not prune, by what was known and the newest all confirm. Pure."""
    steps = {*known, *(() if fresh is None else (fresh,))}
    kept = retained({step: states[step] for step in steps if step in states})
    return tuple(sorted(kept))


def outlives(hosts: Sequence[str], offset: int, lost: Sequence[str]) -> bool:
    """Whether every rank's part is on the disk of a host that is left. Pure.

    Its own copy is on its own host, the other on that of the rank `offset` further on; 0: there is no other.
    """
    size = len(hosts)
    return all(hosts[r] not in lost or (offset and hosts[(r + offset) % size] not in lost) for r in range(size))


def worst_loss(hosts: Sequence[str], rank: int, offset: int) -> bool:
    """Whether the state on disk outlives the loss of any one host but that of `rank`, which is there to ask. Pure."""
    return all(outlives(hosts, offset, (host,)) for host in set(hosts) - {hosts[rank]})
