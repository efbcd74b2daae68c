"""Every module can be the first of the package that a program imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, os, pathlib
import pydantic, torch, torch.distributed.tensor  # what is slow to import, once
import scout_core

failed = []
folder = pathlib.Path(scout_core.__file__).parent
for path in sorted(folder.rglob("*.py")):
    name = ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
    if name.endswith("__main__"):
        continue
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:  # of Triton, which CPU builds of torch come without
            os._exit(error.name != "triton")
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
print("failed:", *failed)
"""


@pytest.mark.slow
def test_no_module_needs_another_one_to_be_imported_first() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["failed:"], done.stdout + done.stderr[-3000:]
