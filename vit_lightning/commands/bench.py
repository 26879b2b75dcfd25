"""``lightning bench``: speed of a config's training step, alone and in the whole Trainer, and of inference."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from vit_lightning.commands.console import Start, say
from vit_lightning.commands.fit import Run, make_run
from vit_lightning.commands.measuring import (
    BesideTrainer,
    Rounds,
    Step,
    bytes_held,
    calls_of,
    matrix_product,
    median,
    paired_rounds,
    training_step,
)
from vit_lightning.commands.module import compile_chosen
from vit_lightning.commands.session import plain_training, session
from vit_lightning.config.experiment import Experiment
from vit_lightning.errors import UserError
from vit_lightning.limits import at_least, refuse
from vit_lightning.storage.environment import describe_environment
from vit_lightning.storage.folder import write_whole
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.training.fast_paths import left_out_flops
from vit_lightning.training.optim import optimizer_and_schedule
from vit_lightning.training.resources import forward_flops, peak_memory
from vit_lightning.weights import FAMILIES, to_reference

STEP, TRAINER, INFERENCE, PRODUCT = "training step", "whole Trainer", "inference", "matrix product"
WARMUP = 2
"""Steps of each kind that do not count."""
PEERS = {"timm": "timm.models", "torchvision": "torchvision.models"}
"""Module of the class VisionTransformer of each library, by the library's name."""


def bench(experiment: Experiment, *, rounds: int = 100, seconds: float = 30.0, peers: bool = True) -> dict[str, Any]:
    """Measures interleaved: the bare training step, a step of the whole Trainer, other libraries' ViTs of these sizes.

    The Trainer loads its images, logs metrics and writes checkpoints to a folder that is deleted; it neither validates
    nor accumulates gradients, and uses one device. The bare steps repeat its first batch.

    Args:
        rounds: most rounds in which all take a turn.
        seconds: time after which no further round of training begins; inference has a third of it.
        peers: whether timm and torchvision, where installed, are interleaved with a ViT of the same options.

    Raises:
        UserError: the module of the config is no ViTClassifier, or ``fast_dev_run`` is set.
    """
    refuse(at_least(3, rounds=rounds), at_least(0, seconds=seconds))
    if experiment.trainer["fast_dev_run"]:
        raise UserError("trainer.fast_dev_run: nothing can be measured in so few steps (leave it out)")
    settings = experiment.settings
    is_off = (settings.wandb.mode or os.environ.get("WANDB_MODE")) == "disabled"
    wandb = replace(settings.wandb, mode="disabled" if is_off else "offline")
    experiment = replace(experiment, settings=settings._replace(wandb=wandb))
    arguments = experiment.make_trainer_arguments(
        {
            **plain_training(100 * (rounds + WARMUP + 1), logs=True),  # until the measurement stops it
            **{"devices": 1, "num_nodes": 1, "strategy": "auto", "accumulate_grad_batches": 1},
        }
    )
    with session(experiment, "bench") as folder, tempfile.TemporaryDirectory() as place:
        run = make_run(experiment, arguments, Path(place))
        if not isinstance(run.module, ViTClassifier):
            raise UserError(f"module.class_path={type(run.module).__name__} is no ViTClassifier: it has no bare step")
        measured = _Measured(run, peers)

        def is_done(so_far: Rounds) -> bool:
            done = len(so_far.seconds[TRAINER]) - WARMUP
            return done >= rounds or (done >= 3 and time.perf_counter() - measured.began > seconds)

        turns = BesideTrainer(TRAINER, measured.make, is_done)
        others = [callback for callback in run.trainer.callbacks if not isinstance(callback, Start)]  # type: ignore
        run.trainer.callbacks = [turns, *others]  # type: ignore[attr-defined]
        compile_chosen(run.module, experiment, run.trainer)
        try:
            run.mirror.start()
            run.trainer.fit(run.module, datamodule=experiment.data)
        finally:
            run.mirror.finish()
        run.trainer.strategy.checkpoint_io.finish()  # type: ignore[attr-defined]
        about = describe_environment()
        results = {
            **measured.facts,
            "training": measured.rows(turns.rounds.without_first(WARMUP), STEP),
            "inference": measured.rows(measured.infer(rounds, seconds / 3), INFERENCE),
            **{name: about[name] for name in ("processor", "cores", "threads", "gpus", "packages")},
        }
        write_whole(folder / "bench.json", json.dumps(results, indent=2) + "\n")
    say(_table(results))
    say(f"all of it: {folder / 'bench.json'}")
    return results


class _Measured:
    """The bare steps that are measured beside the Trainer, and what is known about them."""

    def __init__(self, run: Run, peers: bool) -> None:
        self._run, self._with_peers = run, peers
        self.began = 0.0
        self.facts: dict[str, Any] = {}
        self._networks: dict[str, nn.Module] = {}

    def make(self, trainer: Trainer, batch: Any) -> dict[str, Step]:
        """Makes the steps from the Trainer's own module and its first batch, and warms them up."""
        run, device, plugin = self._run, trainer.strategy.root_device, trainer.precision_plugin
        module: Any = run.module
        self._context, self._images = plugin.forward_context, batch[0]
        labels = batch[1] if (mixed := getattr(batch, "targets", None)) is None else mixed  # of mixed images

        def step_of(network: nn.Module, loss: Callable[[], Tensor]) -> tuple[Step, Optimizer]:
            chosen = run.experiment.settings.optimizer
            optimizer = optimizer_and_schedule(network, chosen, total_steps=10**6, steps_per_epoch=1)[0]
            value, kind = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            clip = partial(module.clip_gradients, gradient_clip_val=value, gradient_clip_algorithm=kind)
            return training_step(self._in_context(loss), optimizer, clip if value else None), optimizer

        own, optimizer = step_of(module.network, lambda: module.step(batch, "train").loss)
        steps, self._networks = {STEP: own}, {INFERENCE: module.network}
        peers, left_out = _peers(module.network) if self._with_peers else ({}, {})
        for name, peer in peers.items():
            peer = plugin.convert_module(peer.to(device)).train()
            if run.experiment.compile:
                peer.compile()
            loss = partial(_loss_of, module, peer, self._images, labels)
            try:
                steps[name] = step_of(peer, loss)[0]
            except UserError as why:  # as layer decay, which these networks do not have
                left_out[name] = "; ".join(str(why).splitlines())
                continue
            self._networks[name] = peer
        with self._context():
            square = torch.ones(2, 2, device=device)
            dtype = (square @ square).dtype
        self._size = 8192 if device.type == "cuda" else 1024
        self._product = steps[PRODUCT] = matrix_product(self._size, self._size, self._size, dtype, device)
        for step in steps.values():
            for _ in range(WARMUP):
                step()
        optimizer.zero_grad()
        compiled = any(hasattr(part, "_orig_mod") or part._compiled_call_impl for part in module.network.modules())
        peak = None
        if device.type == "cuda" or not compiled:  # else it cannot be counted
            peak = round((bytes_held(module.network, optimizer) + peak_memory(steps[STEP], device)) / 1e6, 1)
        self.facts = {
            "experiment": run.experiment.name,
            "precision": trainer.precision,
            "device": str(device),
            "left_out": left_out,
            "batch": len(self._images),
            "image": list(self._images.shape[1:]),
            "product": f"{self._size} x {self._size}, {str(dtype).removeprefix('torch.')}",
            "peak_memory_mb": peak,
        }
        self.began = time.perf_counter()
        return steps

    def _in_context(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with self._context():
                return call()

        return run

    def infer(self, rounds: int, seconds: float) -> Rounds:
        """Measures a forward pass of each network."""

        def infer_with(network: nn.Module) -> Step:
            if self._run.experiment.compile and self._images.is_cuda and network._compiled_call_impl is None:
                network.compile()  # ours, of which on a GPU the step is compiled, not the network
            return torch.inference_mode()(self._in_context(partial(network.eval(), self._images)))

        steps = {name: infer_with(network) for name, network in self._networks.items()}
        calls, wait = calls_of(self._images.device)
        turns: dict[str, Any] = {"calls": calls, "limit_s": seconds, "synchronize": wait}
        return paired_rounds({**steps, PRODUCT: self._product}, rounds, **turns)

    def rows(self, rounds: Rounds, reference: str) -> dict[str, Any]:
        """Returns rates, ratios to ``reference`` and its share of the ceiling; a backward pass counts as two passes."""
        product, count = 2.0 * self._size**3, len(self._images)
        names = sorted((name for name in rounds.seconds if name != PRODUCT), key=lambda name: name != TRAINER)
        names = [reference, *(name for name in names if name != reference)]
        passes = 3 if reference == STEP else 1
        network = self._networks[INFERENCE].train(passes == 3)  # dropout has all tokens computed
        channels, height, width = self._images.shape[1:]
        flops, share = forward_flops(network, (channels, height, width)), None
        if flops is not None:
            with self._context():
                done = passes * count * (flops - left_out_flops(network, self._images))
            share = median([done / product * ratio for ratio in rounds.ratios(reference, PRODUCT)])
        return {
            "rounds": len(rounds.seconds[reference]),
            "images_per_second": {name: round(count / rounds.median(name), 1) for name in names},
            f"over_{reference.replace(' ', '_')}": {name: rounds.ratio(name, reference) for name in names[1:]},
            "ceiling_gflops": round(product / rounds.median(PRODUCT) / 1e9, 1),
            "share_of_ceiling": share,
        }


def _loss_of(module: ViTClassifier, peer: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return module.training_loss(peer(images).float(), labels)


def _peers(network: Any) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Returns the same network of each library that is installed and has all of its options, and why others are not."""
    peers: dict[str, nn.Module] = {}
    left_out: dict[str, str] = {}
    for name, module in PEERS.items():
        try:
            if not hasattr(network, "prefix_tokens"):
                raise UserError(f"{type(network).__name__} is no ViT of this package")
            _, config = to_reference(network, family=name)
            make = importlib.import_module(module).VisionTransformer
            needed = [key for key, value in inspect.signature(make).parameters.items() if value.default is value.empty]
            defaults = FAMILIES[name].defaults
            peers[name] = make(**{key: defaults[key] for key in needed if key in defaults} | config)
        except (UserError, ImportError, TypeError) as why:  # the last one of an option of another class of the library
            left_out[name] = "; ".join(str(why).splitlines())
    return peers, left_out


def _table(results: dict[str, Any]) -> str:
    shape = " x ".join(map(str, results["image"]))
    lines = [f"batches of {results['batch']} images {shape}, {results['precision']}, {results['device']}"]
    for part, title in (("training", STEP), ("inference", INFERENCE)):
        found = results[part]
        ratios = found[f"over_{title.replace(' ', '_')}"]
        lines += [
            "",
            f"{'':<16}{'images/s':>10}   speed over that of the {title} ({found['rounds']} rounds, 95 % interval)",
        ]
        for name, rate in found["images_per_second"].items():
            lines.append(f"{name:<16}{rate:>10,.1f}   {ratios.get(name, '')}")
        share = "" if found["share_of_ceiling"] is None else f"{100 * found['share_of_ceiling'].median:.0f} % of "
        lines.append(f"{'ceiling':<16}{share}{found['ceiling_gflops']:,.0f} GFLOP/s (product of {results['product']})")
    if results["peak_memory_mb"] is not None:
        lines += ["", f"{'peak memory':<16}{results['peak_memory_mb']:,.0f} MB of a training step"]
    lines += ["", *(f"{name} is left out: {why}" for name, why in results["left_out"].items())]
    return "\n".join(lines).rstrip()
