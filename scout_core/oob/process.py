"""What the operating system says about a training process, its death, and its Python stacks. Linux."""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from scout_core.oob.records import ProcessView, Worker

_INFO_EXIT = 1 << 3
_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
_LIBC = ctypes.CDLL(None, use_errno=True)
_TICK = os.sysconf("SC_CLK_TCK")


class ProcessWatch:
    """One process, looked at through /proc. `look` is cheap; the CPU share is that since the last look but one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)
        self._last = (time.monotonic(), self._cpu_s())
        self._share = 0.0

    def sample(self) -> None:
        """Bring the CPU share up to date, over at least 50 ms."""
        now, used = time.monotonic(), self._cpu_s()
        if now - self._last[0] > 0.05:
            self._share = max((used - self._last[1]) / (now - self._last[0]), 0.0)
            self._last = (now, used)

    def view(self) -> ProcessView:
        """State letter, CPU share, wait channel, and exit code of a process that only waits to be reaped."""
        self.sample()
        state, code = read_state(self.pid)
        if state == "S" and self._share >= 0.5:
            state = "R"  # it was only just asleep, for instance for the interpreter lock
        return ProcessView(
            state=state,
            cpu=round(self._share, 3),
            exit_code=code if state in ("Z", "X") else None,
            wchan=_read(f"/proc/{self.pid}/wchan"),
        )

    def threads(self) -> list[str]:
        """State and wait channel of each thread."""
        found = []
        with suppress(psutil.Error, OSError):
            for thread in self._process.threads():
                task = f"/proc/{self.pid}/task/{thread.id}"
                state = _read(f"{task}/stat").rpartition(")")[2].split()[:1]
                found.append(f"{thread.id} {''.join(state)} {_read(f'{task}/wchan')} cpu {thread.user_time:.2f} s")
        return found

    def _cpu_s(self) -> float:
        fields = _read(f"/proc/{self.pid}/stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK if len(fields) > 12 else 0.0


def read_state(pid: int) -> tuple[str, int | None]:
    """State letter and, once it ended, the exit code (negative: that signal); `gone` when there is no such process."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not fields:
        return "gone", None
    status = int(fields[-1])
    code = -(status & 0x7F) if status & 0x7F else status >> 8
    return fields[0].upper(), code


def parent_of(pid: int) -> int:
    """Process id of the parent; 0 when there is no such process."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def exit_code_of(descriptor: int) -> int | None:
    """Exit code of an ended process by its pidfd, also once it was reaped; None before Linux 6.15.

    PIDFD_GET_INFO of linux/pidfd.h: 64 bytes, the mask first and the wait status last.
    """
    data = bytearray(64)
    data[:8] = _INFO_EXIT.to_bytes(8, "little")
    try:
        fcntl.ioctl(descriptor, _GET_INFO, data)
    except OSError:
        return None
    if not int.from_bytes(data[:8], "little") & _INFO_EXIT:
        return None
    status = int.from_bytes(data[60:], "little", signed=True)
    return -(status & 0x7F) if status & 0x7F else status >> 8


def look_at_workers(pids: Sequence[int]) -> tuple[Worker, ...]:
    """State letters of DataLoader workers."""
    return tuple(Worker(pid=pid, state=read_state(pid)[0]) for pid in pids)


def children_of(pid: int) -> tuple[int, ...]:
    """Process ids of a process's children and theirs, this one left out: writers of checkpoints are among them."""
    with suppress(psutil.Error):
        return tuple(child.pid for child in psutil.Process(pid).children(recursive=True) if child.pid != os.getpid())
    return ()


def ask_for_stack(pid: int, thread: int, number: int, path: Path, timeout_s: float) -> str:
    """The Python stack that this thread writes on this signal, also while the interpreter lock is held."""
    if not number:
        return "none: the process registered no signal for it"
    try:
        before = path.stat().st_size
        interrupt(pid, thread, number)
    except OSError as error:
        return f"none: {error}"
    deadline, last = time.monotonic() + timeout_s, before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        size = path.stat().st_size
        if size > before and size == last:
            break
        last = size
    text = path.read_bytes()[before:].decode(errors="replace").strip()
    return text or f"none: the process does not answer (state {read_state(pid)[0]})"


def interrupt(pid: int, thread: int, number: int) -> None:
    """Send a signal to one thread of a process, by its id in the kernel. Raises `OSError`.

    glibc before 2.30 has no name for the call; the kernel then prefers the main thread, which trains as a rule.
    """
    tgkill = getattr(_LIBC, "tgkill", None)
    if tgkill is None:
        os.kill(pid, number)
    elif tgkill(pid, thread, number) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
