"""Synthetic jobs for the judgement of live steps: times with noise, of 100 ms a step unless something is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from scout_core.timing.pace import JobNote, PaceFinding, PaceJudge, PaceThresholds

Factor = Callable[[int, int], float]


@dataclass(kw_only=True)
class Job:
    """What a run does: factors on the time of (step, rank), noise, and optionally tokens and loader times."""

    ranks: int = 4
    steps: int = 400
    noise: float = 0.01
    factor: Factor = lambda step, rank: 1.0
    extra_ms: Factor = lambda step, rank: 0.0
    tokens: Callable[[random.Random, int, int], float] | None = None
    loader_ms: Factor | None = None
    hiccups: float = 0.0
    correlation: float = 0.0
    seed: int = 0


@dataclass(kw_only=True)
class Told:
    """What a judge said: the findings of each step, and the notes on the job."""

    findings: list[tuple[int, PaceFinding]] = field(default_factory=list)
    notes: list[tuple[int, JobNote]] = field(default_factory=list)

    def of(self, kind: str) -> list[tuple[int, PaceFinding]]:
        return [(step, finding) for step, finding in self.findings if finding.kind == kind]

    @property
    def named(self) -> set[tuple[str, int]]:
        return {(finding.kind, finding.position) for _, finding in self.findings}

    @property
    def excluded(self) -> set[int]:
        return {finding.position for _, finding in self.findings if finding.decision == "exclude_at_next_restart"}


def run(job: Job, thresholds: PaceThresholds | None = None) -> Told:
    """Let a judge of its own watch the whole job."""
    rng, judge, told = random.Random(job.seed), PaceJudge(thresholds), Told()
    drift = [0.0] * job.ranks
    for step in range(job.steps):
        tokens = [job.tokens(rng, step, rank) for rank in range(job.ranks)] if job.tokens else None
        loader = [job.loader_ms(step, rank) for rank in range(job.ranks)] if job.loader_ms else None
        times = []
        for rank in range(job.ranks):
            fresh = rng.gauss(0.0, (1 - job.correlation**2) ** 0.5)
            drift[rank] = job.correlation * drift[rank] + fresh
            work = 100.0 * (tokens[rank] / 1000.0 if tokens else 1.0) * job.factor(step, rank)
            work *= 2.718281828 ** (job.noise * drift[rank]) * (3.0 if rng.random() < job.hiccups else 1.0)
            times.append(work + job.extra_ms(step, rank) + (loader[rank] if loader else 0.0))
        verdict = judge.observe(step, times, tokens=tokens, loader_ms=loader)
        told.findings += [(step, finding) for finding in verdict.findings]
        told.notes += [(step, verdict.note)] if verdict.note else []
    return told
