"""Fast paths: ``accelerate`` swaps layers of a finished network for the forms that are fastest on a device.

A swapped layer stays the same object, with its weights, names and hooks; its class becomes a subclass of it, whose
numbers are those of torch's operators but for rounding. The ``choose_`` functions are functions of processor, type and
shape alone: ``TABLE`` was measured by ``experiments/benchmarks/fast_paths.py``, and nothing is measured at run time.
What is exported, and a device that is not in the table, take torch's own operators. What is compiled takes those of
attention, and so does a GPU; both leave out what no head reads, and embed patches by one product.

Shape letters: b images, n tokens, h heads, d head dimension; q queries, k keys, v values.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vit_lightning.models import blocks, layers
from vit_lightning.models.attention import DotProductAttention, MultiHeadAttention, SeparateAttention, attention_weights
from vit_lightning.models.feed_forward import FeedForwardBlock, PackedSwiGLU, SwiGLU
from vit_lightning.models.heads import ClassificationHead, ClassTokenPool
from vit_lightning.models.patches import ConvProjection
from vit_lightning.models.vit import ViT

Products = tuple[tuple[float, float, torch.dtype], ...]
"""Types of attention's batched products, each up to a number of keys and a width of the heads."""

MOST_KEYS = 1_100
"""Most keys of attention as products that keep all weights for the backward pass: with more, these, (b, h, n, n) in
each layer, take more memory than all else that a block of heads of width 64 keeps."""


@dataclass(frozen=True)
class Forms:
    """A row of the table.

    Args:
        attention: attention as batched products, with gradients; where none fits, torch's fused attention.
        attention_inference: the same without gradients.
        patches: whether patches are embedded by one product, not by a strided convolution.
    """

    attention: Products = ()
    attention_inference: Products = ()
    patches: bool = False


TABLE: dict[tuple[str, torch.dtype], Forms] = {
    ("cpu with amx", torch.bfloat16): Forms(
        attention=((24, math.inf, torch.float32), (MOST_KEYS, math.inf, torch.bfloat16)),
        attention_inference=((24, 16, torch.float32),),
        patches=True,
    ),
    ("cpu with amx", torch.float32): Forms(attention=((24, 16, torch.float32),), patches=True),
    ("cpu", torch.bfloat16): Forms(
        attention=((24, 16, torch.float32), (MOST_KEYS, math.inf, torch.bfloat16)),
        attention_inference=((24, 16, torch.float32), (256, math.inf, torch.bfloat16)),  # they keep all weights at once
        patches=True,
    ),
    ("cpu", torch.float32): Forms(attention=((24, 16, torch.float32),), attention_inference=((24, 16, torch.float32),)),
    ("cuda", torch.bfloat16): Forms(patches=True),
    ("cuda", torch.float16): Forms(patches=True),
    ("cuda", torch.float32): Forms(patches=True),
}
"""By processor and type of the products: measured on an Intel Xeon with AMX and an AMD EPYC with AVX512-BF16.

Not measured on a GPU: there a product of patches needs no other layout in memory, and the gradient of its weight is the
same in each run, which that of a convolution by cuDNN is not.
"""

_HAS_AMX = bool(torch.cpu._is_amx_tile_supported())  # read once: compiled code cannot ask for it


def accelerate(network: nn.Module) -> None:
    """Swaps layers of a finished network in place: embeddings of patches, attention, and ViTs.

    Only those of exactly these types are swapped, also in a network of the user's own.
    """
    for module in network.modules():
        if type(module) is ViT and (parts := _parts_for_class_token(module)):
            module.__class__ = FastViT
            cast(FastViT, module).class_token_parts = parts
        elif type(module) is ConvProjection and type(module.conv) is nn.Conv2d:
            module.conv.__class__ = FastPatches
        elif type(module) is DotProductAttention:
            module.__class__ = FastAttention


class FastPatches(nn.Conv2d):
    """``nn.Conv2d`` whose stride is its kernel, in the chosen form: (b, c, H, W) -> (b, e, h, w)."""

    def forward(self, input: Tensor) -> Tensor:
        if not choose_patches(input, self.kernel_size):
            return super().forward(input)
        p1, p2 = self.kernel_size
        patches = rearrange(input, "b c (h p1) (w p2) -> b h w (c p1 p2)", p1=p1, p2=p2)
        return rearrange(F.linear(patches, self.weight.flatten(start_dim=1), self.bias), "b h w e -> b e h w")


class FastAttention(DotProductAttention):
    """``DotProductAttention`` in the chosen form."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if mask is None and dropout == 0.0 and (out := attention(queries, keys, values, self.scale)) is not None:
            return out
        is_kept = torch.is_grad_enabled() and keys.shape[2] <= MOST_KEYS
        if queries.device.type == "cpu" and queries.dtype is torch.bfloat16 and is_kept:
            # torch's fused attention is 5-15 times slower than the plain products in the bfloat16 backward pass on CPU
            weights = F.dropout(attention_weights(queries, keys, scale=self.scale, mask=mask), dropout)
            return torch.einsum("bhqk,bhkd->bhqd", weights, values)
        return super().forward(queries, keys, values, mask)


class FastViT(ViT):
    """``ViT`` whose last block makes the class token alone, as long as nothing reads its other tokens."""

    class_token_parts: tuple[nn.Module, ...]
    """The modules from the last block on, as they were when the network was swapped."""

    def forward(self, images: Tensor) -> Tensor:
        if not self.reads_class_token_alone(images):
            return super().forward(images)  # type: ignore[no-any-return, no-untyped-call]
        tokens: Tensor = self.patch_embedding(images)
        *others, last = self.encoder
        for block in others:
            tokens = self.encoder.call(block, tokens)
        tokens = self.encoder.call(partial(first_token, last), tokens)
        for module in list(self.children())[2:]:
            tokens = module(tokens)
        return tokens

    def reads_class_token_alone(self, images: Tensor) -> bool:
        """Returns whether the last block leaves out the other tokens of such images (b, c, H, W)."""
        return (
            _is_plain(images)
            and (processor(images.device.type), product_dtype(images)) in TABLE
            and tuple(_from_last_block(self)) == self.class_token_parts  # nobody has put in others since
            and all(map(_is_only_called, self.class_token_parts))
            and not nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
        )


def _parts_for_class_token(network: ViT) -> tuple[nn.Module, ...]:
    """Returns the modules from the last block on if the class token is all that the head reads; else none."""
    names = [name for name, _ in network.named_children()]
    if names[:2] != ["patch_embedding", "encoder"] or names[-1] != "head":
        return ()
    _, encoder, *after, head = network.children()
    if type(encoder) is not blocks.TransformerEncoder or type(head) is not ClassificationHead or not len(encoder):
        return ()
    last, pool = encoder[-1], head[0]
    if type(last) is not blocks.TransformerEncoderBlock or type(pool) is not ClassTokenPool:
        return ()
    if list(last._modules) != ["attention", "feed_forward"] or type(last.attention) is not layers.ResidualAdd:
        return ()
    branch: Any = last.attention.fn
    if type(branch) is not blocks.Branch or list(branch._modules)[:2] != ["norm", "attention"]:
        return ()
    attention: Any = branch.attention
    if type(attention) not in (MultiHeadAttention, SeparateAttention):  # whose queries are independent
        return ()
    if type(attention.attend) not in (DotProductAttention, FastAttention):
        return ()
    others = {module for part in (last, *after) for module in part.modules()} - {last, attention, attention.attend}
    return tuple(_from_last_block(network)) if {type(module) for module in others} <= _TOKEN_WISE else ()


_TOKEN_WISE = {
    *(layers.ResidualAdd, blocks.Branch, layers.LayerScale, layers.DropPath, layers.LayerNorm, layers.RMSNorm),
    *(nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.GELU, nn.ReLU, nn.SiLU),
    *(FeedForwardBlock, SwiGLU, PackedSwiGLU, nn.Linear),
}
"""Types of modules that make each token from the same token."""


def _from_last_block(network: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that get or give tokens from the last block on, up to the pool of the head."""
    _, *children = network.children()
    for child in children:
        yield child
        parts = list(child.children())
        if child is children[0]:
            parts = parts[-1:]  # the last block
        elif child is children[-1]:
            parts = parts[:1]  # the pool
        for part in parts:
            yield from part.modules()


def _is_only_called(module: nn.Module) -> bool:
    """Returns whether nothing but the next module reads what a module gives, and its random numbers, if any, stay."""
    kept = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    is_random = module.training and isinstance(module, nn.Dropout) and module.p > 0.0
    is_random |= module.training and isinstance(module, DotProductAttention) and module.dropout > 0.0
    return not (kept or is_random or module._compiled_call_impl is not None or "forward" in vars(module))


def first_token(block: Any, tokens: Tensor) -> Tensor:
    """Returns what a block makes of the first token, (b, n, e) -> (b, 1, e)."""
    norm, attention, *rest = block.attention.fn
    normed = norm(tokens)
    queries, keys, values = attention.heads(normed)
    out: Tensor = attention.join(attention.attend(queries[:, :, :1], keys, values), normed[:, :1])
    for part in rest:
        out = part(out)
    first: Tensor = block.feed_forward(tokens[:, :1] + out)
    return first


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the type in which torch multiplies a tensor here: autocast changes it."""
    device = "cpu" if tensor.is_cpu else tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype is torch.float64:
        return tensor.dtype
    return torch.get_autocast_dtype(device)


def processor(device: str) -> str:
    """Returns a type of device as ``TABLE`` names it: a CPU with or without AMX, the matrix instructions of Intel."""
    return "cpu with amx" if device == "cpu" and _HAS_AMX else device


def choose_attention(
    device: str, dtype: torch.dtype, keys: int, width: int, *, inference: bool = False
) -> torch.dtype | None:
    """Returns the type of attention's batched products for heads of a width; None for torch's fused attention."""
    forms = _find(device, dtype)
    for most_keys, most_width, products in forms.attention_inference if inference else forms.attention:
        if keys <= most_keys and width <= most_width:
            return products
    return None


def choose_patches(images: Tensor, patch: tuple[int, ...]) -> bool:
    """Returns whether a strided convolution of images (b, c, H, W) is computed as one product of their patches."""
    if not (_is_plain(images) and images.ndim == 4 and _find(images.device.type, product_dtype(images)).patches):
        return False
    return all(size % side == 0 for size, side in zip(images.shape[2:], patch, strict=True))


def _find(device: str, dtype: torch.dtype) -> Forms:
    return TABLE.get((processor(device), dtype), Forms())


def attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor | None:
    """Returns softmax(scale q k^T) v of (b, h, n, d) in the chosen form; None if that is torch's fused attention."""
    if _are_open(queries) and queries.ndim == 4:
        dtype, inference = product_dtype(queries), not torch.is_grad_enabled()
        products = choose_attention(queries.device.type, dtype, *keys.shape[2:], inference=inference)
        if products is not None:
            return _attend(queries, keys, values, scale, products)
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether other operators of torch may take a tensor, in a program that is not exported."""
    is_traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    # is_exporting() is true in all that torch 2.10 compiles
    is_exported = torch.compiler._is_exporting_flag or is_traced
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and tensor.device.type in ("cpu", "cuda") and not is_exported


def _are_open(tensor: Tensor) -> bool:
    """Returns whether operators that torch does not compile, trace or transform may take a tensor."""
    return _is_plain(tensor) and type(tensor) is Tensor and tensor.is_cpu and not _is_transformed()


def _is_transformed() -> bool:
    """Returns whether torch compiles or traces what it calls, or transforms it by ``torch.func``."""
    is_traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return is_traced or torch._C._functorch.peek_interpreter_stack() is not None


def _attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns the outputs of attention by products of (b h, n, d), which keep all weights, (b h, n, n)."""
    b, h, n, _ = queries.shape
    with torch.autocast("cpu", enabled=False):
        q, k, v = (_batch(heads, dtype) for heads in (queries, keys, values))
        scores = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=scale)
        out = torch.bmm(scores.softmax(dim=-1), v).view(b, h, n, v.shape[2])
    # in memory as (b, n, h, d): the heads are joined without a further copy
    joined = torch.empty(b, n, h, v.shape[2], dtype=product_dtype(values))
    return joined.copy_(out.transpose(1, 2)).transpose(1, 2)


def _batch(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns (b, h, n, d) as (b h, n, d) without gaps in memory, of another type, in one copy."""
    return heads.to(dtype, memory_format=torch.contiguous_format).contiguous().view(-1, *heads.shape[2:])
