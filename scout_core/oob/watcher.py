"""The observer's loop: look, and when progress stops or the process ends, ask, judge and report."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from scout_core.oob.channel import Channel
from scout_core.oob.endings import judge_launchers
from scout_core.oob.layout import Activity, Farewell, Phase
from scout_core.oob.line import Line
from scout_core.oob.mesh import Mesh
from scout_core.oob.messages import SENT_CALLS, view_message, write_status
from scout_core.oob.process import ProcessWatch, children_of, exit_code_of, look_at_workers, parent_of, read_state
from scout_core.oob.reader import (
    Progress,
    TornRecord,
    read_awaited,
    read_farewell,
    read_groups,
    read_progress,
    read_workers,
)
from scout_core.oob.records import ProcessView, RankView, Worker
from scout_core.oob.reporter import Reporter
from scout_core.oob.seat import Seat
from scout_core.oob.thresholds import look_every_s, threshold_s
from scout_core.oob.verdict import judge

_ANSWER_S = 1.0
_ASK_AGAIN_S = 0.4
_GRACE_S = 0.9
_TURN_S = 0.3
_ASKED_S = 0.25
_FRESH_S = 1.0


class Watcher:
    """State of one observer. Single-threaded; every wait in it has a deadline and ends when the parent does."""

    def __init__(
        self, seat: Seat, channel: Channel, mesh: Mesh | None, link: Any, parent: int, wake: int, *, host: str
    ) -> None:
        self._seat, self._channel = seat, channel
        self._config = seat.config
        self._host = host
        self._process = ProcessWatch(seat.pid)
        self._parent = parent
        self._line = line = Line(seat.rank, seat.present, mesh, link, parent, wake)
        line.hear, line.answer, line.died, line.hung_up = self._hear, self._answer, self._died, self._hung_up
        self._ended = ProcessView()
        self._bye = False
        self._progress = read_progress(channel.memory)
        self._looks = 0
        self._ask_at = 0.0
        self._judge_at: float | None = None
        self._orphan_at: float | None = None
        self._gone: dict[int, RankView] = {}
        self._answers: dict[int, RankView] = {}
        self._round = 0
        self._exception: str | None = None
        self._exception_asked = False
        self._exception_by = self._exception_until = 0.0
        self._bytes_watching: int | None = None  # known at the end: sent while watching, farewells left out
        self._reporter = Reporter(seat, channel, line, self._process, self._status)
        self._status("watching")

    @property
    def parent_gone(self) -> bool:
        """Whether the training process has ended."""
        return self._line.parent_gone

    def run(self) -> None:
        """Watch until the training process ends, or says good-bye."""
        every = look_every_s(self._config)
        while not self.parent_gone and not self._bye:
            self._pump(time.monotonic() + every, lambda: self._due())
            if not self.parent_gone and not self._bye:
                self._look()
        self._bytes_watching = self._line.mesh.bytes_sent if self._line.mesh is not None else 0
        if self.parent_gone:
            self._after_death()
        elif self._line.mesh is not None:
            self._line.tell_all({"type": "gone", "view": view_message(replace(self._view(), status="closed"))})
            self._pump(time.monotonic() + 0.2, lambda: self.parent_gone)
        self._status("ended")

    def _due(self) -> bool:
        return self._bye or (self._judge_at is not None and time.monotonic() >= self._judge_at)

    def _look(self) -> None:
        """One look at the own rank: close what is over, ask the others when it has been quiet for too long."""
        with suppress(TornRecord):  # a writer stopped within a write: its last whole record counts
            fresh = read_progress(self._channel.memory)
            if fresh.number != self._progress.number:
                self._ask_at = 0.0
                self._progress = self._refresh(fresh)
        now = time.monotonic()
        if self._lost_launcher() and not self._reporter.launcher_told:
            self._orphan_at = self._orphan_at or now + _GRACE_S  # a job that is killed as a whole ends until then
            if now >= self._orphan_at:
                self._tell_of_launcher()
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
        if self._looks >= self._config.stall_persistence and now >= self._ask_at:
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
        awaited = read_awaited(self._channel.memory) if p.activity is Activity.POINT_TO_POINT else ((), ())
        return RankView(
            rank=self._seat.rank,
            role=self._seat.role,
            sends=awaited[0],
            receives=awaited[1],
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
            workers=self._workers(p.activity),
            groups=tuple(slots.values()),
            launcher=self._lost_launcher(),
        )

    def _workers(self, activity: Activity) -> tuple[Worker, ...]:
        """The processes that may hold up what the rank is in: workers of its loader, or whoever writes for it."""
        if activity is Activity.DATALOADER:
            return look_at_workers(read_workers(self._channel.memory))
        if activity in (Activity.CHECKPOINT_READ, Activity.CHECKPOINT_WRITE) and not self.parent_gone:
            return look_at_workers(children_of(self._seat.pid))[:64]
        return ()

    def _refresh(self, fresh: Progress) -> Progress:
        if fresh.number != self._progress.number:
            self._looks, self._exception_until = 0, 0.0
            broken = read_farewell(self._channel.memory)[0] in (Farewell.COLLECTIVE_FAILED, Farewell.EXCEPTION)
            self._reporter.progressed(failing=broken or fresh.phase is Phase.TEARDOWN)
        return fresh

    def _exit_code(self) -> int | None:
        """From /proc while the process waits to be reaped, else from the kernel's record of it."""
        state, code = read_state(self._seat.pid)
        return code if state in ("Z", "X") else exit_code_of(self._parent)

    def _ask_exception(self) -> str:
        """The exception that the training thread handles, from a thread of that process; empty if it cannot answer.

        All peers probe at once, so one wait serves the probes of about a second, and one question those that come
        before its answer: a process whose interpreter lock is held would make each of them wait in turn.
        """
        now = time.monotonic()
        if now >= self._exception_until:
            self._exception = None
            self._exception_by, self._exception_until = now + _ASKED_S, now + _FRESH_S
            if not self._exception_asked:
                self._exception_asked = True
                self._line.say({"ask": "exception"})
        self._pump(self._exception_by, lambda: self._exception is not None)
        return self._exception or ""

    # -- talking --------------------------------------------------------------------------------------------------

    def _pump(self, deadline: float, done: Callable[[], bool]) -> None:
        self._line.pump(deadline, done)

    def _died(self) -> None:
        self._ended = ProcessView(state="Z", exit_code=self._exit_code())

    def _hung_up(self) -> None:
        self._bye = self._bye or read_farewell(self._channel.memory)[0] is Farewell.CLOSED

    def _hear(self, line: dict[str, Any]) -> None:
        if "exception" in line:
            self._exception, self._exception_asked = line["exception"], False
        if line.get("bye"):
            self._bye = True
        self._reporter.hear(line)

    def _answer(self, message: dict[str, Any]) -> None:
        sender, kind = message["from"], message["type"]
        if kind == "probe":
            self._line.send(sender, {"type": "view", "round": message["round"], "view": view_message(self._view())})
        elif kind == "view" and message["round"] == self._round:
            self._answers[sender] = RankView.from_json(message["view"])
        elif kind == "gone":
            self._gone[sender] = RankView.from_json(message["view"])
            if self._gone[sender].status == "exited" and self._judge_at is None:
                self._judge_at = time.monotonic() + _GRACE_S
        else:
            self._reporter.answer(message)

    # -- judging --------------------------------------------------------------------------------------------------

    def _consult(self) -> None:
        """Ask everybody, judge, and report if there is something to report."""
        views = self._gather(_ANSWER_S)
        finding = judge(list(views.values()), self._seat.peers)
        if finding is not None and not self.parent_gone:
            self._reporter.report(finding, views, _TURN_S)

    def _lost_launcher(self) -> int:
        """Process id of the launcher if this rank has lost it, else 0."""
        launcher = self._seat.launcher
        return launcher if launcher and parent_of(self._seat.pid) not in (launcher, 0) else 0

    def _tell_of_launcher(self) -> None:
        views = self._gather(_ANSWER_S)
        finding = judge_launchers(views)
        if finding is not None and not self.parent_gone:
            self._reporter.report(finding, views, _TURN_S)

    def _gather(self, timeout_s: float) -> dict[int, RankView]:
        self._round += 1
        self._answers = {}
        expected = set(self._seat.present) - {self._seat.rank} - set(self._gone)
        for rank in sorted(expected):
            if not self._line.send(rank, {"type": "probe", "round": self._round}):
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
            self._line.tell_all({"type": "gone", "view": view_message(replace(view, status="closed"))})
            self._pump_dead(time.monotonic() + 0.1)
            return
        self._gone[self._seat.rank] = view
        self._line.tell_all({"type": "gone", "view": view_message(view)})
        self._pump_dead(started + 0.7)
        views = self._gather(0.25)
        views[self._seat.rank] = view
        finding = judge(list(views.values()), self._seat.peers)
        if finding is not None:
            self._reporter.report(finding, views, 0.1)
        self._pump_dead(time.monotonic() + 0.05)

    def _pump_dead(self, deadline: float) -> None:
        self._pump(deadline, lambda: False)

    def _status(self, state: str, message: str = "") -> None:
        """The status file of this rank, replaced as a whole."""
        path = self._seat.state_dir / f"observer-{self._seat.rank}.json"
        sent = (self._line.mesh.bytes_sent, self._line.mesh.bytes_received) if self._line.mesh is not None else (0, 0)
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
