"""The out-of-band path: a progress record in shared memory and an observer process beside each rank."""

from scout_core.oob.findings import Finding
from scout_core.oob.out_of_band import OutOfBand
from scout_core.oob.records import RankView
from scout_core.oob.supervisor import ObserverLost
from scout_core.oob.verdict import judge

__all__ = ["Finding", "ObserverLost", "OutOfBand", "RankView", "judge"]
