"""What a rank says itself of what holds it up, with nobody to be compared with. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scout_core.oob.findings import Finding, exonerate, make
from scout_core.oob.records import RankView


def is_proof(view: RankView) -> bool:
    """What needs no comparison and no patience: a stopped process, a handler that holds on, a lost loader worker."""
    lost = view.activity == "dataloader" and any(worker.state in ("T", "Z", "gone") for worker in view.workers)
    return view.process.state == "T" or bool(view.exception) or lost


def speaks(view: RankView) -> bool:
    """Whether it says itself what holds it up."""
    return is_proof(view) or view.activity in ("dataloader", "checkpoint_read", "checkpoint_write")


def strongest(views: list[RankView]) -> RankView:
    """The one whose word proves most; of equals, who has been quiet longest."""
    return min(views, key=lambda view: (not is_proof(view), -view.quiet_s))


def own_word(view: RankView, views: Mapping[int, RankView], victims: Mapping[str, str] | None = None) -> Finding:
    """The finding for a rank that says itself what holds it up."""
    cleared = victims or exonerate((view.rank,), views)
    who, seconds = f"rank {view.rank}", f"for {view.quiet_s:.1f} s"
    evidence: dict[str, Any] = {"activity": view.activity, "name": view.activity_name, "usual": None}
    if view.process.state == "T":
        return make(
            "process_stall",
            (view.rank,),
            views,
            basis="direct",
            message=f"{who}: process {view.pid} is stopped (state T), no progress {seconds}",
            evidence={"doing": "stopped"},
            exonerating=cleared,
        )
    if view.activity == "dataloader":
        lost = [worker for worker in view.workers if worker.state in ("T", "Z", "gone")]
        text = "".join(f"; worker {worker.pid} is {'stopped' if worker.state == 'T' else 'dead'}" for worker in lost)
        if any(worker.state != "T" for worker in lost):
            text += "; if the kernel killed it, look at host memory"
        evidence["workers"] = {str(worker.pid): worker.state for worker in view.workers}
        return make(
            "dataloader_stall",
            (view.rank,),
            views,
            basis="direct",
            message=f"{who}: waits in the next() of loader {view.activity_name!r} {seconds}{text}",
            surface=view.activity_name,
            evidence=evidence,
            exonerating=cleared,
        )
    if view.activity in ("checkpoint_read", "checkpoint_write"):
        verb = view.activity.removeprefix("checkpoint_")
        lost = [worker for worker in view.workers if worker.state in ("T", "Z")]
        text = "".join(
            f"; its child process {worker.pid} {'is stopped' if worker.state == 'T' else 'has ended'}"
            for worker in lost
        )
        evidence["workers"] = {str(worker.pid): worker.state for worker in view.workers}
        return make(
            "checkpoint_io_stall",
            (view.rank,),
            views,
            basis="direct",
            message=f"{who}: in the checkpoint {verb} {view.activity_name!r} {seconds} (process {view.pid}, "
            f"state {view.process.state}){text}",
            surface=view.activity_name,
            evidence=evidence,
            exonerating=cleared,
        )
    last = view.exception.strip().splitlines()[-1] if view.exception.strip() else "an exception"
    return make(
        "process_stall",
        (view.rank,),
        views,
        basis="direct",
        message=f"{who}: stuck while handling {last}, no progress {seconds}",
        evidence={"doing": "handling an exception", "exception": view.exception},
        exonerating=cleared,
    )
