"""SCOUT's own decisions at the scale of any job: synthetic ranks, real code for everything that decides."""

from scout_core.simulate.campaigns import campaign
from scout_core.simulate.command import report_lines
from scout_core.simulate.faults import SimFault, load_faults
from scout_core.simulate.model import SimModel
from scout_core.simulate.run import Report, simulate
from scout_core.simulate.score import Boundary, Outcome

__all__ = [
    "Boundary",
    "Outcome",
    "Report",
    "SimFault",
    "SimModel",
    "campaign",
    "load_faults",
    "report_lines",
    "simulate",
]
