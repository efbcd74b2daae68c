"""`scout doctor`: what a job's ranks, devices, versions and settings let SCOUT see, and what to change.

`examine(model, optimizer)` is for the user's script, `python -m scout_core.doctor` for a machine or a whole job.
"""

from scout_core.doctor.collect import local_facts
from scout_core.doctor.examine import Examination, examine
from scout_core.doctor.facts import RankFacts
from scout_core.doctor.findings import Finding
from scout_core.doctor.rules import diagnose

__all__ = ["Examination", "Finding", "RankFacts", "diagnose", "examine", "local_facts"]
