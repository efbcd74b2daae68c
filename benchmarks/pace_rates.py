"""How often live-step judgement misses and is wrong, on synthetic jobs: `python -m benchmarks.pace_rates --seeds 100`.

Printed for each condition: in how many jobs the slow rank was found and proposed for exclusion, in how many another
rank was named or proposed, and the median delay from onset to the first finding, in observations.
"""

from __future__ import annotations

import argparse
import statistics
import time

from tests.timing.pace_jobs import Job, run

VICTIM, ONSET = 2, 200


def _line(label: str, jobs: list[Job], *, faulty: bool) -> str:
    found, proposed, wrong, wrongly_proposed = 0, 0, 0, 0
    delays: list[int] = []
    for job in jobs:
        told = run(job)
        mine = [step for step, finding in told.of("compute_straggler") if faulty and finding.position == VICTIM]
        others = {position for _, position in told.named} - ({VICTIM} if faulty else set())
        found += bool(mine)
        proposed += faulty and VICTIM in told.excluded
        wrong += bool(others)
        wrongly_proposed += bool(told.excluded - ({VICTIM} if faulty else set()))
        delays += mine[:1]
    delay = f", after {statistics.median(delays) - ONSET:.0f} observations" if delays else ""
    hits = f"found {found}, proposed {proposed} of {len(jobs)}{delay}; " if faulty else f"of {len(jobs)} healthy jobs: "
    return f"{label:44s} {hits}others named {wrong}, proposed {wrongly_proposed}"


def main() -> None:
    """Print a line a condition."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    start = time.perf_counter()
    for noise in (0.01, 0.05, 0.15):
        for correlation in (0.0, 0.8):
            common = {"steps": given.steps, "noise": noise, "correlation": correlation, "hiccups": 0.02}
            label = f"noise {noise:.0%}, correlation {correlation}, 2% hiccups"
            healthy = [Job(seed=seed, **common) for seed in range(given.seeds)]
            print(_line(f"{label}, healthy", healthy, faulty=False), flush=True)
            for slower in (1.05, 1.2):
                jobs = [
                    Job(seed=seed, factor=lambda s, r, by=slower: by if r == VICTIM and s >= ONSET else 1.0, **common)
                    for seed in range(given.seeds)
                ]
                print(_line(f"{label}, {slower - 1:.0%} slower", jobs, faulty=True), flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
