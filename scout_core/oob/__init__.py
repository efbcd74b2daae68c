"""The out-of-band path: a progress record in shared memory and an observer process beside each rank.

Nothing is handed on from here: the observer, which is started from this folder, must not load what `attach()` needs.
"""
