"""Other people's ViT weights, in and out.

Offers ``from_reference`` and ``to_reference`` for timm, torchvision, Hugging Face, JAX and more.
Imports models and storage.
"""
