"""Initial weights of a ViT, by the name of whose code draws them so; chosen in a config by ``model.initialisation``."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from torch import Tensor, nn

from vit_lightning.models.heads import AttentionPool
from vit_lightning.models.patches import ClassToken, LearnedTokens, RegisterTokens
from vit_lightning.models.positions import LearnedPositions

Scheme = Literal[
    "google",
    "big_vision",
    "timm",
    "deit",
    "hugging_face",
    "torchvision",
    "torch_encoder",
    "compact",
    "spt",
    "tutorial",
    "torch",
]
Draw = Callable[[Tensor], object]
"""Draws a tensor in place."""


def keep(tensor: Tensor) -> None:
    """Keeps what a layer drew when it was made: torch's defaults, and zeros for tokens and positions."""


def normal(std: float) -> Draw:
    """Returns a draw; with 0.02 it is timm's and DeiT's truncated normal too, which is cut off at -2 and 2."""
    return partial(nn.init.normal_, std=std)


def truncated_normal(weight: Tensor, std: float) -> None:
    """Draws from a normal distribution that is cut off at two standard deviations, and so narrower by 0.88."""
    nn.init.trunc_normal_(weight, std=std, a=-2.0 * std, b=2.0 * std)


def lecun_normal(weight: Tensor) -> None:
    """Draws truncated normal, corrected so that the standard deviation is 1 / sqrt(fan_in), as JAX does."""
    truncated_normal(weight, math.sqrt(1.0 / weight[0].numel()) / 0.87962566103423978)


def fan_in_normal(weight: Tensor) -> None:
    """Draws normal with the standard deviation 1 / sqrt(fan_in), as torchvision does."""
    nn.init.trunc_normal_(weight, std=math.sqrt(1.0 / weight[0].numel()))


def xavier_of_parts(count: int) -> Draw:
    """Returns a draw of each part of a matrix by itself, such as queries, keys and values."""
    return lambda weight: [nn.init.xavier_uniform_(part) for part in weight.chunk(count)]


def xavier_from_one(probe: Tensor) -> None:
    """Draws a probe (1, 1, e) Xavier uniform as JAX does, for which its fans are 1 and e."""
    bound = math.sqrt(6.0 / (1 + probe.shape[2]))
    nn.init.uniform_(probe, -bound, bound)


class Draws(NamedTuple):
    """Draws of the weight and the bias of a layer; tokens and positions have a weight alone."""

    weight: Draw
    bias: Draw = nn.init.zeros_


_ZEROS, _XAVIER, _SMALL = Draws(nn.init.zeros_), Draws(nn.init.xavier_uniform_), Draws(normal(0.02))
_TORCH = Draws(keep, keep)
_JAX = {
    "patches": Draws(lecun_normal),
    "qkv": Draws(xavier_of_parts(3)),
    "representation": Draws(lecun_normal),
    **{"head": _ZEROS, "class_token": _ZEROS, "token": _SMALL, "positions": _SMALL},
}
SCHEMES: dict[str, dict[str, Draws]] = {
    "google": {**_JAX, "*": _XAVIER},
    "big_vision": {
        **_JAX,
        "kv": Draws(xavier_of_parts(2)),
        **{"query": _XAVIER, "projection": _XAVIER, "probe": Draws(xavier_from_one)},
        "positions": Draws(lambda table: nn.init.normal_(table, std=table.shape[2] ** -0.5)),
        "*": Draws(nn.init.xavier_uniform_, normal(1e-6)),
    },
    "timm": {
        "patches": _TORCH,
        **dict.fromkeys(("class_token", "register_token"), Draws(normal(1e-6))),
        "probe": Draws(lambda probe: truncated_normal(probe, probe.shape[2] ** -0.5)),
        "*": _SMALL,
    },
    "deit": {"patches": _TORCH, "*": _SMALL},
    "hugging_face": {"*": _SMALL},
    "torchvision": {
        **{"patches": Draws(fan_in_normal), "representation": Draws(fan_in_normal)},
        **{"qkv": _XAVIER, "query": _XAVIER, "projection": Draws(keep)},
        **{"head": _ZEROS, "class_token": _ZEROS, "token": _SMALL, "positions": _SMALL},
        "*": Draws(nn.init.xavier_uniform_, normal(1e-6)),
    },
    "torch_encoder": {
        **{"qkv": _XAVIER, "projection": Draws(keep), "head": Draws(nn.init.xavier_uniform_, keep)},
        **{"token": _SMALL, "positions": _SMALL, "*": _TORCH},
    },
    "compact": {
        "patches": Draws(nn.init.kaiming_normal_, keep),
        **{"class_token": _ZEROS, "positions": Draws(normal(0.2)), "*": _SMALL},
    },
    "spt": {
        **{"token": Draws(nn.init.normal_), "positions": Draws(nn.init.normal_)},
        "*": Draws(nn.init.xavier_normal_),
    },
    "tutorial": {"token": Draws(nn.init.normal_), "positions": Draws(nn.init.normal_), "*": _TORCH},
    "torch": {"token": _SMALL, "positions": _SMALL, "*": _TORCH},
}
"""Draws by kind of layer, ``*`` for all others.

- google: google-research/vision_transformer, ``models_vit.py``, but for the biases of MLPs, zero for its 1e-6.
- big_vision: google-research/big_vision, ``models/vit.py``.
- timm: huggingface/pytorch-image-models, ``models/vision_transformer.py`` and ``models/deit.py``.
- deit: facebookresearch/deit, ``models.py``, and timm in its early form.
- hugging_face: huggingface/transformers, ``models/vit``.
- torchvision: pytorch/vision, ``models/vision_transformer.py``.
- torch_encoder: a ViT on ``nn.TransformerEncoder`` with normal tokens and positions and a Xavier uniform head.
- compact: SHI-Labs/Compact-Transformers, ``src/utils/transformers.py`` and ``tokenizer.py``.
- spt: aanna0701/SPT_LSA_ViT, ``models/vit.py``, whose patches go through a linear layer.
- tutorial: the einops tutorial, lucidrains' vit-pytorch, CRATE: torch's defaults, ``randn`` for tokens and positions.
- torch: torch's defaults for layers, normal tokens and positions with 0.02.
"""
_LAYERS = {
    "patches": r"patch_embedding\.projection\..*",
    "qkv": r".*\.qkv",
    "kv": r"head\.pool\.kv",
    "query": r".*\.(query|queries|keys|values)",
    "projection": r".*\.projection",
    "representation": r"head\.representation\..*",
    "head": r"head\.(linear|distillation)",
}
_TOKENS = {ClassToken: "class_token", RegisterTokens: "register_token"}


def _initialise(scheme: dict[str, Draws], network: nn.Module) -> None:
    """Draws all weights; what is no layer of torch or ours keeps its own, but for a bias, which is zero."""
    for name, module in network.named_modules():
        kinds = [kind for kind, pattern in _LAYERS.items() if re.fullmatch(pattern, name)]
        weight: Tensor | None = None
        bias = getattr(module, "bias", None)
        if isinstance(module, LearnedPositions):
            kinds, weight = ["positions"], module.table
        elif isinstance(module, LearnedTokens):
            kinds, weight = [_TOKENS.get(type(module), "token"), "token"], module.token
        elif isinstance(module, AttentionPool) and "probe" in scheme:
            kinds, weight = ["probe"], module.probe
        elif isinstance(module, nn.Linear | nn.Conv2d):
            weight = module.weight
        draws = next(scheme[kind] for kind in (*kinds, "*") if kind in scheme)
        if isinstance(module, LearnedPositions) and module.std is not None:
            draws = Draws(normal(module.std))
        if weight is not None:
            draws.weight(weight)
        if isinstance(bias, nn.Parameter):
            (nn.init.zeros_ if weight is None else draws.bias)(bias)


Initialise = Callable[[nn.Module], object]
"""Draws the weights of a network in place."""

INITIALISATIONS: dict[str, Initialise] = {name: partial(_initialise, scheme) for name, scheme in SCHEMES.items()}
