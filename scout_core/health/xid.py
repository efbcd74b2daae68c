"""XID codes: what each one means, and which of a burst is the cause. Data from NVIDIA's catalogue; pure."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib import resources

from scout_core.health.types import HealthAction

MEMORY_XIDS = frozenset({48, 63, 64, 94, 95, 140, 171, 172})
"""Codes that speak of memory contents: state computed since the first of them is suspect."""


class XidClass(str, Enum):
    """`application`: the program's fault, not the device's. `consequence`: follows from something else."""

    FATAL = "fatal"
    WARNING = "warning"
    APPLICATION = "application"
    CONSEQUENCE = "consequence"


@dataclass(frozen=True, kw_only=True, slots=True)
class XidMeaning:
    """One row of the table. `immediate` and `investigatory` are the catalogue's own words; empty: it gives none."""

    code: int
    mnemonic: str
    immediate: str
    investigatory: str
    klass: XidClass
    action: HealthAction
    note: str = ""

    @property
    def memory(self) -> bool:
        return self.code in MEMORY_XIDS


@lru_cache(maxsize=1)
def xid_table() -> dict[int, XidMeaning]:
    """The packaged table by code. Class and action follow the catalogue's immediate action, except where a row's
    `note` says why not."""
    text = resources.files("scout_core.health").joinpath("xid_table.json").read_text(encoding="utf-8")
    return {
        row["code"]: XidMeaning(
            code=row["code"],
            mnemonic=row["mnemonic"],
            immediate=row["immediate"],
            investigatory=row["investigatory"],
            klass=XidClass(row["class"]),
            action=HealthAction(row["action"]),
            note=row.get("note", ""),
        )
        for row in json.loads(text)["rows"]
    }


def xid_meaning(code: int, message: str = "", fatal_xids: Collection[int] | None = None) -> XidMeaning:
    """What `code` means. A code the table lacks is a warning, never an alarm.

    `message` is the kernel's text where known: NVLink 5 codes (144 to 150) carry 'Fatal' in it when the link is
    gone. `fatal_xids`, when given, decides alone which codes are fatal.
    """
    known = xid_table().get(code) or XidMeaning(
        code=code,
        mnemonic="UNKNOWN",
        immediate="",
        investigatory="",
        klass=XidClass.WARNING,
        action=HealthAction.OBSERVE,
        note="not in the catalogue",
    )
    if fatal_xids is not None:
        return _overridden(known, code in fatal_xids)
    if known.immediate == "WORKFLOW_NVLINK5_ERR" and " Fatal " in f" {message} ":
        return _with(known, XidClass.FATAL, HealthAction.EXCLUDE_UNTIL_RESET)
    return known


def _overridden(known: XidMeaning, fatal: bool) -> XidMeaning:
    if fatal and known.klass is not XidClass.FATAL:
        return _with(known, XidClass.FATAL, max(known.action, HealthAction.EXCLUDE_UNTIL_RESET, key=_gravity))
    if not fatal and known.klass is XidClass.FATAL:
        return _with(known, XidClass.WARNING, HealthAction.OBSERVE)
    return known


def _gravity(action: HealthAction) -> int:
    return action.gravity


def _with(meaning: XidMeaning, klass: XidClass, action: HealthAction) -> XidMeaning:
    return XidMeaning(
        code=meaning.code,
        mnemonic=meaning.mnemonic,
        immediate=meaning.immediate,
        investigatory=meaning.investigatory,
        klass=klass,
        action=action,
        note=meaning.note,
    )


def explained_by(meaning: XidMeaning, cause: XidMeaning | None) -> bool:
    """Whether `meaning`, in the same burst as the fatal `cause`, adds nothing to it. A graver one always does."""
    return cause is not None and cause.klass is XidClass.FATAL and meaning.action.gravity <= cause.action.gravity
