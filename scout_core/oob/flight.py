"""The flight record of torch's own collectives: what C++ issued and the rings of the publisher cannot show.

Both recorders are read in a thread of the training process, which works while its main thread is blocked in a
collective, on the device or in a lock, since those give the interpreter lock away. They are on unless
`TORCH_FR_BUFFER_SIZE` (formerly `TORCH_NCCL_TRACE_BUFFER_SIZE`) is 0: torch/csrc/distributed/c10d/FlightRecorder.hpp of
torch 2.13. The file is the recorder's own dump with stacks, which `torchfrtrace --prefix nccl_flight_ FOLDER` reads;
SCOUT never unpickles it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch._C import _distributed_c10d as c10d

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """One of torch's recorders: `entries()` gives a JSON dump without stacks, `dump()` everything."""

    name: str
    entries: Callable[[], bytes | str]
    dump: Callable[[], bytes]


def recorders() -> tuple[Recorder, ...]:
    """Those that this build of torch has: NCCL's in CUDA builds, Gloo's (and other CPU backends') in each."""
    found = []
    for name, suffix in (("nccl", "nccl_trace"), ("gloo", "fr_trace")):  # torch 2.10 to 2.13
        dump = getattr(c10d, f"_dump_{suffix}", None)
        entries = getattr(c10d, f"_dump_{suffix}_json", None)
        if dump is not None and entries is not None:
            found.append(Recorder(name=name, entries=entries, dump=dump))
    return tuple(found)


def recording(environment: Mapping[str, str] | None = None) -> bool:
    """Whether torch keeps a flight record, by its environment variables; the first one set counts."""
    env = os.environ if environment is None else environment
    set_to = next((env[name] for name in _SIZES if name in env), "1")
    return set_to.strip() not in ("", "0") and not set_to.startswith("-")


def write_flight_records(folder: Path, rank: int, found: tuple[Recorder, ...] | None = None) -> tuple[str, ...]:
    """Write this process's records with any entry into `folder`, as `<backend>_flight_<rank>`; the names written.

    Raises `OSError` if the folder cannot be written, `RuntimeError` and `ValueError` if torch cannot dump.
    """
    written = []
    for recorder in recorders() if found is None else found:
        if json.loads(recorder.entries()).get("entries"):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{recorder.name}_flight_{rank}"
            path.write_bytes(recorder.dump())
            written.append(path.name)
    return tuple(written)
