"""Other people's ViT weights, in and out.

Offers ``from_reference`` and ``to_reference``, the first also for families that are read alone; a family is a table
and a name in ``FAMILIES`` of ``convert``. Imports models and storage.

All go by one table, the ``options`` of a ViT as plain data; ``tables`` and ``fields`` say how those of another
implementation are named and shaped (``family_*``), and ``convert`` carries tensors across.

The files in the order in which a place becomes a network:

- ``files``: what lies at a place, ``hubs``: or is fetched by name, read as tensors and plain data alone;
  ``unwrap``: the network among these tensors; ``descriptions``: what lies beside them about images and classes.
- ``identify``: the family of the tensors, and its arguments.
- ``sources``: the network with its preprocessing; ``trust``: what the config in a file must not name.
- ``init_from``: the weights that a run starts from; ``adapt``: fitted to its network.
"""

from vit_lightning.weights.convert import FAMILIES, from_reference, to_reference

__all__ = ["FAMILIES", "from_reference", "to_reference"]
