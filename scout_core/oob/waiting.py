"""Who waits for whom, from the calls that ranks have issued on the groups they share. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scout_core.oob.records import Call, GroupView, RankView


@dataclass(frozen=True, kw_only=True)
class Edge:
    """`waiter` has issued call number `sequence` of a group and `late` has not.

    `group` None: they are to meet point to point, and `late` is not there.
    """

    waiter: int
    late: int
    group: int | None
    sequence: int
    call: str


@dataclass(frozen=True, kw_only=True)
class Waits:
    """The edges found. A rank that is late and waits for nobody is a root: it holds the others up."""

    edges: tuple[Edge, ...]
    groups: Mapping[int, Mapping[int, GroupView]]

    def roots(self) -> tuple[int, ...]:
        """Ranks that somebody waits for and that wait for nobody themselves."""
        waiting = {edge.waiter for edge in self.edges}
        return tuple(sorted({edge.late for edge in self.edges} - waiting))

    def waiting(self) -> tuple[int, ...]:
        """Ranks that wait for somebody."""
        return tuple(sorted({edge.waiter for edge in self.edges}))

    @property
    def cycle(self) -> bool:
        """Whether ranks wait for each other with no root among them."""
        return bool(self.edges) and not self.roots()

    def reasons(self, views: Mapping[int, RankView]) -> dict[int, str]:
        """Per waiting rank, what it waits in and for whom."""
        found: dict[int, tuple[str, set[int]]] = {}
        for edge in self.edges:
            found.setdefault(edge.waiter, (edge.call, set()))[1].add(edge.late)
        return {
            rank: f"waits in {call} for rank{'s' if len(late) > 1 else ''} {', '.join(map(str, sorted(late)))}"
            for rank, (call, late) in sorted(found.items())
        }

    def alone(self) -> tuple[int, ...]:
        """Ranks that wait in a call to which fewer than half of its group came."""
        found = set()
        for edge in self.edges:
            if edge.group is None:
                continue
            seen = self.groups[edge.group]
            came = [rank for rank, view in seen.items() if view.issued >= edge.sequence]
            if len(came) * 2 < len(seen[edge.waiter].members):
                found.add(edge.waiter)
        return tuple(sorted(found))

    def missing_call(self, late: int) -> str:
        """The first call that this rank has not issued and others have; empty when it is not known."""
        for edge in self.edges:
            if edge.late == late and edge.group is None:
                return edge.call
            if edge.late == late and edge.group is not None:
                seen = self.groups[edge.group].get(late)  # a rank may not have touched the group yet
                behind = seen.issued + 1 if seen is not None else 1
                calls = [c for view in self.groups[edge.group].values() for c in view.calls if c.sequence == behind]
                return calls[0].text if calls else edge.call
        return ""

    def first_drift(self, late: int) -> int | None:
        """The optimizer step at which this rank's calls began to pair with calls of another step; None if unknown."""
        for edge in self.edges:
            if edge.late != late or edge.group is None:
                continue
            seen = self.groups[edge.group].get(late)
            if seen is None:
                return 0
            own = {call.sequence: call for call in seen.calls}
            for call in self.groups[edge.group][edge.waiter].calls:
                mate: Call | None = own.get(call.sequence)
                if mate is None and call.sequence > seen.issued:
                    return call.step
                if mate is not None and (mate.step, mate.passes) != (call.step, call.passes):
                    return min(mate.step, call.step)
        return None


def waits_of(views: Mapping[int, RankView]) -> Waits:
    """The edges between ranks. A rank inside a loader, a file or a stopped process waits for nobody."""
    groups: dict[int, dict[int, GroupView]] = {}
    for rank, view in views.items():
        for group in view.groups:
            groups.setdefault(group.key, {})[rank] = group
    edges = [edge for view in views.values() for edge in _edges(view, views, groups)]
    return Waits(edges=tuple(edges), groups=groups)


def _edges(view: RankView, views: Mapping[int, RankView], groups: Mapping[int, Mapping[int, GroupView]]) -> list[Edge]:
    if view.status != "alive":
        failed = view.farewell in ("collective_failed", "exception") and view.status == "exited"
        return _behind(view, views, groups, None) if failed else []
    if not view.stalled or view.process.state == "T" or view.exception:
        return []
    if view.activity == "collective":
        return _behind(view, views, groups, view.group)
    if view.activity == "none":  # asynchronous backends return at once; the wait is elsewhere
        return _behind(view, views, groups, None)
    if view.activity == "point_to_point":
        return _absent(view, views)
    return []


def _absent(view: RankView, views: Mapping[int, RankView]) -> list[Edge]:
    """Whom it waits for point to point: partners that are not in the other end of it."""
    met = {r for r in view.sends if r in views and view.rank in views[r].receives}
    met |= {r for r in view.receives if r in views and view.rank in views[r].sends}
    partners = sorted({*view.sends, *view.receives} - met - {view.rank})
    return [
        Edge(waiter=view.rank, late=r, group=None, sequence=0, call=f"{view.activity_name} with rank {r}")
        for r in partners
        if r in views
    ]


def _behind(
    view: RankView, views: Mapping[int, RankView], groups: Mapping[int, Mapping[int, GroupView]], only: int | None
) -> list[Edge]:
    edges = []
    for group in view.groups:
        if only is not None and group.key != only:
            continue
        sequence = view.sequence if only is not None else group.issued
        for rank, seen in groups[group.key].items():
            if rank in group.members and seen.issued < sequence:
                call = next((c.text for c in group.calls if c.sequence == sequence), "a collective")
                edges.append(Edge(waiter=view.rank, late=rank, group=group.key, sequence=sequence, call=call))
        if only is not None:
            unseen = [r for r in group.members if r in views and r not in groups[group.key]]
            call = next((c.text for c in group.calls if c.sequence == sequence), "a collective")
            edges += [Edge(waiter=view.rank, late=r, group=group.key, sequence=sequence, call=call) for r in unseen]
    return edges
