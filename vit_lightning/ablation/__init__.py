"""Arms x seeds, worked off by any number of processes on one ledger.

Offers ``lightning ablate``: plan, ledger, claims, workers.
Imports data, storage, training, config, commands and report.
"""
