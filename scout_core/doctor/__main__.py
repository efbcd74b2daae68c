"""`torchrun ... -m scout_core.doctor`: the doctor without the command-line extra."""

from __future__ import annotations

import argparse
import json
import sys

from scout_core.doctor.command import run_doctor
from scout_core.doctor.job import JobError, launched
from scout_core.doctor.render import fact_lines, finding_lines


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: nothing to repair; 1: something is; 2: the ranks could not be brought together."""
    parser = argparse.ArgumentParser(prog="python -m scout_core.doctor", description=main.__doc__)
    parser.add_argument("--local", action="store_true", help="look at this machine only, also within a job")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="how long to wait for ranks, seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        diagnosis = run_doctor(in_job=launched() and not options.local, timeout_s=options.timeout)
    except JobError as error:
        print(f"scout doctor: {error}", file=sys.stderr)
        return 2
    if diagnosis.speaks:
        if options.json:
            print(json.dumps(diagnosis.to_json(), allow_nan=False))
        else:
            print("\n".join([*fact_lines(diagnosis.facts), "", *finding_lines(diagnosis.findings)]))
    return diagnosis.exit_code


if __name__ == "__main__":
    sys.exit(main())
