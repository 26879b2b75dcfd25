"""The Vision Transformer, put together from ``patches.py``, ``positions.py``, ``blocks.py`` and ``heads.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vit_lightning.errors import UserError
from vit_lightning.models.attention import RotaryAttention
from vit_lightning.models.blocks import (
    Block,
    FeedForwardBlock,
    LayerNorm,
    MultiHeadAttention,
    NamedSequential,
    TransformerEncoder,
    TransformerEncoderBlock,
    share_problems,
)
from vit_lightning.models.heads import ClassificationHead, ClassTokenPool, DistilledHead, MeanPool, Pool, PoolBlock
from vit_lightning.models.patches import (
    ClassToken,
    ConvProjection,
    DistillationToken,
    LearnedTokens,
    LinearProjection,
    PatchDropout,
    PatchEmbedding,
    RegisterTokens,
)
from vit_lightning.models.positions import LearnedPatchPositions, LearnedPositions, Positions, SinCos2dPositions
from vit_lightning.sizes import Size, pair

Attention = Callable[[int, int], nn.Module]
"""Makes an attention block from emb_size and num_heads."""


@dataclass(frozen=True)
class Preset:
    """Sizes of a published model; the number behind the slash of a preset name is the patch size."""

    emb_size: int
    depth: int
    num_heads: int
    source: str


PRESETS = {
    "Ti": Preset(192, 12, 3, "Touvron et al. 2021 (DeiT), table 1"),
    "S": Preset(384, 12, 6, "Touvron et al. 2021 (DeiT), table 1"),
    "B": Preset(768, 12, 12, "Dosovitskiy et al. 2021 (ViT), table 1"),
    "L": Preset(1024, 24, 16, "Dosovitskiy et al. 2021 (ViT), table 1"),
    "H": Preset(1280, 32, 16, "Dosovitskiy et al. 2021 (ViT), table 1"),
}


class ViT(NamedSequential):
    """Vision Transformer (Dosovitskiy et al. 2021): images (b, c, H, W) -> logits (b, num_classes).

    Args:
        preset: size and patch as in the literature, such as Ti/16, S/16, B/32, L/16, H/14: any of Ti, S, B, L, H with
            any patch size. Sizes given beside it replace the preset's; without a preset they replace those of B/16.
        image_size: height and width of the images in pixels, one number for squares.
        patch_size: height and width of a patch in pixels; must divide the image size.
        in_channels: channels of the images.
        num_classes: number of classes; 0 gives the pooled features instead of logits.
        emb_size: width of the tokens.
        depth: number of encoder blocks.
        num_heads: number of attention heads.
        class_token: whether a learned token goes before the patches.
        distillation_token: whether a second one follows it, with a head of its own (DeiT): the logits are the mean of
            both heads, and in training the pair.
        register_tokens: number of tokens between those and the patches that nobody reads.
        pool: cls takes the class token, mean the mean over the patch tokens (never over the class token); or another
            pool of ``heads.py``.
        patch_projection: patches to tokens by a strided convolution or by a linear layer; equal for equal weights.
        positions: learned for each token, fixed 2-D sine and cosine, or none; or another block of ``positions.py``.
        norm: normalisation before each branch and after the encoder.
        embedding_norm: normalisation of the tokens before the encoder; none when not given.
        final_norm: the last normalisation goes before the pool, after it, or there is none.
        attention: attention of each block; others are in ``attention.py`` and ``crate.py``.
        feed_forward: feed-forward part of each block; others are in ``feed_forward.py`` and ``crate.py``.
        emb_dropout: dropout on the embedded patches.
        head_dropout: dropout on the pooled vector.
        patch_dropout: share of the patches that training leaves out.
        drop_path: probability of leaving out a branch in the last block.
        drop_path_schedule: whether that grows linearly from 0 in the first block, or is constant as in DeiT III.
        layer_scale: initial value of a learned factor on each branch; none when not given.
        representation_size: width of a layer with tanh before the classifier; none when not given.
        activation_checkpointing: whether training computes the inside of each block twice and keeps less in memory;
            the numbers are the same.

    Raises:
        UserError: names every size that does not fit.
    """

    patch_embedding: PatchEmbedding
    encoder: TransformerEncoder
    head: ClassificationHead | DistilledHead
    reference: dict[str, Any] | None = None
    """Where the weights came from, as plain data: family, config and layout (``weights.from_reference``)."""

    def __init__(
        self,
        preset: str | None = None,
        *,
        image_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] | None = None,
        in_channels: int = 3,
        num_classes: int = 1000,
        emb_size: int | None = None,
        depth: int | None = None,
        num_heads: int | None = None,
        class_token: bool = True,
        distillation_token: bool = False,
        register_tokens: int = 0,
        pool: Pool | PoolBlock = "cls",
        patch_projection: Literal["conv", "linear"] | Callable[[int, Size, int], nn.Module] = "conv",
        positions: Literal["learned", "sincos2d", "none"] | Positions = "learned",
        norm: Block = LayerNorm,
        embedding_norm: Block | None = None,
        final_norm: FinalNorm = "before_pool",
        attention: Attention = MultiHeadAttention,
        feed_forward: Block = FeedForwardBlock,
        emb_dropout: float = 0.0,
        head_dropout: float = 0.0,
        patch_dropout: float = 0.0,
        drop_path: float = 0.0,
        drop_path_schedule: Literal["linear", "constant"] = "linear",
        layer_scale: float | None = None,
        representation_size: int | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        sizes, preset_patch = preset_sizes("B/16" if preset is None else preset)
        emb_size = sizes.emb_size if emb_size is None else emb_size
        depth = sizes.depth if depth is None else depth
        num_heads = sizes.num_heads if num_heads is None else num_heads
        image_size, patch_size = pair(image_size), pair(preset_patch if patch_size is None else patch_size)
        grid = (image_size[0] // max(1, patch_size[0]), image_size[1] // max(1, patch_size[1]))
        prefix_tokens = int(class_token) + int(distillation_token) + max(0, register_tokens)
        positive = {"in_channels": in_channels, "emb_size": emb_size, "depth": depth, "num_heads": num_heads}
        natural = {"num_classes": num_classes, "register_tokens": register_tokens}
        named: dict[str, tuple[object, Collection[str]]] = {
            "pool": (pool, _POOLS),
            "patch_projection": (patch_projection, _PROJECTIONS),
        }
        problems = [
            *_least_problems(positive, natural, representation_size=representation_size),
            *_patch_problems(image_size, patch_size),
            *share_problems({"emb_dropout": emb_dropout, "patch_dropout": patch_dropout}),
            *share_problems({"drop_path": drop_path, "head_dropout": head_dropout}),
            *_choice_problems(
                {**named, "positions": (positions, _POSITIONS), "final_norm": (final_norm, _FINAL_NORMS)}
            ),
            *_choice_problems({"drop_path_schedule": (drop_path_schedule, ("linear", "constant"))}),
            *(["pool=cls needs class_token=true (or choose pool=mean)"] if pool == "cls" and not class_token else []),
        ]
        if distillation_token:
            needed = {"pool=cls": pool == "cls", "representation_size=null": representation_size is None}
            needed["final_norm other than after_pool"] = final_norm != "after_pool"
            problems += [f"distillation_token=true needs {what}" for what, there in needed.items() if not there]
        make_projection = _PROJECTIONS.get(patch_projection) if isinstance(patch_projection, str) else patch_projection
        make_positions = _POSITIONS.get(positions) if isinstance(positions, str) else positions
        make_pool = _POOLS.get(pool) if isinstance(pool, str) else pool
        problems += _block_problems(
            emb_size, num_heads, attention=attention, feed_forward=feed_forward, positions=make_positions
        )
        if not problems:  # what a pool says depends on all of these
            problems += _said(lambda: make_pool and make_pool(emb_size, num_heads, prefix_tokens), "pool")
        if problems:
            raise UserError(problems)
        assert make_projection is not None
        assert make_pool is not None
        after_pool = norm if final_norm == "after_pool" else None

        super().__init__(
            patch_embedding=PatchEmbedding(
                projection=make_projection(in_channels, patch_size, emb_size),
                class_token=ClassToken(emb_size) if class_token else None,
                distillation_token=DistillationToken(emb_size) if distillation_token else None,
                register_tokens=RegisterTokens(emb_size, register_tokens) if register_tokens else None,
                positions=None if make_positions is None else make_positions(grid, emb_size, prefix_tokens),
                dropout=emb_dropout,
                patch_dropout=PatchDropout(patch_dropout, prefix_tokens) if patch_dropout > 0.0 else None,
                norm=None if embedding_norm is None else embedding_norm(emb_size),
            ),
            encoder=TransformerEncoder(
                *(
                    TransformerEncoderBlock(
                        emb_size,
                        attention=attention(emb_size, num_heads),
                        feed_forward=feed_forward(emb_size),
                        norm=norm,
                        layer_scale=layer_scale,
                        drop_path=rate,
                    )
                    for rate in drop_path_rates(drop_path, depth, drop_path_schedule)
                )
            ),
            norm=norm(emb_size) if final_norm == "before_pool" else None,
            head=DistilledHead(emb_size=emb_size, num_classes=num_classes, dropout=head_dropout)
            if distillation_token
            else ClassificationHead(
                pool=make_pool(emb_size, num_heads, prefix_tokens),
                emb_size=emb_size,
                num_classes=num_classes,
                norm=after_pool,
                dropout=head_dropout,
                representation_size=representation_size,
            ),
        )
        self.image_size, self.patch_size, self.in_channels = image_size, patch_size, in_channels
        self.num_classes, self.emb_size, self.depth, self.num_heads = num_classes, emb_size, depth, num_heads
        self.prefix_tokens, self.drop_path = prefix_tokens, drop_path
        self.encoder.activation_checkpointing = activation_checkpointing
        for module in self.modules():
            if isinstance(module, RotaryAttention):
                if patch_dropout > 0.0:
                    raise UserError("patch_dropout: RotaryAttention takes all patches, each at its place")
                module.place(grid, prefix_tokens)
        self.initialise()

    def forward_features(self, images: Tensor) -> Tensor:
        """Images (b, c, H, W) to the tokens before pooling, (b, p + n, e) with p tokens before the patches."""
        tokens: Tensor = self[:-1](images)
        return tokens

    def initialise(self) -> None:
        """Draw all weights, after Google's ``vision_transformer`` (``models_vit.py``).

        Projection of the patches LeCun normal, queries, keys and values (each by itself) and all other matrices Xavier
        uniform, positions, registers and distillation token normal with deviation 0.02, classifier, class token and
        biases zero. CRATE's dictionaries and the probe of attention pooling keep what their blocks drew.
        """
        fused = {module.qkv for module in self.modules() if hasattr(module, "qkv")}
        for name, module in self.named_modules():
            if module in fused:
                for matrix in module.weight.chunk(3):
                    nn.init.xavier_uniform_(matrix)
            elif isinstance(module, (nn.Linear, nn.Conv2d)):
                _initialise_matrix(name, module)
            elif isinstance(module, (LearnedPositions, LearnedPatchPositions)):
                nn.init.normal_(module.table, std=0.02)
            elif isinstance(module, LearnedTokens) and not isinstance(module, ClassToken):
                nn.init.normal_(module.token, std=0.02)  # alike, registers would stay alike
            if isinstance(getattr(module, "bias", None), nn.Parameter):
                nn.init.zeros_(module.bias)

    def no_decay(self) -> set[str]:
        """Names of the parameters that take no weight decay: vectors, learned tokens, positions and the probe."""
        learned = (".class_token.token", ".distillation_token.token", ".register_tokens.token", ".positions.table")
        return {
            name
            for name, weight in self.named_parameters()
            if weight.ndim < 2 or name.endswith((*learned, "head.pool.probe"))
        }

    def layer_index(self, parameter: str) -> int:
        """Depth of a parameter: 0 in the embedding, 1 to ``depth`` in the blocks, ``depth + 1`` in norm and head."""
        first, second = parameter.split(".")[:2]
        if first == "encoder":
            return int(second) + 1
        return 0 if first == "patch_embedding" else self.depth + 1


FinalNorm = Literal["before_pool", "after_pool", "none"]
_FINAL_NORMS = ("before_pool", "after_pool", "none")
_POOLS: dict[str, PoolBlock] = {
    "cls": lambda emb_size, num_heads, prefix_tokens: ClassTokenPool(),
    "mean": lambda emb_size, num_heads, prefix_tokens: MeanPool(prefix_tokens),
}
_PROJECTIONS: dict[str, Callable[[int, Size, int], nn.Module]] = {"conv": ConvProjection, "linear": LinearProjection}
_POSITIONS: dict[str, Positions | None] = {"learned": LearnedPositions, "sincos2d": SinCos2dPositions, "none": None}


def drop_path_rates(last: float, depth: int, schedule: str = "linear") -> list[float]:
    """Probability of each block to have a branch left out."""
    first = 0.0 if schedule == "linear" else last
    rates: list[float] = torch.linspace(first, last, depth, device="cpu", dtype=torch.float32).tolist()
    return rates


def preset_sizes(name: str) -> tuple[Preset, int]:
    """Sizes and patch size of a preset name such as ``Ti/16``."""
    size, _, patch = name.partition("/")
    if size not in PRESETS or not patch.isdecimal() or int(patch) < 1:
        raise UserError(f"preset={name} is none of {', '.join(PRESETS)} with a patch size behind it, such as Ti/16")
    return PRESETS[size], int(patch)


def _patch_problems(image_size: Size, patch_size: Size) -> list[str]:
    if min(image_size) < 1 or min(patch_size) < 1:
        return [f"image_size={_text(image_size)} and patch_size={_text(patch_size)} must be at least 1"]
    if patch_size[0] > image_size[0] or patch_size[1] > image_size[1]:
        return [f"patch_size={_text(patch_size)} is larger than image_size={_text(image_size)}"]
    if image_size[0] % patch_size[0] or image_size[1] % patch_size[1]:
        choices = [n for n in range(1, min(image_size) + 1) if image_size[0] % n == 0 and image_size[1] % n == 0]
        return [
            f"patch_size={_text(patch_size)} does not divide image_size={_text(image_size)} "
            f"(squares that do: {', '.join(map(str, choices))})"
        ]
    return []


def _least_problems(positive: dict[str, int], natural: dict[str, int], *, representation_size: int | None) -> list[str]:
    if representation_size is not None:
        positive = {**positive, "representation_size": representation_size}
    problems = [f"{name}={value} must be at least 1" for name, value in positive.items() if value < 1]
    return problems + [f"{name}={value} must be at least 0" for name, value in natural.items() if value < 0]


def _choice_problems(named: dict[str, tuple[object, Collection[str]]]) -> list[str]:
    return [
        f"{name}={value} must be one of {', '.join(choices)}"
        for name, (value, choices) in named.items()
        if isinstance(value, str) and value not in choices
    ]


def _block_problems(
    emb_size: int, num_heads: int, *, attention: Attention, feed_forward: Block, positions: Positions | None
) -> list[str]:
    """What blocks say against their arguments, so that it can be told together with all else that is wrong."""
    tries: dict[str, Callable[[], object]] = {}
    if emb_size > 0 and num_heads > 0:
        tries["attention"] = lambda: attention(emb_size, num_heads)
    if emb_size > 0:
        tries["feed_forward"] = lambda: feed_forward(emb_size)
        tries["positions"] = lambda: positions and positions((1, 1), emb_size, 0)
    return [problem for name, make in tries.items() for problem in _said(make, name)]


def _said(make: Callable[[], object], name: str) -> list[str]:
    try:
        with torch.device("meta"):  # takes no memory and draws no random numbers
            make()
    except UserError as error:
        own = ("num_heads", "emb_size", "pool")
        return [text if text.startswith(own) else f"{name}.{text}" for text in error.problems]
    return []


def _text(size: Size) -> str:
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def _initialise_matrix(name: str, module: nn.Linear | nn.Conv2d) -> None:
    if name.startswith("patch_embedding.projection"):
        fan_in = module.weight[0].numel()
        # truncated at two deviations, corrected so that the deviation is 1 / sqrt(fan_in), as JAX's lecun_normal
        std = math.sqrt(1.0 / fan_in) / 0.87962566103423978
        nn.init.trunc_normal_(module.weight, std=std, a=-2.0 * std, b=2.0 * std)
    elif name in ("head.linear", "head.distillation"):
        nn.init.zeros_(module.weight)
    else:
        nn.init.xavier_uniform_(module.weight)
