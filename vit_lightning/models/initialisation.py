"""Initial weights of a ViT."""

from __future__ import annotations

import math

from torch import nn

from vit_lightning.models.patches import ClassToken, LearnedTokens
from vit_lightning.models.positions import LearnedPositions


def initialise(network: nn.Module) -> None:
    """Draws all weights as Google's ``vision_transformer`` does (``models_vit.py``).

    Patch projection LeCun normal; queries, keys and values (each by itself) and all other matrices Xavier uniform;
    positions, registers and distillation token normal with standard deviation 0.02; classifier, class token and biases
    zero. CRATE's dictionaries and the probe of attention pooling keep what their blocks drew.
    """
    for name, module in network.named_modules():
        if name.endswith(".qkv"):
            for matrix in module.weight.chunk(3):
                nn.init.xavier_uniform_(matrix)
        elif isinstance(module, (nn.Linear, nn.Conv2d)):
            _initialise_matrix(name, module)
        elif isinstance(module, LearnedPositions):
            nn.init.normal_(module.table, std=0.02)
        elif isinstance(module, LearnedTokens) and not isinstance(module, ClassToken):
            nn.init.normal_(module.token, std=0.02)  # registers that start equal would stay equal
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            nn.init.zeros_(module.bias)


def _initialise_matrix(name: str, module: nn.Linear | nn.Conv2d) -> None:
    if name.startswith("patch_embedding.projection"):
        fan_in = module.weight[0].numel()
        # truncated at two standard deviations, corrected so that it has 1 / sqrt(fan_in), as JAX's lecun_normal
        std = math.sqrt(1.0 / fan_in) / 0.87962566103423978
        nn.init.trunc_normal_(module.weight, std=std, a=-2.0 * std, b=2.0 * std)
    elif name in ("head.linear", "head.distillation"):
        nn.init.zeros_(module.weight)
    else:
        nn.init.xavier_uniform_(module.weight)
