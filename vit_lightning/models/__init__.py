"""The Vision Transformer and its parts, as readable einops blocks: read ``vit.py`` first.

Offers ``ViT``, the blocks it is built from, and CRATE's. Imports torch and einops, and no other room.
"""
