"""The Vision Transformer, put together from ``patches.py``, ``positions.py``, ``blocks.py`` and ``heads.py``."""

from typing import Literal

from torch import Tensor
from torch.nn import Dropout

from vit_lightning.errors import chosen, refuse
from vit_lightning.models import checks
from vit_lightning.models.attention import Attention, MultiHeadAttention, RotaryAttention
from vit_lightning.models.blocks import EncoderBlock, TransformerEncoder, TransformerEncoderBlock, drop_path_rates
from vit_lightning.models.feed_forward import FeedForwardBlock
from vit_lightning.models.heads import POOLS, ClassificationHead, DistilledHead, Pool
from vit_lightning.models.initialisation import INITIALISATIONS, Initialise, Scheme
from vit_lightning.models.layers import Layer, LayerNorm, NamedSequential
from vit_lightning.models.patches import (
    PROJECTIONS,
    ClassToken,
    DistillationToken,
    PatchDropout,
    PatchEmbedding,
    PatchProjection,
    RegisterTokens,
    keep_patches,
)
from vit_lightning.models.positions import POSITIONS, Positions
from vit_lightning.models.presets import find_preset
from vit_lightning.sizes import pair


class ViT(NamedSequential):
    """Vision Transformer (Dosovitskiy et al. 2021): images (b, c, H, W) -> logits (b, num_classes).

    Args:
        preset: size and patch as in the literature, such as Ti/16, S/16, B/32, L/16, H/14: any of Ti, S, B, L, H with
            any patch size; CRATE-T, CRATE-S, CRATE-B and CRATE-L have the sizes of CRATE, whose parts are given beside
            them. Sizes given beside it replace the preset's; without a preset they replace those of B/16.
        image_size: height and width of the images in pixels, one number for squares.
        patch_size: height and width of a patch in pixels; must divide the image size.
        in_channels: channels of the images.
        num_classes: number of classes; 0 returns the pooled features instead of logits.
        emb_size: embedding dimension, the width of the tokens.
        depth: number of encoder blocks.
        num_heads: number of attention heads.
        class_token: whether a learned token goes before the patches.
        distillation_token: whether a distillation token with a head of its own is added (DeiT). The logits are the mean
            of both heads; in training both are returned.
        register_tokens: number of extra learned tokens, which cls and mean leave out (Darcet et al. 2024).
        pool: cls takes the class token, mean the mean over the patch tokens (never over the class token); or a class:
            AttentionPool, ClassTokenAndMeanPool, MaxPool, MeanAllPool, MeanMaxPool, SequencePool.
        patch_projection: patches to tokens by a strided convolution or by a linear layer, equal for equal weights; or a
            class: ConvTokenizer, for a patch_size of 2 or 4.
        positions: position embeddings: learned for each token, fixed 2-D sine and cosine, or none; or a class:
            LearnedPatchPositions.
        norm: norm of each attention and feed-forward part and after the encoder: LayerNorm, RMSNorm or BatchNorm.
        embedding_norm: norm of the tokens before the encoder; none when not given.
        final_norm: the last norm goes before the pool, after it, or there is none.
        block: encoder block, by the place of its norms: TransformerEncoderBlock before each part (pre-norm),
            PostNormBlock, ResPostNormBlock, SandwichNormBlock, CompactBlock, ParallelBlock, or CrateBlock for CRATE; a
            block of your own takes the arguments of TransformerEncoderBlock.
        attention: attention of each block: MultiHeadAttention, SeparateAttention, DividedAfterSoftmaxAttention,
            RotaryAttention or MSSA.
        feed_forward: feed-forward part of each block: FeedForwardBlock, SwiGLU, PackedSwiGLU or ISTA.
        emb_dropout: dropout probability on the embedded patches.
        head_dropout: dropout probability on the pooled vector.
        patch_dropout: fraction of the patches dropped in training.
        drop_path: probability of dropping a branch (stochastic depth) in the last block.
        drop_path_schedule: whether drop_path grows linearly from 0 in the first block, or is constant as in DeiT III.
        layer_scale: initial value of a learned factor on each branch; none when not given.
        representation_size: width of a layer with tanh before the classifier; none when not given.
        initialisation: first weights as the code of that name draws them; tutorial and torch have torch's defaults, the
            one with normal tokens and positions of standard deviation 1, the other of 0.02. Or a function that draws
            those of the network it is given.
        activation_checkpointing: whether training recomputes each block in the backward pass to save memory; the
            results are the same.
        float32_residual: whether tokens between the blocks, to which each block adds, are float32 with bf16-mixed and
            16-mixed too, as in timm, which costs memory and time; otherwise they have the type of the products.

    Raises:
        UserError: names every size that does not fit.
    """

    patch_embedding: PatchEmbedding
    encoder: TransformerEncoder
    head: ClassificationHead | DistilledHead

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
        pool: Literal["cls", "mean"] | Pool = "cls",
        patch_projection: Literal["conv", "linear"] | PatchProjection = "conv",
        positions: Literal["learned", "sincos2d", "none"] | Positions = "learned",
        norm: Layer = LayerNorm,
        embedding_norm: Layer | None = None,
        final_norm: Literal["before_pool", "after_pool", "none"] = "before_pool",
        block: EncoderBlock = TransformerEncoderBlock,
        attention: Attention = MultiHeadAttention,
        feed_forward: Layer = FeedForwardBlock,
        emb_dropout: float = 0.0,
        head_dropout: float = 0.0,
        patch_dropout: float = 0.0,
        drop_path: float = 0.0,
        drop_path_schedule: Literal["linear", "constant"] = "linear",
        layer_scale: float | None = None,
        representation_size: int | None = None,
        initialisation: Scheme | Initialise = "google",
        activation_checkpointing: bool = False,
        float32_residual: bool = False,
    ) -> None:
        sizes = find_preset("B/16" if preset is None else preset)
        emb_size = sizes.emb_size if emb_size is None else emb_size
        depth = sizes.depth if depth is None else depth
        num_heads = sizes.num_heads if num_heads is None else num_heads
        image_size, patch_size = pair(image_size), pair(sizes.patch_size if patch_size is None else patch_size)
        prefix_tokens = int(class_token) + int(distillation_token) + max(0, register_tokens)
        make_projection = chosen(patch_projection, PROJECTIONS)
        make_positions, make_pool = chosen(positions, POSITIONS), chosen(pool, POOLS)
        given = {**locals()}
        refuse(checks.arguments(given))
        grid = (image_size[0] // patch_size[0], image_size[1] // patch_size[1])
        super().__init__(
            patch_embedding=PatchEmbedding(
                projection=make_projection(in_channels, patch_size, emb_size),
                register_tokens=RegisterTokens(emb_size, register_tokens) if register_tokens else None,
                distillation_token=DistillationToken(emb_size) if distillation_token else None,
                class_token=ClassToken(emb_size) if class_token else None,
                positions=make_positions(grid, emb_size, prefix_tokens),
                dropout=Dropout(emb_dropout),
                patch_dropout=PatchDropout(patch_dropout, prefix_tokens) if patch_dropout > 0.0 else None,
                norm=None if embedding_norm is None else embedding_norm(emb_size),
            ),
            encoder=TransformerEncoder(
                *(
                    block(emb_size, attention(emb_size, num_heads), feed_forward(emb_size), norm, layer_scale, p)
                    for p in drop_path_rates(drop_path, depth, drop_path_schedule)
                )
            ),
            norm=norm(emb_size) if final_norm == "before_pool" else None,
            head=DistilledHead(emb_size=emb_size, num_classes=num_classes, dropout=head_dropout)
            if distillation_token
            else ClassificationHead(
                pool=make_pool(emb_size, num_heads, prefix_tokens),
                emb_size=emb_size,
                num_classes=num_classes,
                norm=norm if final_norm == "after_pool" else None,
                dropout=head_dropout,
                representation_size=representation_size,
            ),
        )
        refuse(checks.parts(self, given))
        self.image_size, self.patch_size, self.in_channels = image_size, patch_size, in_channels
        self.num_classes, self.emb_size, self.depth, self.num_heads = num_classes, emb_size, depth, num_heads
        self.prefix_tokens, self.register_tokens, self.drop_path = prefix_tokens, register_tokens, drop_path
        self.encoder.activation_checkpointing = activation_checkpointing
        self.patch_embedding.float32_residual = float32_residual
        rotary = [module for module in self.modules() if isinstance(module, RotaryAttention)]
        for module in rotary:
            module.set_grid(grid, prefix_tokens, register_tokens)
        if positions != "none" or rotary:
            self.patch_embedding.image_size = image_size
        chosen(initialisation, INITIALISATIONS)(self)

    def forward_features(self, images: Tensor, kept: Tensor | None = None) -> Tensor:
        """Returns the tokens before pooling, (b, p + n, e) with p tokens before the patches, of images (b, c, H, W).

        With numbers of patches that are kept, (b, k), the encoder gets these alone: (b, p + k, e).
        """
        embedded: Tensor = self.patch_embedding(images)
        if kept is not None:
            embedded = keep_patches(embedded, kept, self.prefix_tokens)
        tokens: Tensor = self[1:-1](embedded)
        return tokens

    def no_decay(self) -> set[str]:
        """Returns the names of parameters without weight decay: vectors, learned tokens, positions and the probe."""
        learned = (".class_token.token", ".distillation_token.token", ".register_tokens.token", ".positions.table")
        return {
            name
            for name, weight in self.named_parameters()
            if weight.ndim < 2 or name.endswith((*learned, "head.pool.probe"))
        }

    def layer_index(self, parameter: str) -> int:
        """Returns a parameter's depth: 0 in the embedding, 1 to ``depth`` in the blocks, ``depth + 1`` after them."""
        first, second = parameter.split(".")[:2]
        if first == "encoder":
            return int(second) + 1
        return 0 if first == "patch_embedding" else self.depth + 1
