"""What a training step on CPU gains from ``keep_freed_memory`` of training/resources.py.

python experiments/benchmarks/kept_memory.py [--rounds 30] [--steps 3] [--threads 1] [--batch-size 128]

Two processes train the model of experiments/cifar10_cpu.yaml on random images, one with glibc as it is, one with freed
memory kept. Only one of them runs at any moment: in each round both take ``--steps`` steps, in an order drawn anew.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from measuring import paired_rounds

from vit_lightning import ViT
from vit_lightning.training.resources import keep_freed_memory

SIZES = {"patch_size": 4, "emb_size": 128, "depth": 6, "num_heads": 4, "class_token": False, "pool": "mean"}


def train(parent: Connection, keep: bool, batch_size: int, steps: int, threads: int) -> None:
    """Seconds of ``steps`` steps, each time it is asked for; the first answer is of the warm-up."""
    torch.set_num_threads(threads)
    if keep:
        assert keep_freed_memory(), "needs glibc"
    model = ViT(image_size=32, num_classes=10, positions="sincos2d", **SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    images, labels = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
    while True:
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        parent.send(time.perf_counter() - began)
        if not parent.recv():
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"rounds": 30, "steps": 3, "threads": 1, "batch-size": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    contenders: dict[str, Connection] = {}
    for name in ("as it is", "kept"):
        contenders[name], end = context.Pipe()
        sizes = (args.batch_size, args.steps, args.threads)
        context.Process(target=train, args=(end, name == "kept", *sizes), daemon=True).start()
        contenders[name].recv()  # warmed up before the other one begins

    def take_steps(end: Connection) -> None:
        end.send(True)
        end.recv()

    result = paired_rounds({name: partial(take_steps, end) for name, end in contenders.items()}, args.rounds)
    for name, end in contenders.items():
        end.send(False)
        print(f"{name:10} {args.steps * args.batch_size / result.median(name):6.0f} images/s")
    print(f"{'ratio':10} {result.ratio('kept', 'as it is')}, {args.rounds} rounds of {args.steps} steps")


if __name__ == "__main__":
    main()
