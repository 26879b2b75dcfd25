"""The files of a run, each written whole or not at all, and W&B as their mirror.

Offers the run folder, checkpoint files, ``metrics.jsonl``, ``results.json`` and the W&B logger. Imports no other room.
"""
