"""Files of a run, each complete or absent, and their mirror on W&B.

Offers the run folder, checkpoint files, ``metrics.jsonl``, ``results.json`` and the W&B logger. Imports no other room.
"""
