"""One checked experiment: what every command gets in place of config files and flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentError, Namespace
from torch import nn
from torchmetrics import Metric

from vit_lightning.config.check_network import leave_out_defaults_of_others
from vit_lightning.config.constructors import load_named_weights, without_weights
from vit_lightning.config.options import CommandOptions, Resume, Settings
from vit_lightning.config.parser import instantiate, parse_part
from vit_lightning.config.trust import KNOWN_PACKAGES, Imports, allowing, find_class
from vit_lightning.data.base import ImageData
from vit_lightning.errors import UserError
from vit_lightning.models.resize import Interpolation
from vit_lightning.training.fast_paths import describe
from vit_lightning.training.fine_tuning import LoraConfig, add_lora, freeze_backbone, head_state


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One checked experiment. Nobody writes to it: commands derive changed copies by ``dataclasses.replace``."""

    config: Mapping[str, Any]
    """The complete config as plain data: what ``config.yaml`` and checkpoints hold."""
    data: ImageData
    """The data module; it has read no images yet."""
    settings: Settings
    resume: Resume = "never"
    out: Path | None = None
    print_config: bool = False
    allowed_changes: tuple[str, ...] = ()
    """Options that may differ from those of a resumed run."""
    options: CommandOptions | None = None
    """Options that only this command has."""
    replaced: tuple[str, ...] = ()
    """Sentences on options of earlier config files that a later class or preset put out of use."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics of the config's list, by name."""
    imports: Imports = KNOWN_PACKAGES
    """Packages that this config may import from."""
    images: tuple[Path, ...] = ()
    """Image files and folders that ``predict`` was given."""

    @property
    def name(self) -> str:
        return str(self.config["experiment"])

    @property
    def seed(self) -> int:
        return int(self.config["seed_everything"])

    @property
    def init_from(self) -> str | None:
        """Source of the initial weights."""
        path: str | None = self.config["init_from"]
        return path

    @property
    def resize_positions(self) -> Interpolation:
        """Interpolation of learned positions for images of another size."""
        method: Interpolation = self.config["resize_positions"]
        return method

    @property
    def test(self) -> bool:
        """Whether ``fit`` tests the best checkpoint."""
        return bool(self.config["test"])

    @property
    def compile(self) -> bool:
        """Whether the network is compiled."""
        return bool(self.config.get("compile"))  # checkpoints of earlier versions lack it

    def describe_fast_paths(self, device: str, precision: str) -> dict[str, Any]:
        """Returns the option fast_paths and the forms that it means on a type of device, with Lightning's precision.

        Parts that are compiled have none of them.
        """
        option, kinds = self.config["fast_paths"], {"bf16": torch.bfloat16, "32": torch.float32}
        kind = kinds.get(precision.split("-")[0])
        forms = None if kind is None or option == "plain" else describe(device, kind)
        return {"option": option, "forms": forms}

    @property
    def trainer(self) -> Mapping[str, Any]:
        """Arguments of Lightning's Trainer as plain data."""
        arguments: Mapping[str, Any] = self.config["trainer"]
        return arguments

    def make_network(self, tell: Callable[[str], None] | None = None) -> nn.Module:
        """Returns the network with new random weights, frozen where the config says so.

        Args:
            tell: as the function ``make_network`` has it.
        """
        self.imports.allow()
        network = make_network(self.config, tell)
        if self.config["freeze"]:
            freeze_backbone(network)
        return network

    def make_trainer_arguments(self, replaced: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns arguments of Lightning's Trainer with new callbacks, loggers, profiler and strategy.

        Args:
            replaced: arguments to use in place of those of the config, of which nothing is made.
        """
        self.imports.allow()
        given = {key: value for key, value in self.trainer.items() if key not in (replaced or {})}
        return {**vars(instantiate(parse_part("trainer", given), "trainer")), **(replaced or {})}

    def to_yaml(self) -> str:
        """Returns a config file that repeats the run."""
        return str(yaml.safe_dump(self.config, sort_keys=False))

    def with_seed(self, seed: int, tags: Sequence[str]) -> Experiment:
        """Returns the experiment with another seed and other W&B tags."""
        wandb = {**self.config["wandb"], "tags": list(tags)}
        return replace(
            self,
            config={**self.config, "seed_everything": seed, "wandb": wandb},
            settings=self.settings._replace(wandb=replace(self.settings.wandb, tags=list(tags))),
        )


def make_data(config: Mapping[str, Any]) -> ImageData:
    """Returns the data module of a config in plain data; reads no images."""
    data: ImageData = instantiate(parse_part("data", config["data"]), "data")
    return data


def make_network(config: Mapping[str, Any], tell: Callable[[str], None] | None = None) -> nn.Module:
    """Returns the network of a complete config in plain data, with new random weights, and with its adapters.

    Args:
        config: the config.
        tell: where given, weights of timm or torchvision that the model names are loaded, and it gets a sentence.
    """
    model: Namespace = parse_part("model", config["model"]).model
    leave_out_defaults_of_others(model, config["model"].get("init_args", {}))
    network = _instantiated(without_weights(model))
    head = head_state(network) if config.get("reset_head") else {}
    if tell is not None and (told := load_named_weights(network, model, lambda: _instantiated(model))):
        tell(f"{told}{', reset head' * bool(head)}")
        network.load_state_dict(head, strict=False)
    add_lora(network, LoraConfig(**config.get("lora", {})))  # checkpoints of earlier versions lack it
    return network


def network_in_file(config: Mapping[str, Any], imports: Imports = KNOWN_PACKAGES) -> nn.Module:
    """Returns the network of a config that a file of weights carries, with new random weights; as ``make_network``.

    Raises:
        UserError: its class is not there, or does not take its arguments.
    """
    with allowing(imports):
        if find_class(path := config["model"]["class_path"]) is None:
            raise UserError(f"its model {path} is not there")
        try:
            return make_network(config)
        except ArgumentError as fault:
            raise UserError(" ".join(str(fault).split())) from fault


def _instantiated(model: Namespace) -> nn.Module:
    network: nn.Module = instantiate(Namespace(model=model), "model")
    return network
