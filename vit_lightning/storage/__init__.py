"""Files of a run, each complete or absent, and the run in W&B.

Offers the run folder, checkpoint files, ``metrics.jsonl``, ``results.json`` and the W&B logger. Imports no other room.
"""
