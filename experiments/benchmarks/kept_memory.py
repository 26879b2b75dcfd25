"""What a training step on CPU gains from ``keep_freed_memory`` of memory.py.

python experiments/benchmarks/kept_memory.py [--rounds 30] [--steps 3] [--threads 1] [--batch-size 128]

Two processes train the model of experiments/cifar10_cpu.yaml on random images, one with glibc as it is, one with freed
memory kept. Only one of them runs at any moment: in each round both take ``--steps`` steps, in an order drawn anew.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.nn.functional as F

from vit_lightning import ViT
from vit_lightning.training.memory import keep_freed_memory

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
    contenders: dict[bool, Connection] = {}
    for keep in (False, True):
        contenders[keep], end = context.Pipe()
        sizes = (args.batch_size, args.steps, args.threads)
        context.Process(target=train, args=(end, keep, *sizes), daemon=True).start()
        contenders[keep].recv()  # warmed up before the other one begins
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.rounds):
        for keep in random.sample([False, True], 2):
            contenders[keep].send(True)
            seconds[keep].append(contenders[keep].recv())
    for end in contenders.values():
        end.send(False)
    images = args.steps * args.batch_size
    for keep, text in ((False, "as it is"), (True, "kept")):
        rate = images / np.array(seconds[keep])
        low, middle, high = np.quantile(rate, [0.25, 0.5, 0.75])
        print(f"{text:10} {middle:6.0f} images/s (quartiles {low:.0f} to {high:.0f})")
    ratio = np.array(seconds[False]) / np.array(seconds[True])
    low, middle, high = np.quantile(ratio, [0.25, 0.5, 0.75])
    print(f"{'ratio':10} {middle:6.3f} (quartiles {low:.3f} to {high:.3f}), {args.rounds} rounds of {args.steps} steps")


if __name__ == "__main__":
    main()
