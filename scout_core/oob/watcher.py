"""The observer's loop: look, and when progress stops or the process ends, ask, judge and report."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from scout_core.oob.channel import Channel
from scout_core.oob.evidence import write_bundle
from scout_core.oob.findings import Finding
from scout_core.oob.layout import HEADER, Activity, Farewell
from scout_core.oob.mesh import Mesh
from scout_core.oob.messages import SENT_CALLS, report_message, view_message, write_status
from scout_core.oob.process import ProcessWatch, ask_for_stacks, exit_code_of, look_at_workers, read_state
from scout_core.oob.reader import (
    Progress,
    TornRecord,
    read_farewell,
    read_groups,
    read_progress,
    read_workers,
)
from scout_core.oob.records import ProcessView, RankView
from scout_core.oob.seat import Seat
from scout_core.oob.thresholds import look_every_s, threshold_s
from scout_core.oob.verdict import judge
from scout_core.report.event_log import EventLog
from scout_core.report.oob_reports import oob_report

_ANSWER_S = 1.0
_ASK_AGAIN_S = 0.4
_GRACE_S = 0.9
_TURN_S = 0.3
_STACKS_S = 0.5
_HOOK_S = 0.7


class Watcher:
    """State of one observer. Single-threaded; every wait in it has a deadline and ends when the parent does."""

    def __init__(
        self, seat: Seat, channel: Channel, mesh: Mesh | None, link: Any, parent: int, wake: int, *, host: str
    ) -> None:
        self._seat, self._channel, self._mesh, self._link = seat, channel, mesh, link
        self._config = seat.config
        self._host = host
        self._process = ProcessWatch(seat.pid)
        self._parent, self._wake = parent, wake
        self._poll = select.poll()
        for descriptor in (parent, wake, link.descriptor):
            self._poll.register(descriptor, select.POLLIN)
        self.parent_gone = False
        self._ended = ProcessView()
        self._bye = False
        self._progress = read_progress(channel.memory)
        self._looks = 0
        self._ask_at = 0.0
        self._judge_at: float | None = None
        self._gone: dict[int, RankView] = {}
        self._answers: dict[int, RankView] = {}
        self._round = 0
        self._stacks: dict[int, str] = {}
        self._hooked = False
        self._exception: str | None = None
        self._open: dict[str, Any] | None = None
        self._told: set[tuple[str, tuple[int, ...]]] = set()
        self._reported = ""
        self._bytes_watching: int | None = None  # known at the end: sent while watching, farewells left out
        self._log = EventLog(seat.run_dir) if seat.run_dir is not None else None
        self._status("watching")

    def run(self) -> None:
        """Watch until the training process ends, or says good-bye."""
        every = look_every_s(self._config)
        while not self.parent_gone and not self._bye:
            self._pump(time.monotonic() + every, lambda: self._due())
            if not self.parent_gone and not self._bye:
                self._look()
        self._bytes_watching = self._mesh.bytes_sent if self._mesh is not None else 0
        if self.parent_gone:
            self._after_death()
        elif self._mesh is not None:
            self._tell_all({"type": "gone", "view": view_message(replace(self._view(), status="closed"))})
            self._pump(time.monotonic() + 0.2, lambda: self.parent_gone)
        self._status("ended")

    def _due(self) -> bool:
        return self._bye or (self._judge_at is not None and time.monotonic() >= self._judge_at)

    def _look(self) -> None:
        """One look at the own rank: close what is over, ask the others when it has been quiet for too long."""
        with suppress(TornRecord):  # a writer stopped within a write: its last whole record counts
            fresh = read_progress(self._channel.memory)
            if fresh.number != self._progress.number:
                self._progress, self._looks, self._ask_at = fresh, 0, 0.0
                self._close_incident()
        now = time.monotonic()
        if self._judge_at is not None and now >= self._judge_at:
            self._judge_at = None
            self._consult()
            return
        limit = self._limit()
        if self._quiet_s() < limit * 0.5:
            return
        self._process.sample()
        if self._quiet_s() < limit:
            self._looks = 0
            return
        self._looks += 1
        enough = self._looks >= min(self._config.stall_persistence, 2) or self._quiet_s() > 2 * limit
        if enough and now >= self._ask_at:
            self._consult()
            self._ask_at = time.monotonic() + _ASK_AGAIN_S * min(1 + self._looks / 20, 10)

    def _quiet_s(self) -> float:
        return (time.monotonic_ns() - self._progress.written_ns) / 1e9

    def _limit(self) -> float:
        """The threshold of what the rank is in; of training at most, once the process is stopped."""
        p = self._progress
        limit = threshold_s(p.phase, p.activity, p.usual_ns, self._config)
        if self._quiet_s() > self._config.stall_train_s and read_state(self._seat.pid)[0] == "T":
            limit = min(limit, self._config.stall_train_s)
        return limit

    def _view(self) -> RankView:
        """Everything known of the own rank now."""
        with suppress(TornRecord):
            self._progress = self._refresh(read_progress(self._channel.memory))
        p = self._progress
        farewell, text = read_farewell(self._channel.memory)
        slots = read_groups(self._channel.memory, newest=SENT_CALLS)
        quiet, limit = self._quiet_s(), self._limit()
        process = self._process.view() if not self.parent_gone else self._ended
        exception = self._ask_exception() if quiet >= limit * 0.9 and process.state not in ("T", "Z", "gone") else ""
        return RankView(
            rank=self._seat.rank,
            host=self._host,
            pid=self._seat.pid,
            status="exited" if self.parent_gone else "closed" if farewell is Farewell.CLOSED else "alive",
            quiet_s=round(quiet, 3),
            threshold_s=limit,
            step=p.step,
            micro=p.micro,
            stage=p.stage,
            phase=p.phase.name.lower(),
            activity=p.activity.name.lower(),
            activity_name=p.name,
            activity_s=round((time.monotonic_ns() - p.since_ns) / 1e9, 3) if p.activity else 0.0,
            group=slots[p.slot].key if p.activity is Activity.COLLECTIVE and p.slot in slots else None,
            sequence=p.sequence,
            process=process,
            farewell=farewell.name.lower(),
            farewell_text=text,
            exception=exception,
            workers=look_at_workers(read_workers(self._channel.memory)) if p.activity is Activity.DATALOADER else (),
            groups=tuple(slots.values()),
        )

    def _refresh(self, fresh: Progress) -> Progress:
        if fresh.number != self._progress.number:
            self._looks = 0
            self._close_incident()
        return fresh

    def _exit_code(self) -> int | None:
        """From /proc while the process waits to be reaped, else from the kernel's record of it."""
        state, code = read_state(self._seat.pid)
        return code if state in ("Z", "X") else exit_code_of(self._parent)

    def _ask_exception(self) -> str:
        """The exception that the training thread handles, from a thread of that process; empty if it cannot answer."""
        self._exception = None
        self._link.say({"ask": "exception"})
        self._pump(time.monotonic() + 0.25, lambda: self._exception is not None)
        return self._exception or ""

    # -- talking --------------------------------------------------------------------------------------------------

    def _pump(self, deadline: float, done: Callable[[], bool]) -> None:
        """Answer and collect until `done`, the deadline, or the parent's death."""
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            for descriptor, _ in self._poll.poll(left * 1000):
                if descriptor == self._parent and not self.parent_gone:
                    self.parent_gone = True
                    self._ended = ProcessView(state="Z", exit_code=self._exit_code())
                    self._poll.unregister(self._parent)
                    return
                if descriptor == self._wake:
                    os.read(self._wake, 4096)
                if descriptor == self._link.descriptor:
                    self._hear()
            for message in self._mesh.take() if self._mesh is not None else ():
                self._answer(message)

    def _hear(self) -> None:
        for line in self._link.hear():
            if "exception" in line:
                self._exception = line["exception"]
            if line.get("bye"):
                self._bye = True
            if line.get("hooked"):
                self._hooked = True
        if self._link.closed:
            self._poll.unregister(self._link.descriptor)
            self._bye = self._bye or read_farewell(self._channel.memory)[0] is Farewell.CLOSED

    def _answer(self, message: dict[str, Any]) -> None:
        sender, kind = message["from"], message["type"]
        if kind == "probe":
            self._send(sender, {"type": "view", "round": message["round"], "view": view_message(self._view())})
        elif kind == "view" and message["round"] == self._round:
            self._answers[sender] = RankView.from_json(message["view"])
        elif kind == "gone":
            self._gone[sender] = RankView.from_json(message["view"])
            if self._gone[sender].status == "exited" and self._judge_at is None:
                self._judge_at = time.monotonic() + _GRACE_S
        elif kind == "stacks?":
            self._send(sender, {"type": "stacks", "text": self._own_stacks()[-12000:]})
        elif kind == "stacks":
            self._stacks[sender] = message["text"]
        elif kind == "claim":
            self._told.add((message["kind"], tuple(message["ranks"])))
        elif kind == "report":
            self._note_report(message["report"])
        elif kind == "hook":
            if self._hook_here(message["report"]):
                self._send(sender, {"type": "hooked"})
        elif kind == "hooked":
            self._hooked = True

    def _send(self, rank: int, message: dict[str, Any]) -> bool:
        return self._mesh is not None and self._mesh.send(rank, message)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for rank in self._seat.peers:
            if rank != self._seat.rank:
                self._send(rank, message)

    # -- judging --------------------------------------------------------------------------------------------------

    def _consult(self) -> None:
        """Ask everybody, judge, and report if there is something to report."""
        views = self._gather(_ANSWER_S)
        finding = judge(list(views.values()), self._seat.peers)
        if finding is not None and not self.parent_gone:
            self._report(finding, views, _TURN_S)

    def _gather(self, timeout_s: float) -> dict[int, RankView]:
        self._round += 1
        self._answers = {}
        expected = set(self._seat.peers) - {self._seat.rank} - set(self._gone)
        for rank in sorted(expected):
            if not self._send(rank, {"type": "probe", "round": self._round}):
                expected.discard(rank)
        own = self._view()
        self._pump(time.monotonic() + timeout_s, lambda: expected <= set(self._answers) | set(self._gone))
        # the last word of a rank that died counts for more than an answer it gave before
        last_words = {rank: view for rank, view in self._gone.items() if view.status == "exited"}
        return {**self._gone, **self._answers, **last_words, self._seat.rank: own}

    def _after_death(self) -> None:
        """The training process has ended: tell the others, hear theirs, judge, and end."""
        started = time.monotonic()
        self._pump_dead(started + 0.05)
        view = self._view()
        if view.farewell == "closed" and not view.process.exit_code:
            self._tell_all({"type": "gone", "view": view_message(replace(view, status="closed"))})
            self._pump_dead(time.monotonic() + 0.1)
            return
        self._gone[self._seat.rank] = view
        self._tell_all({"type": "gone", "view": view_message(view)})
        self._pump_dead(started + 0.7)
        views = self._gather(0.25)
        views[self._seat.rank] = view
        finding = judge(list(views.values()), self._seat.peers)
        if finding is not None:
            self._report(finding, views, 0.1)
        self._pump_dead(time.monotonic() + 0.05)

    def _pump_dead(self, deadline: float) -> None:
        self._pump(deadline, lambda: False)

    # -- reporting ------------------------------------------------------------------------------------------------

    def _report(self, finding: Finding, views: dict[int, RankView], turn_s: float) -> None:
        """Report once for all observers: the first in order does, the next ones take over if it does not."""
        key = (finding.kind, finding.ranks)
        if key in self._told or (self._open is not None and finding.kind != "process_exit"):
            return
        order = sorted(
            (r for r in views if views[r].status != "closed"),
            key=lambda r: (views[r].status != "alive", r in finding.ranks, not views[r].stalled, r),
        )
        turn = min(order.index(self._seat.rank) if self._seat.rank in order else len(order), 4)
        told = len(self._told)
        self._pump(time.monotonic() + turn_s * turn, lambda: len(self._told) != told)
        if len(self._told) != told or (self.parent_gone and views[self._seat.rank].status == "alive"):
            return
        self._tell_all({"type": "claim", "kind": finding.kind, "ranks": list(finding.ranks)})
        secondary = self._open["incident_id"] if self._open is not None else ""
        ordinal = self._progress.number
        report = oob_report(finding, run=self._seat.run, ordinal=ordinal, secondary_to=secondary)
        record = report.model_dump(mode="json")
        self._reported = report.incident_id
        self._collect_stacks(finding, views)
        record["evidence"]["bundle"] = write_bundle(self._seat.run_dir, report, views, self._stacks)
        self._note_report(record)
        self._tell_all({"type": "report", "report": report_message(record)})
        if self._log is not None:
            with suppress(OSError):
                self._log.append(record)
        self._deliver(report_message(record), order)

    def _collect_stacks(self, finding: Finding, views: dict[int, RankView]) -> None:
        """Python stacks of the first rank named and of one that is not, before anybody ends them."""
        living = [rank for rank in sorted(views) if views[rank].status == "alive"]
        chosen = [r for r in living if r in finding.ranks][:1] + [r for r in living if r not in finding.ranks][:1]
        self._stacks = {}
        for rank in chosen:
            if rank != self._seat.rank:
                self._send(rank, {"type": "stacks?"})
        if self._seat.rank in chosen:
            self._stacks[self._seat.rank] = self._own_stacks()
        self._pump(time.monotonic() + _STACKS_S, lambda: set(chosen) <= set(self._stacks))

    def _own_stacks(self) -> str:
        number = HEADER.unpack_from(self._channel.memory, 0)[-1]
        threads = "\n".join(self._process.threads()[:64])
        stacks = ask_for_stacks(self._seat.pid, number, self._seat.stacks, _STACKS_S * 0.6)
        return f"{stacks}\nthreads (state, wait channel):\n{threads}"

    def _note_report(self, record: dict[str, Any]) -> None:
        """An incident is open for this observer too, whoever reported it."""
        self._told.add((record["kind"], tuple(record["ranks"])))
        if self._open is None:
            self._open = record
        self._status("incident", record["message"])
        if not self.parent_gone:
            self._link.say({"report": record})

    def _deliver(self, record: dict[str, Any], order: list[int]) -> None:
        """Hand the report to the manager's hook in the first process that is able to run it."""
        if not self.parent_gone and self._hook_here(record):
            return
        for rank in order:
            if rank == self._seat.rank or rank in record["ranks"]:
                continue
            self._hooked = False
            if self._send(rank, {"type": "hook", "report": record}):
                self._pump(time.monotonic() + _HOOK_S, lambda: self._hooked)
                if self._hooked:
                    return

    def _hook_here(self, record: dict[str, Any]) -> bool:
        self._hooked = False
        self._link.say({"hook": record})
        self._pump(time.monotonic() + _HOOK_S, lambda: self._hooked)
        return self._hooked

    def _close_incident(self) -> None:
        """Progress again: the incident is over, and a second one will be reported."""
        if self._open is None:
            return
        record, self._open = self._open, None
        self._told.clear()
        if self._log is not None and record["incident_id"] == self._reported:
            with suppress(OSError):
                self._log.append({"type": "incident_closed", "incident_id": record["incident_id"]})
        self._link.say({"closed": record["incident_id"]})
        self._status("watching")

    def _status(self, state: str, message: str = "") -> None:
        """The status file of this rank, replaced as a whole."""
        path = self._seat.state_dir / f"observer-{self._seat.rank}.json"
        sent = (self._mesh.bytes_sent, self._mesh.bytes_received) if self._mesh is not None else (0, 0)
        write_status(
            path,
            {
                "rank": self._seat.rank,
                "state": state,
                "message": message,
                "bytes_sent": sent[0],
                "bytes_received": sent[1],
                "bytes_sent_watching": self._bytes_watching,
                "attempt": self._seat.attempt,
            },
        )
