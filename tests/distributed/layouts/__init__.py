"""Small jobs that train under each parallel layout, for tests of SCOUT on them."""

from tests.distributed.layouts.catalog import CASES, SMALL
from tests.distributed.layouts.job import Job, LayoutCase

__all__ = ["CASES", "SMALL", "Job", "LayoutCase"]
