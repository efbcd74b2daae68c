"""Fault injection for tests, the demo and drills in users' own jobs.

Every injector acts on the rank that calls it, on live training and on SCOUT's replay alike, and returns a `Fault`
whose `remove()` ends it. `install()` sets up one fault from a line of text.
"""

from scout_core.faults.bits import flip_bit
from scout_core.faults.compute import (
    corrupt_input_gradient,
    corrupt_output,
    corrupt_parameter_gradient,
    nondeterministic_kernel,
    slow_module,
)
from scout_core.faults.fault import Fault
from scout_core.faults.install import install
from scout_core.faults.links import slow_collectives
from scout_core.faults.spec import FaultSpec
from scout_core.faults.state import corrupt_optimizer_state, corrupt_rows, corrupt_weight
from scout_core.faults.update import corrupt_optimizer_update

__all__ = [
    "Fault",
    "FaultSpec",
    "corrupt_input_gradient",
    "corrupt_optimizer_state",
    "corrupt_optimizer_update",
    "corrupt_output",
    "corrupt_parameter_gradient",
    "corrupt_rows",
    "corrupt_weight",
    "flip_bit",
    "install",
    "nondeterministic_kernel",
    "slow_collectives",
    "slow_module",
]
