"""The commands, one file each, and the run that they share.

Offers ``fit``, ``evaluate``, ``predict`` and the others that ``lightning COMMAND`` calls.
Imports data, storage, training, config and weights.
"""
