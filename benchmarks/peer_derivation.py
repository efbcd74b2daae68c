"""Time and memory to derive the peers and lockstep partners of every rank: `python -m benchmarks.peer_derivation`.

Every rank of a real job derives its own groups only; here one process does it for all of them, one after the other.
The groups that are distinct are kept, to count them and to see their memory.
"""

from __future__ import annotations

import argparse
import resource
import time

from scout_core.peers.grid import Grid


def main() -> None:
    """Print one line of figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=131_072)
    for name, size in {"tp": 8, "pp": 16, "cp": 2, "ep": 8, "dp_shard": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    given = vars(parser.parse_args())
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    grid = Grid.of_sizes(world=given.pop("ranks"), **given)
    peers, lockstep, members = {}, {}, 0
    for rank in grid.members:
        own_peers, own_lockstep = grid.peers(rank), grid.lockstep(rank)
        members += len(own_peers) + len(own_lockstep)
        peers.setdefault(own_peers[0], own_peers)
        lockstep.setdefault(own_lockstep[0], own_lockstep)
    elapsed_s = time.perf_counter() - start
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    per_rank_us = elapsed_s / grid.world * 1e6
    print(
        f"{grid.world} ranks: {elapsed_s:.2f} s, {per_rank_us:.1f} us a rank, {grown_mib:.0f} MiB more; "
        f"{len(peers)} peer groups, {len(lockstep)} lockstep cohorts, {members / grid.world:.0f} members a rank"
    )


if __name__ == "__main__":
    main()
