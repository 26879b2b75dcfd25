"""The commands, and what they share: ``fit.py`` tells a training on one page, ``session.py`` has what all runs need.

Offers ``fit``, ``validate``, ``predict`` and the others of ``cli.COMMANDS``; a config comes as an Experiment.
May import data, storage, training, config, weights, figures and inspect.
"""
