"""The packaged XID table says what NVIDIA's catalogue says."""

from __future__ import annotations

import pytest

from scout_core.health import HealthAction
from scout_core.health.xid import XidClass, explained_by, xid_meaning, xid_table


def test_the_table_is_whole() -> None:
    table = xid_table()
    assert len(table) == 172
    assert sorted(table) == list(range(1, 173))


def test_classes_follow_the_catalogues_immediate_action_except_where_a_note_says_why() -> None:
    rule = {
        "RESET_GPU": XidClass.FATAL,
        "RESTART_BM": XidClass.FATAL,
        "RESTART_VM": XidClass.FATAL,
        "WORKFLOW_XID_48": XidClass.FATAL,
        "RESTART_APP": XidClass.APPLICATION,
        "WORKFLOW_XID_45": XidClass.CONSEQUENCE,
        "XID_154": XidClass.CONSEQUENCE,
    }
    for row in xid_table().values():
        if not row.note:
            assert row.klass is rule.get(row.immediate, XidClass.WARNING), row
    assert {row.code for row in xid_table().values() if row.note} == {43, 45, 63, 64, 94, 95, 106, 107, 154}


@pytest.mark.parametrize("code", [48, 62, 64, 79, 94, 95, 109, 119, 120, 140])
def test_device_faults_are_fatal(code: int) -> None:
    assert xid_meaning(code).klass is XidClass.FATAL


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 74, 92, 154, 9999])
def test_programs_faults_precursors_and_unknown_codes_are_not(code: int) -> None:
    assert xid_meaning(code).klass is not XidClass.FATAL


def test_nvlink5_codes_are_fatal_when_the_kernel_says_so() -> None:
    assert xid_meaning(149, "NETIR_LINK_EVT Nonfatal XC0 i0 Link 08").klass is XidClass.WARNING
    assert xid_meaning(149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08").klass is XidClass.FATAL


def test_configured_codes_replace_the_tables() -> None:
    assert xid_meaning(79, fatal_xids={31}).klass is XidClass.WARNING
    assert xid_meaning(31, fatal_xids={31}).action is HealthAction.EXCLUDE_UNTIL_RESET
    assert xid_meaning(64, fatal_xids={64}) == xid_meaning(64)


def test_only_a_fatal_cause_that_is_at_least_as_grave_explains_another() -> None:
    assert explained_by(xid_meaning(45), xid_meaning(62))
    assert explained_by(xid_meaning(62), xid_meaning(79))
    assert not explained_by(xid_meaning(95), xid_meaning(94))
    assert not explained_by(xid_meaning(45), xid_meaning(63))
    assert not explained_by(xid_meaning(45), None)
