"""Which incident is open for one observer, and what ends it. Pure.

Progress of a rank that was named ends its incident, and so does, where nobody was named or a process died, progress of
any rank that is more than the end of a broken collective: a job that is being torn down has not recovered, and what
goes wrong in it is a consequence of the first cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CLAIM_S = 10.0
"""How long a claim without a report is believed; collecting the evidence takes about two seconds at most."""


LAUNCHER = "environment_changed"
"""A launcher has ended: told once of each rank that goes on without it. No incident of training, nor a part of one."""


class Incidents:
    """The open incident of one observer and the findings that were already told. One per observer."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._told: set[tuple[str, tuple[int, ...]]] = set()
        self._claimed: dict[tuple[str, tuple[int, ...]], float] = {}
        self._claims = 0
        self.launcher_told = False
        self._moved = False
        self._over = False
        self.open: Mapping[str, Any] | None = None

    @property
    def claims(self) -> int:
        """How many findings were told or claimed by some observer, ever."""
        return self._claims

    def keep_back(self, kind: str, ranks: Sequence[int], now_s: float) -> bool:
        """Whether this finding is not to be reported: it was, or some observer is about to, or it is no death and
        another incident is open. `now_s` is of this host's monotonic clock.
        """
        finding = kind, tuple(ranks)
        claimed = now_s < self._claimed.get(finding, now_s)
        if kind == LAUNCHER:
            return claimed or self.launcher_told
        return claimed or finding in self._told or (self.open is not None and kind != "process_exit")

    def claim(self, kind: str, ranks: Sequence[int], now_s: float) -> None:
        """Some observer is about to report this. If it never does, it has died, and another one is to."""
        self._claims += 1
        self._claimed[kind, tuple(ranks)] = now_s + CLAIM_S

    def note(self, record: Mapping[str, Any]) -> None:
        """Some observer has reported this: an incident is open here too, the first cause if one is open already."""
        self._claims += 1
        if record["kind"] == LAUNCHER:
            self.launcher_told = self.launcher_told or str(self._rank) in record["evidence"].get("orphans", {})
            return
        self._told.add((record["kind"], tuple(record["ranks"])))
        if self.open is None:
            self.open, self._moved, self._over = record, False, False

    def progressed(self, *, failing: bool) -> bool:
        """This observer's rank made progress; whether that ends the incident for everybody.

        `failing`: the rank's collective broke, it handles an exception, or the job is being torn down.
        """
        if self.open is None:
            return False
        self._moved = True
        named = self.open["ranks"]
        if self._rank in named:
            self._over = True
            return True
        if not named or self.open["kind"] == "process_exit":
            self._over = self._over or not failing
        return False

    def over(self, incident_id: str) -> None:
        """A rank that was named made progress, as its observer says."""
        if self.open is not None and self.open["incident_id"] == incident_id:
            self._over = True

    def take_ended(self) -> Mapping[str, Any] | None:
        """The incident that has ended, once: a next one will be reported. None while one is open, or none is."""
        if self.open is None or not (self._over and self._moved):
            return None
        ended, self.open = self.open, None
        self._told.clear()
        self._claimed.clear()
        return ended
