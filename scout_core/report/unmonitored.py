"""When a check itself breaks off: who did not come, and the report that says so."""

from __future__ import annotations

from datetime import timedelta

import xxhash
from torch.distributed import distributed_c10d

from scout_core.oob.rendezvous import this_run
from scout_core.peers import PeerGroup
from scout_core.replay.schedule import Plan
from scout_core.report.fault_report import FaultKind, SCOUTFaultReport

_GRACE = timedelta(seconds=5)  # peers that waited together give up together, well within this


def absent_ranks(peers: PeerGroup, plan: Plan) -> tuple[int, ...]:
    """Global ranks that did not give up on this check with the others: those that never came to it.

    Called by each rank that broke off, through the job's own store; no collective. Empty when the store cannot say.
    """
    if peers.control is None:
        return ()
    store = distributed_c10d.PrefixStore(
        f"scout/{peers.ranks[0]}/{plan.ordinal}/{plan.manual}", distributed_c10d._get_default_store()
    )
    try:
        store.set(str(peers.rank), str(plan.step))
        return tuple(rank for rank in peers.ranks if not _came(store, rank))
    except (RuntimeError, ValueError):
        return ()


def _came(store: distributed_c10d.Store, rank: int) -> bool:
    try:
        store.wait([str(rank)], _GRACE)
    except RuntimeError:
        return False
    return True


def unmonitored_report(plan: Plan, peers: PeerGroup, missing: tuple[int, ...], error: str) -> SCOUTFaultReport:
    """The report of a check that broke off on this rank; names ranks only when a strict minority stayed away."""
    named = missing if 0 < len(missing) * 2 < peers.size else ()
    if named:
        who = f"rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
        message = f"{who} did not come to the check after step {plan.step}: out of step with its peers; checks are off"
    else:
        message = f"the check after step {plan.step} broke off and checks are off from now on: {error}"
    return SCOUTFaultReport(
        # every rank whose check broke off tells of it, and it is one incident
        incident_id=xxhash.xxh3_128_hexdigest(f"{this_run()}|unmonitored|{peers.ranks}|{plan.step}".encode()),
        kind=FaultKind.COLLECTIVE_DESYNC,
        severity="warning",
        status="Attributed" if named else "Inconclusive",
        scope="rank" if named else "group",
        ranks=named,
        step=plan.step,
        first_seen_step=plan.step,
        basis="majority" if named else "none",
        evidence={"error": error, "missing_ranks": list(missing)},
        exonerating={"present_ranks": [rank for rank in peers.ranks if rank not in missing]} if named else {},
        recommended_action="observe",
        message=message,
    )
