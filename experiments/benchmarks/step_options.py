"""Gain of ``compile`` and cost of ``model.activation_checkpointing``: interleaved training steps, and bytes they keep.

python experiments/benchmarks/step_options.py "17 tokens" "Ti/4 at 32 px" --options plain compile
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from measuring import paired_rounds
from torch import Tensor
from torch.nn.functional import cross_entropy

from vit_lightning import OptimizerConfig, ViT, ViTClassifier, accelerate
from vit_lightning.training.compiled import compile_module
from vit_lightning.training.optim import optimizer_and_schedule

SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "17 tokens": (128, {"image_size": 32, "patch_size": 8, "emb_size": 64, "depth": 6, "num_heads": 4}),
    "Ti/4 at 32 px": (64, {"preset": "Ti/4", "image_size": 32}),
    "S/16 at 224 px": (8, {"preset": "S/16", "image_size": 224}),
}
"""Images of a batch, and the network."""

OPTIONS = {
    "plain": {},
    "compile": {},
    "checkpointing": {"activation_checkpointing": True},
    "float32 residual": {"float32_residual": True},
}


class Step:
    """A training step with AdamW under an option; called, it trains once."""

    def __init__(self, shape: str, option: str, dtype: torch.dtype, seed: int = 0) -> None:
        torch.manual_seed(seed)
        count, sizes = SHAPES[shape]
        self.network = ViT(**sizes, **OPTIONS[option], num_classes=10).train()
        accelerate(self.network)
        self.images, self.labels = torch.randn(count, 3, *self.network.image_size), torch.randint(10, (count,))
        if option == "compile":
            compile_module(ViTClassifier(self.network), count, torch.device("cpu"))
        config = OptimizerConfig(lr=1e-4)
        self.optimizer = optimizer_and_schedule(self.network, config, total_steps=10**4, steps_per_epoch=100)[0]
        self.autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)

    def loss(self) -> Tensor:
        with self.autocast:
            return cross_entropy(self.network(self.images).float(), self.labels)

    def __call__(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def saved_bytes(self) -> int:
        """Returns the bytes that autograd keeps between the passes, without the weights, each storage once."""
        own = {weight.untyped_storage().data_ptr() for weight in self.network.parameters()}
        kept: dict[int, int] = {}

        def pack(value: Tensor) -> Tensor:
            storage = value.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            loss = self.loss()
        del loss
        return sum(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=OPTIONS)
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for shape in given.shapes:
        for precision in given.precision:
            steps = {option: Step(shape, option, getattr(torch, precision)) for option in given.options}
            firsts = {}
            for option, step in steps.items():
                began = time.perf_counter()
                step()
                firsts[option] = time.perf_counter() - began
            rounds = paired_rounds(steps, given.rounds, limit_s=given.seconds)
            for option, step in steps.items():
                is_compared = option != "plain" and "plain" in steps
                times = f"{rounds.ratio(option, 'plain')} times as fast as plain" if is_compared else ""
                kept = "" if option == "compile" else f", keeps {step.saved_bytes() / 1e6:,.0f} MB"
                text = f"{1e3 * rounds.median(option):,.1f} ms, first step {firsts[option]:.1f} s{kept}"
                print(
                    f"{shape}, {precision}, {option}: {text}; {times} ({len(rounds.seconds[option])} rounds)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
