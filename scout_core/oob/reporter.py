"""From a finding to a report: once for all observers, with its evidence, to the log and to the manager."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scout_core.oob.channel import Channel
from scout_core.oob.evidence import bundle_folder, write_bundle
from scout_core.oob.findings import Finding
from scout_core.oob.flight import recording
from scout_core.oob.incidents import LAUNCHER, Incidents
from scout_core.oob.layout import HEADER
from scout_core.oob.line import Line
from scout_core.oob.messages import report_message
from scout_core.oob.process import ProcessWatch, ask_for_stack
from scout_core.oob.records import RankView
from scout_core.oob.seat import Seat
from scout_core.report.event_log import EventLog
from scout_core.report.oob_reports import oob_report

_EVIDENCE_S = 0.5
_HOOK_S = 0.7


class Reporter:
    """Reports of one observer. `status(state, message)` is told what this observer is about."""

    def __init__(
        self, seat: Seat, channel: Channel, line: Line, process: ProcessWatch, status: Callable[[str, str], None]
    ) -> None:
        self._seat, self._channel, self._line, self._process = seat, channel, line, process
        self._status = status
        self._incidents = Incidents(seat.rank)
        self._log = EventLog(seat.run_dir) if seat.run_dir is not None else None
        self._reported = ""
        self._stacks: dict[int, str] = {}
        self._all_stacks: str | None = None
        self._flights: set[int] = set()
        self._hooked = False

    @property
    def launcher_told(self) -> bool:
        """Whether it was reported that this rank goes on without its launcher."""
        return self._incidents.launcher_told

    # -- what is heard ------------------------------------------------------------------------------------------------

    def hear(self, line: dict[str, Any]) -> None:
        """A line of the training process."""
        if line.get("hooked"):
            self._hooked = True
        if "stacks" in line:
            self._all_stacks = line["stacks"]
        if "flight" in line:
            self._flights.add(self._seat.rank)

    def answer(self, message: dict[str, Any]) -> None:
        """A message of another observer that concerns reports; any other is left alone."""
        sender, kind = message["from"], message["type"]
        if kind == "stacks?":
            self._line.send(sender, {"type": "stacks", "text": self._own_stacks()[:12000]})
        elif kind == "stacks":
            self._stacks[sender] = message["text"]
        elif kind == "flight?":
            self._own_flight(message["folder"])
            self._line.send(sender, {"type": "flight"})
        elif kind == "flight":
            self._flights.add(sender)
        elif kind == "claim":
            self._incidents.claim(message["kind"], message["ranks"], time.monotonic())
        elif kind == "report":
            self._note(message["report"])
        elif kind == "over":
            self._incidents.over(message["incident"])
            self._close_ended()
        elif kind == "hook" and self._hook_here(message["report"]):
            self._line.send(sender, {"type": "hooked"})
        elif kind == "hooked":
            self._hooked = True

    def progressed(self, *, failing: bool) -> None:
        """The rank of this observer went on: what held it up may be over, and a second one will be reported."""
        open_now = self._incidents.open
        if self._incidents.progressed(failing=failing) and open_now is not None:
            self._line.tell_all({"type": "over", "incident": open_now["incident_id"]})
        self._close_ended()

    def _close_ended(self) -> None:
        ended = self._incidents.take_ended()
        if ended is None:
            return
        if self._log is not None and ended["incident_id"] == self._reported:
            with suppress(OSError):
                self._log.append({"type": "incident_closed", "incident_id": ended["incident_id"]})
        self._line.say({"closed": ended["incident_id"]})
        self._status("watching", "")

    # -- reporting ----------------------------------------------------------------------------------------------------

    def report(self, finding: Finding, views: Mapping[int, RankView], turn_s: float) -> None:
        """Report once for all observers: the first in order does, the next ones take over if it does not."""
        if self._incidents.keep_back(finding.kind, finding.ranks, time.monotonic()):
            return
        order = sorted(
            (r for r in views if views[r].status != "closed"),
            key=lambda r: (views[r].status != "alive", r in finding.ranks, not views[r].stalled, r),
        )
        turn = min(order.index(self._seat.rank) if self._seat.rank in order else len(order), 4)
        claims = self._incidents.claims
        self._line.pump(time.monotonic() + turn_s * turn, lambda: self._incidents.claims != claims)
        outlived = self._line.parent_gone and views[self._seat.rank].status == "alive"
        if self._incidents.claims != claims or outlived:
            return
        self._line.tell_all({"type": "claim", "kind": finding.kind, "ranks": list(finding.ranks)})
        record = self._record(finding, views)
        self._note(record)
        self._line.tell_all({"type": "report", "report": report_message(record)})
        if self._log is not None:
            with suppress(OSError):
                self._log.append(record)
        self._deliver(report_message(record), order)

    def _record(self, finding: Finding, views: Mapping[int, RankView]) -> dict[str, Any]:
        """The report as a record, its evidence collected."""
        first = self._incidents.open if finding.kind != LAUNCHER else None
        ordinal = time.monotonic_ns()  # tells a stall from an earlier one of the same kind, ranks and step
        secondary = first["incident_id"] if first is not None else ""
        report = oob_report(finding, run=self._seat.run, ordinal=ordinal, secondary_to=secondary)
        record = report.model_dump(mode="json")
        if first is None and finding.kind != LAUNCHER:
            self._reported = report.incident_id
        folder = bundle_folder(self._seat.run_dir, report.incident_id)
        self._collect(finding, views, folder)
        record["evidence"]["bundle"] = write_bundle(folder, report, views, self._stacks)
        return record

    def _collect(self, finding: Finding, views: Mapping[int, RankView], folder: Path | None) -> None:
        """Stacks of the first rank named and of one that is not, flight records of all, before anybody ends them."""
        living = [rank for rank in sorted(views) if views[rank].status == "alive"]
        chosen = [r for r in living if r in finding.ranks][:1] + [r for r in living if r not in finding.ranks][:1]
        flown = [r for r in living if views[r].process.state != "T"] if folder is not None and recording() else []
        self._stacks, self._flights = {}, set()
        for rank in living:
            if rank != self._seat.rank and rank in flown:
                self._line.send(rank, {"type": "flight?", "folder": str(folder)})
            if rank != self._seat.rank and rank in chosen:
                self._line.send(rank, {"type": "stacks?"})
        if self._seat.rank in flown:
            self._line.say({"ask": "flight", "folder": str(folder)})
        if self._seat.rank in chosen:
            self._stacks[self._seat.rank] = self._own_stacks()
        self._line.pump(
            time.monotonic() + _EVIDENCE_S, lambda: set(chosen) <= set(self._stacks) and set(flown) <= self._flights
        )

    def _own_stacks(self) -> str:
        """The training thread's stack by signal, whoever holds the interpreter lock; all threads' if it can be had."""
        seat, number = self._seat, HEADER.unpack_from(self._channel.memory, 0)[-1]
        self._all_stacks = None
        self._line.say({"ask": "stacks"})
        own = ask_for_stack(seat.pid, seat.thread, number, seat.stacks, _EVIDENCE_S * 0.4)
        self._line.pump(time.monotonic() + _EVIDENCE_S * 0.2, lambda: self._all_stacks is not None)
        threads = "\n".join(self._process.threads()[:64])
        every = self._all_stacks or "none: the interpreter lock is held, or the process is stopped"
        return f"{own}\n\nall threads:\n{every}\n\nthreads (state, wait channel):\n{threads}"

    def _own_flight(self, folder: str) -> None:
        """Let the training process write its flight records there, and wait until it has, for a moment."""
        self._flights.discard(self._seat.rank)
        self._line.say({"ask": "flight", "folder": folder})
        self._line.pump(time.monotonic() + _EVIDENCE_S * 0.6, lambda: self._seat.rank in self._flights)

    def _note(self, record: dict[str, Any]) -> None:
        """An incident is open for this observer too, whoever reported it."""
        self._incidents.note(record)
        if record["kind"] != LAUNCHER:
            self._status("incident", record["message"])
        self._line.say({"report": record})

    def _deliver(self, record: dict[str, Any], order: list[int]) -> None:
        """Hand the report to the manager's hook in the first process that is able to run it."""
        if not self._line.parent_gone and self._hook_here(record):
            return
        for rank in order:
            if rank == self._seat.rank or rank in record["ranks"]:
                continue
            self._hooked = False
            if self._line.send(rank, {"type": "hook", "report": record}):
                self._line.pump(time.monotonic() + _HOOK_S, lambda: self._hooked)
                if self._hooked:
                    return

    def _hook_here(self, record: dict[str, Any]) -> bool:
        self._hooked = False
        self._line.say({"hook": record})
        self._line.pump(time.monotonic() + _HOOK_S, lambda: self._hooked)
        return self._hooked
