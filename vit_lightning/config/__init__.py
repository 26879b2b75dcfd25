"""YAML files and flags to one checked, typed, frozen experiment.

Offers ``resolve``, which returns an ``Experiment`` or reports every problem at once, before data or model are touched.
Imports models, data, storage, training and weights.

The way of a value: ``resolve`` asks ``merge`` for one plain mapping of files and flags, and ``build`` for the
experiment. ``build`` reads each part once by the signature of its class (``typed``, ``signatures``, ``names``) and
makes it; classes of others stand in the place of ours by ``adapters``. Size, channels and classes of the data reach the
network as arguments that a config may only confirm, and ``model.*`` are the network's own arguments, so that a
checkpoint's config rebuilds the network without the trainer.
"""
