"""SCOUT's own decisions at the scale of any job: synthetic ranks, real code for everything that decides."""
