"""Attention and tokens of a forward pass, seen by hooks that are gone afterwards.

Shape letters, here and in the other files: b images, l layers, h heads, q queries, k keys, d head dimension, p tokens
before the patches, n patches, e emb_size.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vit_lightning.errors import UserError
from vit_lightning.models.attention import DotProductAttention, attention_weights
from vit_lightning.models.heads import ClassTokenAndMeanPool, ClassTokenPool, DistilledHead, TokenPool
from vit_lightning.models.patches import ClassToken, DistillationToken, LearnedTokens, RegisterTokens
from vit_lightning.models.vit import ViT

T = TypeVar("T")


class Attention(NamedTuple):
    """Operands and result of a layer's attention."""

    queries: Tensor
    """(b, h, q, d)."""
    keys: Tensor
    """(b, h, k, d)."""
    values: Tensor
    """(b, h, k, d)."""
    out: Tensor
    """(b, h, q, d)."""
    scale: float
    divisor: float = 1.0
    """Divisor of the weights after the softmax."""
    mask: Tensor | None = None

    def weights(self, image: int | slice = slice(None), rows: Tensor | slice = slice(None)) -> Tensor:
        """Returns weights (b, h, q, k) in float32 or float64, of all images or (h, q, k) of one, or of some queries."""
        dtype = torch.promote_types(self.queries.dtype, torch.float32)
        images = slice(image, image + 1) if isinstance(image, int) else image
        queries, keys = (heads[images].to(dtype) for heads in (self.queries, self.keys))
        queries = queries[:, :, rows]
        mask = None if self.mask is None else self.mask.expand(len(self.queries), *self.mask.shape[-3:])[images]
        mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        if mask is None or mask.dtype is torch.bool:
            weights = attention_weights(queries, keys, scale=self.scale, mask=mask) / self.divisor
        else:
            weights = (queries @ keys.mT * self.scale + mask).softmax(dim=-1)
        return weights[0] if isinstance(image, int) else weights


@contextlib.contextmanager
def watch(
    network: nn.Module,
    on_attention: Callable[[Attention], None] | None = None,
    on_block: Callable[[int, Tensor], None] | None = None,
) -> Iterator[None]:
    """Shows each attention and the tokens after each block of the forward passes within, in evaluation mode.

    Compiled parts run as they are written, so that hooks see them, and what is shown is measured without autocast.
    Afterwards the network is as it was.

    Args:
        network: a network whose attention is ``DotProductAttention`` or calls torch's ``scaled_dot_product_attention``.
        on_attention: gets each attention in the order of the layers; last that of an ``AttentionPool``.
        on_block: gets number and tokens (b, p + n, e) of each block of ``find_blocks``.
    """
    device = next(network.parameters()).device.type
    on_attention, on_block = (
        None if show is None else torch.autocast(device, enabled=False)(show) for show in (on_attention, on_block)
    )
    modules = list(network.modules())
    states = [(each, each.training, each._compiled_call_impl) for each in modules]
    states = [state for state in states if any(state[1:])]  # the others are already as they should be
    handles = []
    calls = _Calls(on_attention)
    for module in modules:
        if isinstance(module, DotProductAttention) and on_attention is not None:
            handles += [module.register_forward_pre_hook(calls.enter), module.register_forward_hook(calls.leave)]
    for number, block in enumerate(find_blocks(network) if on_block is not None else ()):
        handles.append(block.register_forward_hook(partial(_show_block, on_block, number)))
    try:
        for module, *_ in states:
            module.training, module._compiled_call_impl = False, None
        with contextlib.nullcontext() if on_attention is None else calls:
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module, training, compiled in states:
            module.training, module._compiled_call_impl = training, compiled


def _show_block(show: Any, number: int, block: nn.Module, given: Any, tokens: Any) -> None:
    show(number, tokens)


class _Calls(TorchFunctionMode):
    """Shows the attention of our layers, by their hooks, and calls of torch's attention in the layers of others."""

    def __init__(self, show: Callable[[Attention], None] | None) -> None:
        super().__init__()
        self.show: Any = show
        self.inside = False

    def enter(self, module: nn.Module, given: Any) -> None:
        self.inside = True

    def leave(self, module: Any, given: tuple[Any, ...], out: Tensor) -> None:
        self.inside = False
        queries, keys, values, *mask = given
        divisor = getattr(module, "divisor", 1.0)
        self.show(Attention(queries, keys, values, out, module.scale, divisor, next(iter(mask), None)))

    def _attend(self, given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Returns what ``F.multi_head_attention_forward`` does for tokens (n, b, e), and shows its inside."""
        projected = F.linear(given["query"], given["in_proj_weight"], given["in_proj_bias"])
        heads = rearrange(projected, "n b (qkv h d) -> qkv b h n d", qkv=3, h=given["num_heads"])
        out = F.scaled_dot_product_attention(*heads)
        queries, keys, values = heads
        found = Attention(queries, keys, values, out, heads.shape[-1] ** -0.5)
        self.show(found)
        joined = F.linear(rearrange(out, "b h n d -> n b (h d)"), given["out_proj_weight"], given["out_proj_bias"])
        if not given.get("need_weights", True):
            return joined, None
        return joined, found.weights().mean(dim=1) if given.get("average_attn_weights", True) else found.weights()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            if _is_plain(given):
                return self._attend(given)
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and not self.inside:
            names = ("query", "key", "value", "attn_mask")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            queries = given["query"]
            scale = given.get("scale") or queries.shape[-1] ** -0.5
            self.show(Attention(queries, given["key"], given["value"], out, scale, mask=given.get("attn_mask")))
        return out


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Returns whether ``F.multi_head_attention_forward`` is called for tokens with themselves, without masks."""
    others = ("bias_k", "bias_v", "key_padding_mask", "attn_mask", "q_proj_weight", "static_k", "static_v")
    is_itself = given["query"] is given["key"] is given["value"] and given["query"].ndim == 3
    return is_itself and not given["add_zero_attn"] and all(given.get(name) is None for name in others)


def find_blocks(network: nn.Module) -> list[nn.Module]:
    """Returns the encoder blocks of a ViT, or of a network of timm."""
    blocks: Any = network.encoder if isinstance(network, ViT) else getattr(network, "blocks", ())
    return list(blocks)


def chosen_of(layers: Sequence[T], blocks: Iterable[int]) -> list[T]:
    """Returns the layers with these numbers, -1 the last; raises UserError if there are none."""
    count = len(layers)
    if not isinstance(blocks, Iterable) or any(number not in range(-count, count) for number in blocks):
        text = f"the network has {count}, 0 the first and -1 the last"
        raise UserError(f"blocks={blocks} must be a list of numbers of blocks: {text}")
    return [layers[number] for number in blocks]


class Grid(NamedTuple):
    """Arrangement of the tokens of an image."""

    prefix: int
    """Number of tokens before the patches."""
    rows: int
    columns: int


def grid_of(network: Any) -> Grid:
    """Returns the arrangement of a network's tokens.

    Raises:
        UserError: it is neither a ViT nor a network of timm with patches.
    """
    if isinstance(network, ViT):
        sides = (size // patch for size, patch in zip(network.image_size, network.patch_size, strict=True))
        return Grid(network.prefix_tokens, *sides)
    size = getattr(getattr(network, "patch_embed", None), "grid_size", None)
    if size is None or not hasattr(network, "num_prefix_tokens"):
        raise UserError(
            f"{type(network).__name__} has no patches that are known, and so no maps: a ViT of ours or of timm has, "
            "and a network with patch_embed.grid_size and num_prefix_tokens, as timm's have"
        )
    return Grid(int(network.num_prefix_tokens), *map(int, size))


def names_before(network: Any) -> list[str]:
    """Returns the names of the tokens before the patches; numbers where they are not known."""
    prefix = grid_of(network).prefix
    if not isinstance(network, ViT):
        kinds = {"cls_token": "class token", "dist_token": "distillation token", "reg_token": "register"}
        found = [(name, getattr(network, key, None)) for key, name in kinds.items()]
        counts = {name: tokens.shape[1] for name, tokens in found if tokens is not None}
    else:
        # each is put before the others, so that the last is first
        of_ours = [part for part in network.patch_embedding if isinstance(part, LearnedTokens)][::-1]
        kinds_of_ours = {ClassToken: "class token", DistillationToken: "distillation token", RegisterTokens: "register"}
        counts = {kinds_of_ours.get(type(part), "token"): part.token.shape[1] for part in of_ours}
    names = [name if count == 1 else f"{name} {n + 1}" for name, count in counts.items() for n in range(count)]
    return names if len(names) == prefix else [f"token {n + 1}" for n in range(prefix)]


def reader(network: Any) -> str:
    """Returns in words what the head reads, as ``readout`` weighs it."""
    share, prefix = readout(network) > 0.0, grid_of(network).prefix
    if not share[prefix:].any():
        return "the class token" if share.sum() == 1 else "the class and the distillation token"
    return "the pooled patches" if not share[:prefix].any() else "the pooled patches and tokens before them"


def without_attention(network: nn.Module) -> UserError:
    """Returns the error for a network none of whose layers has shown attention."""
    return UserError(
        f"{type(network).__name__} shows no attention: no layer is one of ours, nor calls torch's "
        "scaled_dot_product_attention (one of your own that calls it is seen)"
    )


def readout(network: Any) -> Tensor:
    """Returns the share of each token in what the head reads, (p + n,), with sum 1.

    It is 1 for a class token that the head takes, and 1 / n for each patch under another pool, also under those that
    weigh patches; an AttentionPool's weights are the last attention that ``watch`` shows.
    """
    grid, head = grid_of(network), getattr(network, "head", None)
    pool = getattr(head, "pool", None)
    share = torch.zeros(grid.prefix + grid.rows * grid.columns)
    first = grid.prefix
    if isinstance(head, DistilledHead):
        share[:2] = 0.5
        return share
    if isinstance(pool, TokenPool):
        takes_class_token = isinstance(pool, ClassTokenPool)
        first = pool.prefix_tokens
    else:
        takes_class_token = grid.prefix > 0 and getattr(network, "global_pool", "token") in ("token", "")
    if takes_class_token:
        share[0] = 1.0
        return share
    share[first:] = 1.0 / len(share[first:])
    if isinstance(pool, ClassTokenAndMeanPool):
        share *= 0.5
        share[0] = 0.5
    return share
