"""What the kernel log says about GPUs: XID lines and 'fallen off the bus', from /dev/kmsg or a log file.

`parse_record` and `KernelLog` are pure; `KernelLogReader` follows a file or device and never blocks.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

_PCI = r"(?P<pci>(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
_XID = re.compile(rf"NVRM: Xid \(PCI:{_PCI}\): (?P<code>\d+)(?:, (?P<text>.*))?")
# Seen in three shapes: one line, one record of several lines, or several records that each start with 'NVRM:'.
_FALLEN = re.compile(r"fallen off the bus", re.IGNORECASE)
_GPU_AT = re.compile(rf"NVRM: (?:The NVIDIA GPU|GPU at PCI:|GPU) ?{_PCI}")
_KMSG = re.compile(r"^\d+,(?P<sequence>\d+),(?P<time_us>\d+),[^;]*;(?P<text>.*)$", re.DOTALL)
_DMESG = re.compile(r"^(?:<\d+>)?\[\s*(?P<time_s>\d+\.\d+)\]\s?(?P<text>.*)$", re.DOTALL)

_MAX_READ_BYTES = 1 << 20
"""Read at most this much of the log in one poll; the rest waits for the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRecord:
    """One log record. `time_s` is the kernel's clock (seconds since boot), None where the line carries none."""

    text: str
    time_s: float | None = None
    sequence: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFinding:
    """An XID (`code`) or, with code None, a GPU that fell off the bus. `pci` is normalized, see `normalize_pci`."""

    pci: str
    code: int | None
    text: str
    time_s: float | None
    sequence: int | None


def normalize_pci(pci: str) -> str:
    """`0000:C3:00.0`, `00000000:c3:00.0` and `0000:c3:00` all become `0000:c3:00.0`: lower case, 4-digit domain."""
    head, _, function = pci.strip().lower().partition(".")
    pieces = head.split(":")
    domain = pieces[0] if len(pieces) == 3 else "0"
    return f"{int(domain, 16):04x}:{pieces[-2]}:{pieces[-1]}.{function or '0'}"


def parse_record(line: str) -> KernelRecord:
    """Split one line of /dev/kmsg, of `dmesg`, or of a syslog file into text, time and sequence."""
    line = line.rstrip("\n").replace("\\x0a", "\n")
    if match := _KMSG.match(line):
        return KernelRecord(text=match["text"], time_s=int(match["time_us"]) / 1e6, sequence=int(match["sequence"]))
    if match := _DMESG.match(line):
        return KernelRecord(text=match["text"], time_s=float(match["time_s"]))
    return KernelRecord(text=line)


class KernelLog:
    """Turns records into findings. Keeps only the last GPU named, for messages spread over several records."""

    _LINES_APART = 4
    """A 'fallen off the bus' belongs to a GPU named at most this many records before it."""

    def __init__(self) -> None:
        self._named: tuple[str, KernelRecord] | None = None
        self._since_named = 0

    def feed(self, record: KernelRecord) -> list[KernelFinding]:
        findings = [
            KernelFinding(
                pci=normalize_pci(match["pci"]),
                code=int(match["code"]),
                text=(match["text"] or "").strip(),
                time_s=record.time_s,
                sequence=record.sequence,
            )
            for match in _XID.finditer(record.text)
        ]
        return findings or self._fallen(record)

    def _fallen(self, record: KernelRecord) -> list[KernelFinding]:
        self._since_named += 1
        if match := _GPU_AT.search(record.text):
            self._named, self._since_named = (normalize_pci(match["pci"]), record), 0
        if not _FALLEN.search(record.text) or self._named is None or self._since_named > self._LINES_APART:
            return []
        pci, first = self._named
        self._named = None
        text = "GPU has fallen off the bus"
        time_s = record.time_s if record.time_s is not None else first.time_s
        return [KernelFinding(pci=pci, code=None, text=text, time_s=time_s, sequence=record.sequence)]


class KernelLogReader:
    """Follows `path` from its present end: what was logged before is not this job's. Never blocks.

    A log file may be truncated or replaced (rotation): reading then goes on at the new file's start. Raises
    `OSError` at construction when the log cannot be opened, with the reason (`/dev/kmsg` usually needs CAP_SYSLOG).
    """

    def __init__(self, path: str | Path = "/dev/kmsg") -> None:
        self.path = Path(path)
        self._log = KernelLog()
        self._rest = b""
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            os.lseek(self._fd, 0, os.SEEK_END)
        self._regular = self.path.is_file()

    def read(self) -> list[KernelFinding]:
        """New findings since the last call. Bounded work: see `_MAX_READ_BYTES`."""
        if self._regular:
            self._follow_rotation()
        findings: list[KernelFinding] = []
        for line in self._lines():
            findings += self._log.feed(parse_record(line))
        return findings

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lines(self) -> list[str]:
        data, taken = self._rest, 0
        while taken < _MAX_READ_BYTES:
            try:
                chunk = os.read(self._fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # /dev/kmsg says this once when the ring overtook us; the next read goes on after the gap
            if not chunk:
                break
            data += chunk
            taken += len(chunk)
        *lines, self._rest = data.split(b"\n")
        self._rest = self._rest[-8192:]
        return [line.decode(errors="replace") for line in lines]

    def _follow_rotation(self) -> None:
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            return
        mine = os.fstat(self._fd)
        if named.st_ino != mine.st_ino or named.st_dev != mine.st_dev:
            if os.lseek(self._fd, 0, os.SEEK_CUR) < mine.st_size:
                return  # read what is left of the old file first
            os.close(self._fd)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        elif mine.st_size < os.lseek(self._fd, 0, os.SEEK_CUR):
            os.lseek(self._fd, 0, os.SEEK_SET)
