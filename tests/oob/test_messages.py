"""What observers tell each other fits into one message, however long the texts and rings are."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

from scout_core.oob.mesh import MESSAGE_BYTES
from scout_core.oob.messages import report_message, view_message
from scout_core.oob.records import Call, GroupView, RankView

CHANCE = random.Random(0)


def noise(length: int) -> str:
    """Text that does not compress well."""
    return "".join(
        CHANCE.choice("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(length)
    )


def size(record: dict[str, Any]) -> int:
    return len(zlib.compress(json.dumps(record).encode(), 1))


def group(key: int, calls: int) -> GroupView:
    ring = tuple(
        Call(sequence=i, fingerprint=CHANCE.getrandbits(64), text=noise(200), state="returned", step=i)
        for i in range(calls)
    )
    return GroupView(key=key, members=(0, 1), issued=calls, calls=ring)


def test_small_ones_are_sent_whole() -> None:
    view = RankView(rank=0, groups=(group(1, 3),))
    assert RankView.from_json(view_message(view)) == view
    report = {"kind": "process_stall", "evidence": {"doing": "stopped"}}
    assert report_message(report) == report


def test_large_views_keep_the_newest_calls() -> None:
    view = RankView(rank=3, groups=tuple(group(key, 32) for key in range(12)))
    assert size(view.to_json()) > MESSAGE_BYTES
    sent = view_message(view)
    assert size(sent) < MESSAGE_BYTES
    kept = RankView.from_json(sent)
    assert kept.rank == 3 and kept.groups[0].calls == view.groups[0].calls[-len(kept.groups[0].calls) :]


def test_what_fits_in_no_way_goes_without_rings_and_evidence() -> None:
    view = RankView(rank=1, exception=noise(300_000), groups=tuple(group(key, 32) for key in range(200)))
    assert size(view_message(view)) < MESSAGE_BYTES
    report = {"kind": "sdc", "evidence": {f"text{i}": noise(5000) for i in range(400)} | {"bundle": "runs/bundle"}}
    sent = report_message(report)
    assert size(sent) < MESSAGE_BYTES and sent["evidence"]["bundle"] == "runs/bundle"
