"""The commands that take a config, and what they share: ``session.py`` for all, ``run.py`` for a training run.

Offers ``fit``, ``evaluate``, ``predict`` and the others in ``cli.COMMANDS``; each gets an Experiment.
May import data, storage, training, config, weights and figures.
"""
