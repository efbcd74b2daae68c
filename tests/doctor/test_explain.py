"""From log lines to incidents."""

import json

import pytest

from scout_core.doctor.explain import (
    clearing_lines,
    evidence_lines,
    incident_lines,
    incidents,
    parse_log,
    summary_lines,
)
from scout_core.report import EventLog, SCOUTFaultReport


def report(**changes) -> SCOUTFaultReport:
    base = {
        "incident_id": "a",
        "kind": "sdc",
        "severity": "fatal",
        "status": "Attributed",
        "scope": "rank",
        "ranks": (2,),
        "hosts": ("node7",),
        "devices": ("cuda:2",),
        "surface": "hidden:1/output",
        "step": 40,
        "first_seen_step": 20,
        "basis": "majority",
        "evidence": {
            "peer_ranks": [0, 1, 2, 3],
            "signatures": {"output": ["aa", "aa", "bb", "aa"]},
            "persistence": None,
        },
        "exonerating": {"agreeing_ranks": [0, 1, 3]},
        "recommended_action": "restart_excluding",
        "message": "rank 2: hidden:1/output differs",
    }
    return SCOUTFaultReport.model_validate({**base, **changes})


def test_what_who_evidence_clears_action():
    (incident,) = incidents([report()])
    text = "\n".join(incident_lines(incident))
    assert "fatal sdc, steps 20-40: rank 2: hidden:1/output differs" in text
    assert "rank 2 (node7, cuda:2); Attributed, by a majority of equivalent peers" in text
    assert "output: aa on ranks 0-1, 3; bb on rank 2" in text
    assert "ranks 0-1, 3 agree with one another bit for bit" in text
    assert "restart from a trusted checkpoint without rank 2" in text
    assert "None" not in text and "persistence" not in text


def test_reports_of_one_incident_are_told_once_with_their_span():
    found = incidents([report(step=20), report(step=30), report(incident_id="b", step=50, first_seen_step=50)])
    assert [(i.times, i.first_step, i.last_step) for i in found] == [(2, 20, 30), (1, 50, 50)]
    assert found[0].when == "steps 20-30, 2 reports" and found[1].when == "step 50"


def test_a_slow_rank_is_told_with_what_its_hardware_said():
    slow = {"incident_id": "slow", "kind": "compute_straggler", "severity": "warning", "evidence": {}}
    hot = {
        "incident_id": "hot",
        "kind": "hardware_warning",
        "severity": "warning",
        "evidence": {"cause": "thermal"},
        "message": "GPU-2: the clock is held down (thermal)",
    }
    told = {i.report.incident_id: evidence_lines(i.report) for i in incidents([report(**slow), report(**hot)])}
    assert "hardware cause: thermal" in told["slow"]
    assert "hardware message: GPU-2: the clock is held down (thermal)" in told["slow"]
    (cool, _) = incidents([report(**slow), report(**hot, ranks=(3,))])
    assert cool.report.evidence == {}


def test_gravest_first():
    found = incidents([report(incident_id=s, severity=s) for s in ("info", "warning", "fatal")])
    assert [i.report.severity for i in found] == ["fatal", "warning", "info"]


def test_nobody_blamed_nobody_cleared():
    (incident,) = incidents(
        [report(ranks=(), hosts=(), devices=(), basis="none", exonerating={}, recommended_action="stop")]
    )
    assert incident.who == "no rank is blamed"
    assert clearing_lines(incident.report) == ["nothing: no one is accused, so no one is cleared"]
    assert incident.action.startswith("stop")


def test_evidence_of_times_counts_and_other_things():
    lines = evidence_lines(
        report(
            evidence={
                "peer_ranks": [4, 5],
                "times_ms": {"hidden:0": [1.25, 9.5]},
                "differing_elements": [0, 3],
                "error": "x",
            }
        )
    )
    assert lines == [
        "hidden:0: rank 4 1.25 ms, rank 5 9.5 ms",
        "differing elements: rank 4 0, rank 5 3",
        "error: x",
    ]


def test_evidence_whose_length_does_not_fit_is_shown_as_it_is():
    assert evidence_lines(report(evidence={"peer_ranks": [0, 1], "signatures": {"output": ["aa"]}})) == [
        'output: ["aa"]'
    ]


@pytest.mark.parametrize(
    "line", ['{"type":"SCOUTFaul', "[]", '"text"', "{}", '{"type":"SCOUTFaultReport","kind":"sdc"}', "\x00\xff"]
)
def test_lines_that_are_no_records_are_counted(line):
    records = parse_log([json.dumps({"type": "check", "step": 1}), line, ""])
    assert records.unreadable == (2,)
    assert len(records.checks) == 1
    assert "1 line not understood (line 2)" in summary_lines(records)[-1]


def test_a_written_log_is_read_back(tmp_path):
    log = EventLog(tmp_path)
    log.append({"type": "check", "step": 10, "trustworthy": True})
    log.append({"type": "check", "step": 20, "trustworthy": False})
    log.append(report().model_dump(mode="json"))
    log.append({"type": "RecoveryDecision", "source": "recovery_verified", "step": 10, "reason": None})
    log.append({"type": "novel"})
    log.close()
    records = parse_log(log.path.read_text().splitlines())
    assert records.reports == (report(),) and records.unreadable == ()
    assert summary_lines(records) == [
        "2 checks, the last after step 20; newest trustworthy step 10",
        "recovery decision: source recovery_verified, step 10",
        "other records: 1 novel",
    ]
