"""YAML files and flags to one checked, typed, frozen experiment.

Offers ``resolve``, which returns an ``Experiment`` or reports every problem at once, before data or model are touched.
Imports models, data, storage, training and weights.

jsonargparse is used without LightningCLI: files and flags merge as plain data under strict rules before anything is
typed; size, channels and classes of the data reach the network as arguments that a config may only confirm; and
``model.*`` are the network's own arguments, so that a checkpoint's config rebuilds the network without the trainer.
"""
