"""Speed of the forms that ``vit_lightning/training/fast_paths.py`` chooses from, interleaved: source of its ``TABLE``.

python experiments/benchmarks/fast_paths.py --seconds 3

Each row is an embedding of patches or attention, forward and backward or without gradients, in the forms that the
table can name, beside torch's own operators; the ratio is the speed over theirs. A form belongs in the table where its
interval is above 1. Weights and tokens are warm in the caches here, so that a step gains less:
``throughput.py`` has the last word.
"""

from __future__ import annotations

import argparse
import copy
import math

import torch
from einops import rearrange
from measuring import paired_rounds
from torch import nn

from vit_lightning import ConvProjection, accelerate
from vit_lightning.models.attention import DotProductAttention
from vit_lightning.storage.environment import describe_environment
from vit_lightning.training import fast_paths
from vit_lightning.training.fast_paths import Forms
from vit_lightning.training.resources import keep_freed_memory

TYPES = (torch.float32, torch.bfloat16)


def compare(
    title: str, dtype: torch.dtype, layer: nn.Module, given: torch.Tensor, rows: dict[str, Forms], seconds: float
) -> None:
    """Prints the ratio of each form to the plain layer; a form is a row of the table."""
    swapped = copy.deepcopy(layer)
    accelerate(swapped)

    def step(row: Forms | None) -> None:
        fast_paths.TABLE[fast_paths.processor("cpu"), dtype] = row or Forms()
        with torch.set_grad_enabled("inference" not in title):
            out = (layer if row is None else swapped)(given)
        if out.requires_grad:
            out.backward(torch.ones_like(out))

    forms = {"plain": None, **rows}
    found = paired_rounds({name: lambda row=row: step(row) for name, row in forms.items()}, 1000, limit_s=seconds)
    print(f"{title:44}", *(f"{name} {found.ratio(name, 'plain')}" for name in rows), sep="  ", flush=True)


class AttendAndJoin(nn.Module):
    """Attention of projected tokens (b, n, qkv, h, d), heads joined: (b, n, h d)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend = DotProductAttention(width**-0.5)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (part.transpose(1, 2) for part in heads.unbind(dim=2))
        return rearrange(self.attend(queries, keys, values), "b h n d -> b n (h d)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    seconds = parser.parse_args().seconds
    keep_freed_memory()
    print(describe_environment())
    for dtype in TYPES:
        name = str(dtype).removeprefix("torch.")
        for batch, image, patch, emb_size in ((128, 16, 4, 64), (64, 32, 4, 192), (8, 224, 16, 384)):
            projection = ConvProjection(3, (patch, patch), emb_size).to(dtype)
            images = torch.randn(batch, 3, image, image, dtype=dtype)
            for kind in ("training", "inference"):
                compare(
                    f"{name} patches, {kind}, {batch} of {image}, patch {patch}, to {emb_size}",
                    dtype,
                    projection,
                    images,
                    {"one product": Forms(patches=True)},
                    seconds,
                )
        for b, h, n, d in (
            *((128, 4, 17, 16), (128, 4, 24, 16), (128, 4, 32, 16)),
            *((64, 3, 17, 64), (64, 3, 24, 64), (64, 3, 32, 64), (64, 3, 65, 64), (8, 6, 197, 64)),
        ):
            heads = torch.randn(b, n, 3, h, d, dtype=dtype).requires_grad_()  # as a projection gives them
            for kind in ("attention", "attention_inference"):
                compare(
                    f"{name} {kind} {b} x {h} heads, {n} tokens of {d}",
                    dtype,
                    AttendAndJoin(d),
                    heads,
                    {
                        str(one).removeprefix("torch."): Forms(**{kind: ((math.inf, math.inf, one),)})
                        for one in dict.fromkeys((dtype, torch.float32))
                    },
                    seconds,
                )


if __name__ == "__main__":
    main()
