"""The job of case F09: two ranks under torchrun that train until they are ended."""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

from tests.oob.jobs import TinyJob, say

if __name__ == "__main__":
    dist.init_process_group("gloo")
    job = TinyJob(sys.argv[1])
    say(sys.argv[1], f"observer{job.rank}-{job.scout.observer_pid}")
    while True:
        job.step()
        say(sys.argv[1], f"step{job.rank}", str(job.scout.step_count))
        time.sleep(0.05)
