"""YAML files and flags to one checked, typed, frozen experiment.

Offers ``resolve``, which returns an ``Experiment`` or reports every problem at once, before data or model are touched.
Imports models, data, storage, training and weights.

The files in the order in which a value passes them:

- ``resolve``: the whole way, from a command line to what every command gets, an ``experiment``.
- ``files``: flags and YAML read strictly, also configs of the package by name; ``lightning_cli``: those of LightningCLI
  in our spelling.
- ``from_weights``: what a checkpoint or source of weights says that they name, which is read here once.
- ``merge``: these, files and flags as one plain mapping.
- ``build``: the experiment of that mapping, on one page: a function reads each group, ``images`` the data.
- ``options``: the options that belong to us, each declared once.
- ``signatures``: the options of a class or function, and a ``Part``, which is one with its arguments.
- ``typed``: plain values as the types of options; a class by its ``names``, also in ``own_files`` beside the config;
  ``adapters``: classes of others in the place of ours.
- ``networks``: network and LightningModule. Size, channels and classes of the data reach them as arguments that a
  config may only confirm; ``model.*`` are the network's own, so that the config in a checkpoint rebuilds the network
  without the trainer.
- ``together``: the groups as they have been read, and what they say of each other; ``check_network``: the network tried
  on the meta device with data, settings and weights.
"""
