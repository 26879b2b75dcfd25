"""``lightning bench``: speed of a config's training step, alone and in the whole Trainer, and of inference."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from vit_lightning.commands.console import Start, say
from vit_lightning.commands.fit import Run, make_run
from vit_lightning.commands.measuring import Rounds, matrix_product, median, paired_rounds, take_turns
from vit_lightning.commands.module import compile_chosen
from vit_lightning.commands.session import session
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.options import BenchOptions
from vit_lightning.errors import UserError
from vit_lightning.storage.environment import describe_environment
from vit_lightning.storage.folder import is_first, write_whole
from vit_lightning.training.classifier import ViTClassifier
from vit_lightning.training.fast_paths import left_out_flops
from vit_lightning.training.optim import optimizer_and_schedule
from vit_lightning.training.resources import forward_flops, keep_freed_memory, peak_memory
from vit_lightning.weights import FAMILIES, to_reference

STEP, TRAINER, INFERENCE, PRODUCT = "training step", "whole Trainer", "inference", "matrix product"
WARMUP = 2
"""Steps of each kind that do not count."""
PEERS = {"timm": "timm.models", "torchvision": "torchvision.models"}
"""Module of the class VisionTransformer of each library, by the library's name."""


def bench(experiment: Experiment) -> dict[str, Any]:
    """Measures interleaved: the bare training step, a step of the whole Trainer, other libraries' ViTs of these sizes.

    The Trainer loads its images, logs metrics and writes checkpoints to a folder that is deleted; it neither validates
    nor accumulates gradients, and uses one device. The bare steps repeat its first batch.

    Raises:
        UserError: the module of the config is no ViTClassifier, or ``fast_dev_run`` is set.
    """
    options, settings = experiment.options, experiment.settings
    assert isinstance(options, BenchOptions)
    if experiment.trainer["fast_dev_run"]:
        raise UserError("trainer.fast_dev_run: nothing can be measured in so few steps (leave it out)")
    is_off = (settings.wandb.mode or os.environ.get("WANDB_MODE")) == "disabled"
    wandb = replace(settings.wandb, mode="disabled" if is_off else "offline")
    experiment = replace(experiment, settings=settings._replace(wandb=wandb))
    arguments = experiment.make_trainer_arguments(_plain_training(options))
    with session(experiment, "bench") as folder, tempfile.TemporaryDirectory() as place:
        run = make_run(experiment, arguments, Path(place))
        if not isinstance(run.module, ViTClassifier):
            raise UserError(f"module.class_path={type(run.module).__name__} is no ViTClassifier: it has no bare step")
        turns = Turns(run, options)
        others = [callback for callback in run.trainer.callbacks if not isinstance(callback, Start)]  # type: ignore
        run.trainer.callbacks = [turns, *others]  # type: ignore[attr-defined]
        if run.trainer.strategy.root_device.type == "cpu":
            keep_freed_memory()
        compile_chosen(run.module, experiment)
        try:
            run.mirror.start()
            run.trainer.fit(run.module, datamodule=experiment.data)
        finally:
            run.mirror.finish()
        about = describe_environment()
        results = {
            **turns.results,
            **{name: about[name] for name in ("processor", "cores", "threads", "gpus", "packages")},
        }
        if is_first():
            write_whole(folder / "bench.json", json.dumps(results, indent=2) + "\n")
    say(_table(results))
    say(f"all of it: {folder / 'bench.json'}")
    return results


def _plain_training(options: BenchOptions) -> dict[str, Any]:
    """Returns arguments of the Trainer for training without validation, until ``Turns`` stops it."""
    return {
        "max_epochs": -1,
        "max_steps": 100 * (options.rounds + WARMUP + 1),
        "max_time": None,
        "min_epochs": None,
        "min_steps": None,
        "devices": 1,
        "num_nodes": 1,
        "strategy": "auto",
        "num_sanity_val_steps": 0,
        "val_check_interval": 1.0,
        "check_val_every_n_epoch": 10**9,
        "accumulate_grad_batches": 1,
        "enable_progress_bar": False,
    }


class Turns(Callback):
    """Callback that lets the alternatives take a turn each between two steps of the Trainer, and times all of them.

    A step of the Trainer is all that happens from the end of these turns to the start of the next ones.
    """

    results: dict[str, Any]

    def __init__(self, run: Run, options: BenchOptions) -> None:
        self._run, self._options = run, options
        self._rounds = Rounds({TRAINER: []})
        self._steps: dict[str, Callable[[], object]] = {}
        self._networks: dict[str, nn.Module] = {}
        self._draw = random.Random(0)
        self._batches, self._left, self._began = 0, 0.0, 0.0
        self._left_out: dict[str, str] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        device = trainer.strategy.root_device
        if not self._steps:
            self._wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else int
            self._calls = 10 if device.type == "cuda" else 1  # which fill the queue of the device
            self._make(trainer, batch)
            self._began = time.perf_counter()
        self._batches += 1
        if self._batches % self._calls:
            return
        trainer.strategy.checkpoint_io.finish()  # type: ignore[attr-defined]  # in the Trainer's time
        self._wait()
        if self._left:
            self._rounds.seconds[TRAINER].append((time.perf_counter() - self._left) / self._calls)
            take_turns(self._steps, self._rounds.seconds, self._draw, calls=self._calls, wait=self._wait)
        enough = len(self._rounds.seconds[TRAINER]) >= self._options.rounds + WARMUP
        trainer.should_stop = enough or self._is_late()
        self._left = time.perf_counter()

    def _is_late(self) -> bool:
        """Whether no further round begins; at least 3 of them count."""
        done = len(self._rounds.seconds[TRAINER]) - WARMUP
        return done >= 3 and time.perf_counter() - self._began > self._options.seconds

    def _make(self, trainer: Trainer, batch: Any) -> None:
        """Makes the alternatives from the Trainer's own module and its first batch."""
        module, device = self._run.module, trainer.strategy.root_device
        assert isinstance(module, ViTClassifier)
        context = trainer.precision_plugin.forward_context
        images, mixed = batch[0], getattr(batch, "targets", None)  # class probabilities of mixed images
        labels = batch[1] if mixed is None else mixed

        def step_of(loss: Callable[[], Tensor], optimizer: Optimizer) -> Callable[[], None]:
            def step() -> None:
                with context():
                    value = loss()
                optimizer.zero_grad()
                value.backward()  # type: ignore[no-untyped-call]
                if trainer.gradient_clip_val:
                    module.clip_gradients(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
                optimizer.step()

            return step

        def optimizer_of(network: nn.Module) -> Optimizer:
            chosen = self._run.experiment.settings.optimizer
            return optimizer_and_schedule(network, chosen, total_steps=10**6, steps_per_epoch=1)[0]

        own = optimizer_of(module.network)
        self._networks["ours"] = module.network
        self._steps[STEP] = step_of(lambda: module.step(batch, "train").loss, own)
        peers, self._left_out = _peers(module.network) if self._options.peers else ({}, {})
        for name, peer in peers.items():
            peer = trainer.precision_plugin.convert_module(peer.to(device)).train()
            if self._run.experiment.compile:
                peer.compile()

            def loss(peer: nn.Module = peer) -> Tensor:
                return module.training_loss(peer(images).float(), labels)

            try:
                self._steps[name] = step_of(loss, optimizer_of(peer))
            except UserError as why:  # as layer decay, which these networks do not have
                self._left_out[name] = "; ".join(str(why).splitlines())
                continue
            self._networks[name] = peer
        with context():
            square = torch.ones(2, 2, device=device)
            dtype = (square @ square).dtype
        self._size = 8192 if device.type == "cuda" else 1024
        self._steps[PRODUCT] = matrix_product(self._size, self._size, self._size, dtype, device)
        for name, step in self._steps.items():
            for _ in range(WARMUP):
                step()
            self._rounds.seconds[name] = []
        own.zero_grad()
        held = [*module.network.parameters(), *(tensor for state in own.state.values() for tensor in state.values())]
        bytes_held = sum(tensor.numel() * tensor.element_size() for tensor in held if isinstance(tensor, Tensor))
        compiled = any(hasattr(part, "_orig_mod") or part._compiled_call_impl for part in module.network.modules())
        countable = device.type == "cuda" or not compiled
        self.results = {
            "experiment": self._run.experiment.name,
            "precision": trainer.precision,
            "device": str(device),
            "left_out": self._left_out,
            "batch": len(images),
            "image": list(images.shape[1:]),
            "product": f"{self._size} x {self._size}, {str(dtype).removeprefix('torch.')}",
            "peak_memory_mb": round((bytes_held + peak_memory(self._steps[STEP], device)) / 1e6, 1)
            if countable
            else None,
        }
        self._inputs = images, context

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.checkpoint_io.finish()  # type: ignore[attr-defined]
        images, context = self._inputs
        seconds = {name: values[WARMUP:] for name, values in self._rounds.seconds.items()}
        self.results["training"] = self._rows(Rounds(seconds), STEP, images, 3)

        def infer_with(network: nn.Module) -> Callable[[], None]:
            network.eval()

            def infer() -> None:
                with torch.inference_mode(), context():
                    network(images)

            return infer

        steps: dict[str, Callable[[], object]] = {name: infer_with(net) for name, net in self._networks.items()}
        steps = {INFERENCE if name == "ours" else name: step for name, step in steps.items()}
        rounds = paired_rounds(
            {**steps, PRODUCT: self._steps[PRODUCT]},
            self._options.rounds,
            calls=self._calls,
            limit_s=self._options.seconds / 3,
            synchronize=self._wait,
        )
        self.results["inference"] = self._rows(rounds, INFERENCE, images, 1)

    def _rows(self, rounds: Rounds, reference: str, images: Tensor, passes: int) -> dict[str, Any]:
        """Returns rates, ratios to ``reference`` and its share of the ceiling; a backward pass counts as two passes."""
        product = 2.0 * self._size**3
        networks = [name for name in rounds.seconds if name != PRODUCT]
        networks = sorted(networks, key=lambda name: (name != reference, name != TRAINER))
        network = self._networks["ours"].train(passes == 3)  # dropout has all tokens computed
        flops = forward_flops(network, (images.shape[1], images.shape[2], images.shape[3]))
        ratios = rounds.ratios(reference, PRODUCT)
        share = None
        if flops is not None:
            with self._inputs[1]():
                left_out = 0 if self._run.experiment.compile else left_out_flops(network, images)
            done = passes * len(images) * (flops - left_out)
            share = median([done / product * ratio for ratio in ratios])
        return {
            "rounds": len(rounds.seconds[reference]),
            "images_per_second": {name: round(len(images) / rounds.median(name), 1) for name in networks},
            f"over_{reference.replace(' ', '_')}": {name: rounds.ratio(name, reference) for name in networks[1:]},
            "ceiling_gflops": round(product / rounds.median(PRODUCT) / 1e9, 1),
            "share_of_ceiling": share,
        }


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
