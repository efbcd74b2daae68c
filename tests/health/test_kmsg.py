"""Kernel log lines in the shapes in which they are seen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scout_core.health.kmsg import KernelLog, KernelLogReader, parse_record


def findings(text: str) -> list[tuple[str, int | None]]:
    log = KernelLog()
    return [(f.pci, f.code) for line in text.splitlines() for f in log.feed(parse_record(line))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6,1,2,-;NVRM: Xid (PCI:0000:c3:00): 79, pid=1, GPU has fallen off the bus.", [("0000:c3:00.0", 79)]),
        ("[ 12.5] NVRM: Xid (PCI:0000:C3:00.0): 13, Graphics Exception", [("0000:c3:00.0", 13)]),
        ("Nov 30 host kernel: NVRM: Xid (PCI:0000:c3:00): 94, pid='<unknown>'", [("0000:c3:00.0", 94)]),
        ("6,1,2,-;NVRM: GPU at PCI:0000:c3:00: GPU-ab\\x0aNVRM: it has fallen off the bus", [("0000:c3:00.0", None)]),
        (
            "NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: 10de:26b5) installed in this system has\n"
            "NVRM: fallen off the bus and is not responding to commands.",
            [("0000:b3:00.0", None)],
        ),
        ("something has fallen off the bus", []),
        ("NVRM: The NVIDIA GPU 0000:b3:00.0\n" + "other\n" * 9 + "a wheel has fallen off the bus", []),
        ("NVRM: loading NVIDIA UNIX Open Kernel Module 570.158.01", []),
        ("usb 1-1: Xid (PCI:0000:c3:00): 79", []),
        ("", []),
    ],
)
def test_lines_become_findings(text: str, expected: list[tuple[str, int | None]]) -> None:
    assert findings(text) == expected


def test_time_and_sequence_are_the_kernels() -> None:
    record = parse_record("6,901,1843308145,-;NVRM: hello")
    assert (record.sequence, record.time_s, record.text) == (901, pytest.approx(1843.308145), "NVRM: hello")
    assert parse_record("[ 7.25] x").time_s == 7.25
    assert parse_record("x").time_s is None


XID = "NVRM: Xid (PCI:0000:10:00): {}, x\n"


def test_a_log_is_followed_from_its_end_through_rotation_and_truncation(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text(XID.format(1))
    reader = KernelLogReader(log)
    assert reader.read() == []
    with log.open("a") as file:
        file.write(XID.format(2)[:10])
        file.flush()
        assert reader.read() == []
        file.write(XID.format(2)[10:])
    assert [f.code for f in reader.read()] == [2]
    with log.open("a") as file:
        file.write(XID.format(3))
    os.replace(log, tmp_path / "kern.log.1")
    log.write_text(XID.format(4))
    assert [f.code for f in reader.read() + reader.read()] == [3, 4]
    log.write_text("")
    assert reader.read() == []
    log.write_text(XID.format(5))
    assert [f.code for f in reader.read()] == [5]
    log.unlink()
    assert reader.read() == []
    reader.close()
    reader.close()


def test_a_pipe_without_news_does_not_block(tmp_path: Path) -> None:
    """Like /dev/kmsg: not a regular file, and nothing to read now although a writer is there."""
    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    writer = os.open(fifo, os.O_RDWR)
    try:
        reader = KernelLogReader(fifo)
        assert reader.read() == []
        os.write(writer, XID.format(7).encode())
        assert [f.code for f in reader.read()] == [7]
        reader.close()
    finally:
        os.close(writer)


def test_a_log_that_may_not_be_read_says_so_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        KernelLogReader(tmp_path / "absent")
