"""Other people's ViT weights, in and out.

Offers ``from_reference`` and ``to_reference``, the first also for families that are read alone; a family is a table
and a name in ``FAMILIES`` of ``convert.py``. Imports models and storage.
"""

from vit_lightning.weights.convert import FAMILIES, from_reference, to_reference

__all__ = ["FAMILIES", "from_reference", "to_reference"]
