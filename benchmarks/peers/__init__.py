"""Other queues on the same server, doing the same nothing: what one gets elsewhere, in each one's best documented settings.

One file per contender. It runs in the contender's own environment together with `program.py` and `stopwatch.py`, which
therefore need nothing but the standard library; `race.py` and what it uses stay outside, in ours.
"""
