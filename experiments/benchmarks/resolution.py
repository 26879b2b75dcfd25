"""Accuracy of a trained ViT on images of other sizes: its positions resized, or drawn anew.

python experiments/benchmarks/resolution.py RUN [--sizes 24 32 40 48] [--tables 1] [--threads 2] [--finetuned RUN]

RUN is the run folder of a ViT with learned positions, whose data are there. Nothing is trained: the test images are
decoded at each size, and the table of positions is resized (bicubic with antialiasing, or bilinear) or drawn anew as
before training. Prints a table and draws it to --figure, ``resolution.png`` beside this file by default.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import nn

from vit_lightning import ViT, ViTClassifier, load, resolve
from vit_lightning.figures.test_report import wilson
from vit_lightning.models.resize import resize

Curves = dict[str, list[tuple[float, float, float]]]
"""Accuracies with their limits at each size, by what became of the positions."""


def accuracy(network: nn.Module, run: Path, size: int) -> tuple[int, int]:
    """Returns the number of test images that are classified correctly, and of all."""
    sizes = f"--data.image_size={size}", f"--model.image_size={size}"
    data = resolve([f"--config={run}/config.yaml", *sizes, "--init_from=null"]).data
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    (found,) = trainer.test(ViTClassifier(network), data, verbose=False)
    images = data.image_count("test")
    return round(found["test/acc"] * images), images


def contenders(run: Path, size: int, tables: int) -> dict[str, list[ViT]]:
    """Returns networks for images of a size, by what became of their positions."""
    found: dict[str, list[ViT]] = {}
    trained = load(run).network.patch_embedding.positions
    for interpolation in ("bicubic", "bilinear"):
        network = load(run, image_size=size).network
        positions = network.patch_embedding.positions
        positions.table.data = resize(
            trained.table, trained.grid, positions.grid, network.prefix_tokens, interpolation
        ).detach()
        found[f"resized, {interpolation}"] = [network]
    found["drawn anew"] = []
    for seed in range(tables):
        torch.manual_seed(seed)
        network = load(run, image_size=size).network
        nn.init.normal_(network.patch_embedding.positions.table, std=0.02)
        found["drawn anew"].append(network)
    return found


def draw(curves: Curves, sizes: list[int], trained: int, finetuned: Path | None, path: Path) -> None:
    """Draws accuracies with their intervals over the size of the images, and the test of a run that was fine-tuned."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, points in curves.items():
        shares, lows, highs = (np.array(part) for part in zip(*points, strict=True))
        errors = 100 * np.array([shares - lows, highs - shares])
        axes.errorbar(sizes, 100 * shares, errors, marker="o", markersize=4, capsize=3, label=name)
    if finetuned is not None:
        found = json.loads((finetuned / "results.json").read_text())
        share, low, high = (found[name] for name in ("test/acc", "test/acc_low", "test/acc_high"))
        size = load(finetuned).network.image_size[0]
        label = f"fine-tuned at {size} pixels"
        errors = [[100 * (share - low)], [100 * (high - share)]]
        axes.errorbar([size], [100 * share], errors, marker="D", capsize=3, linestyle="", color="black", label=label)
    axes.axvline(trained, color="grey", linewidth=1, linestyle=":", label=f"trained at {trained} pixels")
    axes.set(xlabel="side of the test images in pixels", ylabel="test accuracy in %", xticks=sizes, ylim=(0, 100))
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[24, 32, 40, 48])
    parser.add_argument("--tables", type=int, default=1, help="tables that are drawn anew, for each size")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--finetuned", type=Path, help="run that was fine-tuned at another size, for the figure")
    parser.add_argument("--figure", type=Path, default=Path(__file__).with_suffix(".png"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    curves: Curves = {}
    print(
        "| pixels | tokens | positions | correct of the test images | accuracy (95 % interval) |\n|---|---|---|---|---|"
    )
    for size in args.sizes:
        for name, networks in contenders(args.run, size, args.tables).items():
            counted = [accuracy(network, args.run, size) for network in networks]
            correct, images = sum(right for right, _ in counted), counted[0][1]
            low, high = wilson(correct // len(counted), images)
            share = correct / len(counted) / images
            tokens = networks[0].prefix_tokens + (size // networks[0].patch_size[0]) ** 2
            shown = ", ".join(f"{right:,}" for right, _ in counted)
            text = f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
            print(f"| {size} | {tokens} | {name} | {shown} of {images:,} | {text} |", flush=True)
            curves.setdefault(name, []).append((share, low, high))
    draw(curves, args.sizes, load(args.run).network.image_size[0], args.finetuned, args.figure)


if __name__ == "__main__":
    main()
