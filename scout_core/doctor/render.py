"""Plain text of facts and findings: one fact a line, the same on a terminal and in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from scout_core.doctor.facts import RankFacts
from scout_core.doctor.findings import Finding, count, exit_code, rank_text
from scout_core.health.identity_map import IdentityMap

_MANY = 16


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns, two spaces apart."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]


def fact_lines(facts: Sequence[RankFacts]) -> list[str]:
    """The devices of at most 16 ranks under all their names, then the first rank's backends, threads and versions."""
    if not facts:
        return ["no rank answered"]
    shown = facts[:_MANY]
    lines = IdentityMap(devices=tuple(rank.identity for rank in shown)).lines()
    if len(facts) > len(shown):
        lines.append(f"... and {len(facts) - len(shown)} more ranks")
    first = facts[0]
    lines.append("")
    lines.append(
        f"backends: {', '.join(first.backends) or 'none'}" + (f" (job: {first.backend})" if first.backend else "")
    )
    lines.append(f"CPU: {count(first.threads, 'thread')} a rank, {count(len(first.cores), 'core')}")
    lines.append("versions: " + ", ".join(f"{key} {value}" for key, value in first.versions.items() if value))
    return lines


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Each finding with its fix, and a last line that says whether there is something to repair."""
    lines: list[str] = []
    for finding in findings:
        where = f" [{rank_text(finding.ranks)}]" if finding.ranks else ""
        lines.append(f"{finding.severity:7} {finding.id}{where}: {finding.message}")
        if finding.fix:
            lines.append(f"{'':7} fix: {finding.fix}")
    repair = sum(finding.severity != "info" for finding in findings)
    lines.append(f"{repair} to repair" if exit_code(findings) else "nothing to repair")
    return lines
