"""Judging ranks whose processes ended: who died first-hand, who was taken along, who left too early. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from scout_core.oob.findings import Finding, make
from scout_core.oob.records import RankView
from scout_core.oob.waiting import waits_of

_COMMUNICATION = re.compile(
    r"connection (closed|reset)|broken pipe|timed out|timeout|socket|NCCL|gloo|remote process exited|DistBackendError"
    r"|application timeout|monitoredBarrier",  # the last is of TORCH_DISTRIBUTED_DEBUG=DETAIL
    re.IGNORECASE,
)
_LOADER = re.compile(r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\)")
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_ASKED = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


def judge_endings(views: Mapping[int, RankView]) -> Finding | None:
    """What the ended processes come to, or None when they ended as jobs end."""
    ended = [view for view in views.values() if view.status == "exited"]
    if not ended:
        return None
    for view in ended:
        found = _LOADER.search(view.farewell_text)
        if found is not None and view.farewell == "exception":
            return _loader(view, found.group(1).strip(), views)
    for view in ended:
        if _UNFINISHED in view.farewell_text:
            return _unfinished(view, views)
    primary = [view for view in ended if _died_by_itself(view)]
    if primary:
        return _exit(primary, views)
    victims = [view for view in ended if _is_victim(view)]
    stuck = [view for view in views.values() if view.status == "alive" and view.stalled]
    if victims or stuck:
        return _left(views)
    return None


def judge_launchers(views: Mapping[int, RankView]) -> Finding | None:
    """Ranks that go on although the process that started them has ended, or None when there are none."""
    orphans = [view for _, view in sorted(views.items()) if view.status == "alive" and view.launcher]
    if not orphans:
        return None
    told = "; ".join(f"rank {view.rank} is process {view.pid} on {view.host}" for view in orphans)
    return make(
        "environment_changed",
        (),
        views,
        basis="direct",
        message=f"the launcher has ended and its ranks go on without it: {told}; end them if the job was to end",
        surface="launcher",
        evidence={
            "launchers": sorted({f"{view.launcher} on {view.host}" for view in orphans}),
            "orphans": {str(view.rank): view.pid for view in orphans},
        },
    )


def _is_victim(view: RankView) -> bool:
    """Whether its last collective failed under it, or an error of communication ended it.

    No error kills with SIGKILL: whoever is killed by it, is so first-hand, even while it handles such an error.
    """
    if view.process.exit_code == -signal.SIGKILL:
        return False
    if view.farewell == "collective_failed":
        return True
    if view.farewell == "exception":
        return bool(_COMMUNICATION.search(view.farewell_text))
    return view.activity == "collective" and (view.process.exit_code or 0) in (-signal.SIGABRT, 1)


def _died_by_itself(view: RankView) -> bool:
    code = view.process.exit_code
    if _is_victim(view) or code in _ASKED or "KeyboardInterrupt" in view.farewell_text:
        return False
    unknown = code is None and view.farewell not in ("closed", "finished")
    return bool(code) or unknown or view.farewell == "exception"


def _exit(primary: list[RankView], views: Mapping[int, RankView]) -> Finding:
    killed = [view for view in primary if (view.process.exit_code or 0) < 0]
    first = killed or primary
    if len(first) == len(views) > 1:
        codes = sorted({str(view.process.exit_code) for view in first})
        return make(
            "process_exit",
            (),
            views,
            basis="none",
            message=f"every rank's process ended at once, exit code {', '.join(codes)}: the job was ended from outside "
            "or fails alike on all ranks",
        )
    ranks = tuple(sorted(view.rank for view in first))
    told = "; ".join(f"rank {view.rank}: {_how(view)}" for view in sorted(first, key=lambda v: v.rank))
    others = {
        str(view.rank): "lost its connection to others" if _is_victim(view) else "alive"
        for view in views.values()
        if view.rank not in ranks
    }
    return make(
        "process_exit",
        ranks,
        views,
        basis="direct",
        message=told,
        evidence={
            "exit_codes": {str(v.rank): v.process.exit_code for v in views.values() if v.status == "exited"},
            "exceptions": {str(v.rank): v.farewell_text for v in first if v.farewell_text},
        },
        exonerating=others,
    )


def _how(view: RankView) -> str:
    code = view.process.exit_code
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "a signal"
        return f"process {view.pid} was killed by signal {-code} ({name})"
    last = view.farewell_text.strip().splitlines()[-1] if view.farewell_text.strip() else ""
    return f"process {view.pid} ended with exit code {code}" + (f" on {last}" if last else "")


def _loader(view: RankView, pids: str, views: Mapping[int, RankView]) -> Finding:
    last = view.farewell_text.strip().splitlines()[-1]
    return make(
        "dataloader_stall",
        (view.rank,),
        views,
        basis="direct",
        message=f"rank {view.rank}: loader worker {pids} died: {last}; if the kernel killed it, look at host memory",
        evidence={"workers": {pid.strip(): "gone" for pid in pids.split(",")}, "exception": view.farewell_text},
        exonerating={str(v.rank): "lost its connection to others" for v in views.values() if v.rank != view.rank},
    )


def _unfinished(view: RankView, views: Mapping[int, RankView]) -> Finding:
    step = max(view.step - 1, 0)
    return make(
        "collective_desync",
        (view.rank,),
        views,
        basis="direct",
        message=f"rank {view.rank}: parameters without a gradient in step {step}, so its gradient reductions did not "
        "all take place there; raised one iteration later",
        step=step,
        evidence={"how": "missing call", "exception": view.farewell_text},
        exonerating={str(v.rank): "waited for the reduction" for v in views.values() if v.rank != view.rank},
    )


def _left(views: Mapping[int, RankView]) -> Finding | None:
    """Ranks that ended cleanly before a call in which others were."""
    waits = waits_of(views)
    gone = [r for r in waits.roots() if views[r].status in ("exited", "closed")]
    if not gone or len(gone) * 2 >= len(views):
        return None
    missing, step = waits.missing_call(gone[0]), waits.first_drift(gone[0])
    who = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
    return make(
        "collective_desync",
        gone,
        views,
        basis="majority",
        message=f"{who}: finished without {missing or 'a call'} that its peers issued; they lost their connections "
        "only because it had left",
        step=step,
        surface=missing or None,
        evidence={
            "how": "missing call",
            "missing_call": missing,
            "exit_codes": {str(v.rank): v.process.exit_code for v in views.values() if v.status == "exited"},
        },
        exonerating={str(rank): text for rank, text in waits.reasons(views).items()},
    )
