"""Products in the form that is fastest on a processor: the numbers are those of torch's operators but for rounding.

The ``choose_`` functions are functions of processor, type and shape alone: ``TABLE`` was measured by
``experiments/benchmarks/fast_paths.py``, and nothing is measured at run time. A device that is not in it (a GPU), what
is traced or compiled, and ``fast_paths: plain`` in a config take torch's own operators.

Shape letters: b images, n tokens, h heads, d head dimension; q queries, k keys, v values.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_lightning.errors import UserError

FastPaths = Literal["auto", "plain"]

Products = tuple[tuple[float, float, torch.dtype], ...]
"""Types of attention's batched products, each up to a number of keys and a width of the heads."""


@dataclass(frozen=True)
class Forms:
    """A row of the table.

    Args:
        fused_bias_from: from how many outputs a linear layer adds its bias within the product, with gradients.
        fused_bias_inference_from: the same without gradients.
        summed_bias_gradient: whether such a layer sums the gradient of its bias over rows; if not, it is a product with
            ones.
        bias_after: between which numbers of outputs it adds its bias after the product.
        attention: attention as batched products, with gradients; where none fits, torch's fused attention.
        attention_inference: the same without gradients.
        patches: whether patches are embedded by one product, not by a strided convolution.
    """

    fused_bias_from: float = math.inf
    fused_bias_inference_from: float = math.inf
    summed_bias_gradient: bool = False
    bias_after: tuple[int, int] = (0, -1)
    attention: Products = ()
    attention_inference: Products = ()
    patches: bool = False


TABLE: dict[tuple[str, torch.dtype], Forms] = {
    ("cpu with amx", torch.bfloat16): Forms(
        fused_bias_from=600_000,
        fused_bias_inference_from=600_000,
        attention=((24, math.inf, torch.float32), (math.inf, math.inf, torch.bfloat16)),
        attention_inference=((24, 16, torch.float32),),
        patches=True,
    ),
    ("cpu with amx", torch.float32): Forms(
        bias_after=(30_000, 600_000),
        attention=((24, 16, torch.float32),),
        patches=True,
    ),
    ("cpu", torch.bfloat16): Forms(
        fused_bias_from=600_000,
        fused_bias_inference_from=0,
        summed_bias_gradient=True,
        attention=((24, 16, torch.float32), (math.inf, math.inf, torch.bfloat16)),
        attention_inference=((24, 16, torch.float32), (256, math.inf, torch.bfloat16)),  # they keep all weights at once
        patches=True,
    ),
    ("cpu", torch.float32): Forms(attention=((24, 16, torch.float32),), attention_inference=((24, 16, torch.float32),)),
}
"""By processor and type of the products: measured on an Intel Xeon with AMX and an AMD EPYC with AVX512-BF16."""

_paths: FastPaths = "auto"


def use(paths: FastPaths) -> None:
    """Sets the forms that this process takes from now on: those of the table, or torch's own operators."""
    global _paths
    _paths = paths


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the type in which torch multiplies a tensor here: autocast changes it."""
    device = "cpu" if tensor.is_cpu else tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype is torch.float64:
        return tensor.dtype
    return torch.get_autocast_dtype(device)


@lru_cache
def has_bfloat16_products() -> bool:
    """Returns whether torch has oneDNN, and the processor its bfloat16 products."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@lru_cache
def processor(device: str) -> str:
    """Returns a type of device as ``TABLE`` names it: a CPU with or without AMX, the matrix instructions of Intel."""
    return "cpu with amx" if device == "cpu" and torch.cpu._is_amx_tile_supported() else device


def choose_linear(
    device: str, dtype: torch.dtype, outputs: int, *, inference: bool = False
) -> Literal["fused", "after", "plain"]:
    """Returns how a linear layer with so many outputs, over all tokens, adds its bias.

    fused is within oneDNN's product, after is in place once the product is there; plain, torch's own, writes the bias
    to all rows first.
    """
    forms = _find(device, dtype)
    fused_from = forms.fused_bias_inference_from if inference else forms.fused_bias_from
    if outputs >= fused_from and (dtype is not torch.bfloat16 or has_bfloat16_products()):
        return "fused"
    return "after" if forms.bias_after[0] <= outputs <= forms.bias_after[1] else "plain"


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
    tiled = all(size % side == 0 for size, side in zip(images.shape[2:], patch, strict=True))
    return tiled and _are_open(images) and _find("cpu", product_dtype(images)).patches


def choose_class_token(images: Tensor) -> bool:
    """Returns whether the last block leaves out the tokens that nothing reads: 9 of 12 of its products."""
    return _are_open(images) and (processor("cpu"), product_dtype(images)) in TABLE


def describe(device: str, dtype: torch.dtype) -> dict[str, Any] | None:
    """Returns the row of the table for a device and type as plain data; None where torch's own operators are taken."""
    forms = TABLE.get((processor(device), dtype))
    if forms is None:
        return None
    row = {name: str(value) for name, value in asdict(forms).items()}
    return {"processor": processor(device), "products": str(dtype), "fused_bias": has_bfloat16_products()} | row


def _find(device: str, dtype: torch.dtype) -> Forms:
    return TABLE.get((processor(device), dtype), Forms())


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns ``F.linear`` in the chosen form."""
    if bias is not None and _are_open(inputs) and _fit(inputs, weight, bias):
        dtype, outputs = product_dtype(inputs), inputs.numel() // inputs.shape[-1] * weight.shape[0]
        inference = not torch.is_grad_enabled()
        form = choose_linear("cpu", dtype, outputs, inference=inference)
        if form == "fused":  # a call of a Function takes some time itself
            return (
                _multiply(inputs, weight, bias, dtype)[0] if inference else _Linear.apply(inputs, weight, bias, dtype)
            )
        if form == "after":
            return F.linear(inputs, weight).add_(bias)
    return F.linear(inputs, weight, bias)


def _fit(inputs: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Returns whether shapes and types are those of a linear layer; if not, torch's own operator says so."""
    equal = inputs.dtype == weight.dtype == bias.dtype or torch.is_autocast_enabled("cpu")
    return equal and inputs.shape[-1:] == weight.shape[1:] and bias.shape == weight.shape[:1]


def attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor | None:
    """Returns softmax(scale q k^T) v of (b, h, n, d) in the chosen form; None if that is torch's fused attention."""
    if _are_open(queries):
        dtype, inference = product_dtype(queries), not torch.is_grad_enabled()
        products = choose_attention(queries.device.type, dtype, *keys.shape[2:], inference=inference)
        if products is not None and inference:
            return _attend(queries, keys, values, scale, products)[0]
        if products is not None:
            return _Attention.apply(queries, keys, values, scale, products)  # type: ignore[no-any-return]
    return None


def _are_open(tensor: Tensor) -> bool:
    return tensor.is_cpu and _paths == "auto" and not _is_transformed()


def _is_transformed() -> bool:
    """Returns whether torch compiles or traces what it calls, or transforms it by ``torch.func``."""
    is_traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return is_traced or torch._C._functorch.peek_interpreter_stack() is not None


def _refuse_second_derivatives() -> None:
    """Raises UserError within a backward pass that is to be differentiated.

    ``once_differentiable`` does not: ``torch.autograd.grad`` leaves out the terms behind it without a word.
    """
    if torch.is_grad_enabled():
        raise UserError("fast_paths=auto has no second derivatives (give fast_paths=plain)")


def _multiply(inputs: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the outputs of a linear layer, and its inputs, as rows, and weight as they were multiplied."""
    rows, matrix = inputs.reshape(-1, inputs.shape[-1]).to(dtype), weight.to(dtype)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, matrix, bias.to(dtype).contiguous(), "none", [], "")
    return out.view(*inputs.shape[:-1], len(weight)), rows, matrix


class _Linear(torch.autograd.Function):
    """``F.linear`` with the bias added within oneDNN's product; torch writes it to all rows first, in one more pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        out, rows, matrix = _multiply(inputs, weight, bias, dtype)
        ctx.save_for_backward(rows, matrix)
        ctx.types = inputs.dtype, weight.dtype, bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        rows, matrix = ctx.saved_tensors
        of_rows = of_out.reshape(-1, of_out.shape[-1])
        needed = ctx.needs_input_grad
        of_inputs = (
            torch.mm(of_rows, matrix).view(*of_out.shape[:-1], matrix.shape[1]).to(ctx.types[0]) if needed[0] else None
        )
        of_weight = torch.mm(of_rows.t(), rows).to(ctx.types[1]) if needed[1] else None
        of_bias = _sum_rows(of_rows).to(ctx.types[2]) if needed[2] else None
        return of_inputs, of_weight, of_bias, None


def _sum_rows(rows: Tensor) -> Tensor:
    if _find("cpu", rows.dtype).summed_bias_gradient:
        return rows.sum(dim=0)
    return torch.mm(rows.new_ones(1, len(rows)), rows)[0]


def _attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns the outputs of attention, and queries, keys, values and weights, (b h, n, d) and (b h, n, n)."""
    b, h, n, _ = queries.shape
    with torch.autocast("cpu", enabled=False):
        q, k, v = (_batch(heads, dtype) for heads in (queries, keys, values))
        scores = q.new_empty(b * h, n, k.shape[1]).baddbmm_(q, k.mT, beta=0, alpha=scale)
        weights = scores.softmax(dim=-1)
        out = torch.bmm(weights, v).view(b, h, n, v.shape[2])
    # in memory as (b, n, h, d): the heads are joined without a further copy
    joined = torch.empty(b, n, h, v.shape[2], dtype=product_dtype(values))
    return joined.copy_(out.transpose(1, 2)).transpose(1, 2), q, k, v, weights


class _Attention(torch.autograd.Function):
    """softmax(scale q k^T) v by batched products, which keep the weights for the backward pass."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        out, *kept = _attend(queries, keys, values, scale, dtype)
        ctx.save_for_backward(*kept)
        ctx.scale, ctx.types = scale, (queries.dtype, keys.dtype, values.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        q, k, v, weights = ctx.saved_tensors
        b, h = of_out.shape[:2]
        with torch.autocast("cpu", enabled=False):
            of_rows = _batch(of_out, q.dtype)
            of_v = torch.bmm(weights.mT, of_rows)
            of_weights = torch.bmm(of_rows, v.mT)
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, q.dtype)
            of_q = torch.empty_like(q).baddbmm_(of_scores, k, beta=0, alpha=ctx.scale)
            of_k = torch.empty_like(k).baddbmm_(of_scores.mT, q, beta=0, alpha=ctx.scale)
        of_heads = zip((of_q, of_k, of_v), ctx.types, strict=True)
        return *(of.view(b, h, *of.shape[1:]).to(dtype) for of, dtype in of_heads), None, None


def _batch(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns (b, h, n, d) as (b h, n, d) without gaps in memory, of another type, in one copy."""
    return heads.to(dtype, memory_format=torch.contiguous_format).contiguous().view(-1, *heads.shape[2:])
