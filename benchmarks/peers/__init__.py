"""Other queues on the same server, doing the same nothing: what one gets elsewhere, in each one's best documented settings.

One file per contender. What it has in common with the others is `program.py` (inside its process) and `race.py` (outside);
nothing here may import more than the standard library, because it also runs in the contenders' own environments.
"""
