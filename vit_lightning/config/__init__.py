"""YAML files and flags to one checked, typed, frozen experiment.

Offers ``resolve``, which returns an ``Experiment`` or reports every problem at once, before data or model are touched.
Imports models, data, storage, training and weights.

The files in the order in which a value passes them:

- ``resolve``: the whole way, from a command line.
- ``files``, ``shipped``, ``foreign``: flags and YAML read strictly, configs of the package by name, and those of
  LightningCLI in our spelling.
- ``merge``: files and flags as one plain mapping, over the config of the checkpoint or source of weights that they
  name, which is read here once.
- ``build``: the experiment of that mapping; each part is read and made once, then checked beside the others.
- ``options``: the options that belong to us, each declared once.
- ``signatures``, ``names``, ``own_files``, ``typed``: a class by its name, also in a file beside the config; its
  options by its signature; plain values as their types.
- ``adapters``: classes of others in the place of ours.
- ``networks``: network and LightningModule. Size, channels and classes of the data reach them as arguments that a
  config may only confirm; ``model.*`` are the network's own, so that the config in a checkpoint
  rebuilds the network without the trainer.
- ``check_values``, ``check_network``: what has the right types, but cannot work.
- ``experiment``: what every command gets.

``help`` reads the same options for ``--help`` from the source, so that nothing heavy is imported; ``presets`` are the
published sizes that ``lightning models`` lists.
"""
