"""The LightningModule of an experiment: made, given the weights with which it starts, compiled."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from vit_lightning.classes import differences
from vit_lightning.commands.console import row, say
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import flatten, value_at
from vit_lightning.config.images import has_images_of
from vit_lightning.config.networks import data_facts, module_from
from vit_lightning.config.together import beside_replays, compiler_problems
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError, refuse
from vit_lightning.storage.checkpoint_files import find_checkpoint, load_network, read_checkpoint
from vit_lightning.storage.folder import is_first, write_whole
from vit_lightning.training.classifier import ViTClassifier, classify
from vit_lightning.training.compiled import REPLAYS, compile_module
from vit_lightning.training.fast_paths import accelerate
from vit_lightning.training.fine_tuning import with_own_head
from vit_lightning.training.lightning_detours import predict_with, send_no_tables
from vit_lightning.training.losses import Distillation
from vit_lightning.training.resources import AUTO


def make_module(experiment: Experiment) -> LightningModule:
    """Returns the LightningModule of an experiment, with new random weights and the fast paths of its layers."""
    settings, data = experiment.settings, experiment.data
    chosen = settings.distillation
    available = {
        **data_facts(data),
        "network": experiment.make_network() if experiment.network is not None else None,
        "optimizer": settings.optimizer,
        "loss": settings.loss,
        "ema": settings.ema,
        "metrics": experiment.metrics,
        "distillation": None,
    }
    networks: list[nn.Module] = []
    if experiment.teacher is not None:
        available["distillation"] = Distillation(chosen, experiment.teacher)
        networks.append(experiment.teacher.network)
    module = module_from(experiment.module, available)
    if experiment.config["fast_paths"] == "auto":
        for network in (module, *networks):
            accelerate(network)
    predict_with(module, classify)
    send_no_tables(module)
    return module


def start_weights(module: LightningModule, experiment: Experiment, folder: Path | None = None) -> None:
    """Loads the weights of ``init_from`` into a module; tells how, also in ``init_from.json`` in a folder."""
    if (place := experiment.config["init_from"]) is None:
        return
    module.configure_model()
    if str(experiment.trainer["precision"]).startswith("64"):
        module.double()  # Lightning converts only later
    if not isinstance(module, ViTClassifier):
        path = find_checkpoint(place, "init_from")
        checkpoint, own, new = read_checkpoint(path), experiment.data.class_names, experiment.config["reset_head"]
        if not new and (names := (checkpoint.get("test_view") or {}).get("class_names")):
            refuse(differences(experiment.data.place, own, f"init_from={place}", names, "give reset_head=true"))
        load_weights(module, checkpoint, path, new_head=new)
        _say_seen(checkpoint, experiment)
        return
    first = experiment.initial
    assert first is not None
    first.adapted.load(module.network)
    beside = dict.fromkeys(name.partition(".")[0] for name, _ in module.named_parameters())
    new = "".join(f", new {part}" for part in beside if part != "network")
    for text in (first.sentence() + new, *first.notes):
        say(row("weights", text))
    _say_seen(first.run, experiment)
    if folder is not None and is_first():
        write_whole(folder / "init_from.json", first.to_json(experiment.config["resize_positions"]))


def _say_seen(source: Mapping[str, Any], experiment: Experiment) -> None:
    """Says whether images that are cut from a source's may be among those that it has learned from."""
    data, config, place = experiment.data, experiment.config, experiment.config["init_from"]
    is_same = has_images_of(value_at(flatten(source.get("config")), "data"), flatten(config["data"]), data)
    if is_same and data.cut_splits and source.get("images") != data.fingerprint():
        how = f"in another way than for {place}, which may have learned from them (their accuracy would be too high)"
        say(row("weights", f"{data.place}: {' and '.join(data.cut_splits)} are cut {how}"))


def load_weights(module: LightningModule, checkpoint: dict[str, Any], path: Path, *, new_head: bool = False) -> None:
    """Loads the weights of a checkpoint into a module of the same architecture; metrics keep their own counts.

    A module of the user's is restored as Lightning does it: it may have kept a part of its weights. With ``new_head``
    it keeps its own head.
    """
    if not isinstance(module, ViTClassifier):
        module.on_load_checkpoint(checkpoint)
        if new_head:  # of the names that the hook gives
            checkpoint["state_dict"] = with_own_head(checkpoint["state_dict"], module)
        try:
            module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        except RuntimeError as fault:
            _, *problems = str(fault).split("\n\t")
            text = "; ".join(problems)[:300]
            raise UserError(f"{path} is of another architecture than the model: {text}") from fault
        return
    load_network(module.network, checkpoint, path)
    if type(module) is not ViTClassifier:
        state = checkpoint["state_dict"]
        others = ("network.", "train_metrics.", "val_metrics.", "test_metrics.")
        own = {name: state[name] for name in module.state_dict() if name in state and not name.startswith(others)}
        module.load_state_dict(own, strict=False)


class Restored(Callback):
    """The weights of a module of the user's, whose layers ``setup`` or ``configure_model`` may have to make first."""

    def __init__(self, checkpoint: dict[str, Any], path: Path) -> None:
        self.checkpoint, self.path = checkpoint, path

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        load_weights(pl_module, dict(self.checkpoint), self.path)  # whose hook may change it

    on_validation_start = on_predict_start = on_test_start


def compile_chosen(module: LightningModule, experiment: Experiment, trainer: Trainer) -> bool:
    """Compiles a module in place for the device of a Trainer, where the config says so, and returns whether it did.

    ``auto`` is CUDA graphs on one GPU, beside options that allow them.
    """
    option, device, ranks = experiment.config["compile"], trainer.strategy.root_device, trainer.world_size
    if option == AUTO:
        option = REPLAYS if device.type == "cuda" else False
        without = [f"{ranks} GPUs"] * (ranks > 1) + beside_replays(experiment.trainer_part, experiment.module)
        if option and (without := without or compiler_problems()):
            say(row("compile", f"auto: off, {', '.join(without)}"))
            option = False
    if option:
        batch_size = getattr(experiment.data, "batch_size", None)
        parts = compile_module(module, batch_size, device, ranks=ranks, replays=option == REPLAYS)
        if isinstance(experiment.data, ImageData) and device.type != "cpu":
            experiment.data.transform.compile()
        several = f"one code for all {len(parts)} blocks, " if len(parts) > 1 else ""
        say(row("compile", f"{several}made in the first steps and the first validation, which take a minute each"))
    return bool(option)


def network_of(module: LightningModule) -> nn.Module:
    """Returns what makes logits from images: the network of a classifier, or a module of the user's own itself."""
    return module.network if isinstance(module, ViTClassifier) else module


def count_parameters(module: LightningModule) -> dict[str, int]:
    """Returns ``parameters``, their number, and ``trained_parameters`` where some are frozen."""
    weights = list((network_of(module) if type(module) is ViTClassifier else module).parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    found = {"parameters": sum(weight.numel() for weight in weights), "trained_parameters": trained}
    return found if trained != found["parameters"] else {"parameters": trained}
