"""One checked experiment: what every command gets in place of config files and flags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import yaml
from torch import nn
from torchmetrics import Metric

from vit_lightning.config.adapters import ADAPTERS
from vit_lightning.config.files import flatten
from vit_lightning.config.from_weights import Trained
from vit_lightning.config.networks import network_from
from vit_lightning.config.options import Resume, Settings
from vit_lightning.config.signatures import Part, made
from vit_lightning.config.typed import Place, Reader, of_option
from vit_lightning.data.base import ImageData
from vit_lightning.errors import refuse
from vit_lightning.training.fine_tuning import freeze_backbone
from vit_lightning.training.losses import Teacher
from vit_lightning.weights.init_from import FirstWeights


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
    unread: tuple[str, ...] = ()
    """Why the images of a config that is printed alone cannot be read."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics of the config's list, by name."""
    network: Part | None
    """The network; None where the module takes none."""
    module: Part
    trainer_part: Part
    files: tuple[Path, ...]
    """Folders with Python files of the user's own that it was made of."""
    trained: Trained | None = None
    """The checkpoint of the trained model that a command uses, which has been read."""
    initial: FirstWeights | None = None
    """The weights of ``init_from``, fitted to the network."""
    teacher: Teacher | None = None
    """The teacher of a distillation, for commands that train."""
    images: tuple[Path, ...] = ()
    """Image files and folders that ``predict`` was given."""

    @property
    def name(self) -> str:
        return str(self.config["experiment"])

    @property
    def seed(self) -> int:
        return int(self.config["seed_everything"])

    @property
    def trainer(self) -> Mapping[str, Any]:
        """Arguments of Lightning's Trainer as plain data."""
        arguments: Mapping[str, Any] = self.config["trainer"]
        return arguments

    def make_network(self) -> nn.Module:
        """Returns the network with new random weights and adapters, frozen where the config says so."""
        assert self.network is not None
        network = network_from(self.network, self.settings.lora)
        if self.config["freeze"]:
            freeze_backbone(network)
        return network

    def make_trainer_arguments(self, replaced: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns arguments of Lightning's Trainer with new callbacks, loggers, profiler and strategy.

        Args:
            replaced: arguments to use in place of those of the config, of which nothing is made.
        """
        given = {key: value for key, value in self.trainer_part.arguments.items() if key not in (replaced or {})}
        with of_option("trainer"):
            return {**made(given), **(replaced or {})}

    def to_yaml(self) -> str:
        """Returns a config file that repeats the run."""
        return str(yaml.safe_dump(self.config, sort_keys=False))

    def with_seed(self, seed: int, tags: Sequence[str]) -> Self:
        """Returns the experiment with another seed and other W&B tags."""
        wandb = {**self.config["wandb"], "tags": list(tags)}
        return replace(
            self,
            config={**self.config, "seed_everything": seed, "wandb": wandb},
            settings=self.settings._replace(wandb=replace(self.settings.wandb, tags=list(tags))),
        )


def make_data(config: Mapping[str, Any]) -> ImageData:
    """Returns the data module of a config in plain data; reads no images."""
    reader = Reader(ADAPTERS)
    given = {key: value for key, value in flatten(config["data"]).items() if key != "also_test"}
    part = reader.part(Place(ImageData), given, "data")
    refuse(reader.problems)
    data: ImageData = part.make()
    return data
