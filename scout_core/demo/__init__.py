"""A small real training job with faults in it, and what SCOUT says of them: `python -m scout_core.demo`."""
