"""From pages and flags to one resolved configuration, and from there to objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace  # type: ignore[attr-defined]
from lightning.pytorch import Trainer
from torch import nn

from vit_lightning.blocks import pair
from vit_lightning.checkpoints import CheckpointConfig, find_checkpoint, read_checkpoint
from vit_lightning.classifier import LossConfig
from vit_lightning.data import ImageData
from vit_lightning.errors import UserError
from vit_lightning.optim import OptimizerConfig

OWN_TRAINER_ARGUMENTS: set[str | int] = {"default_root_dir", "use_distributed_sampler", "barebones"}
"""Arguments of Lightning's Trainer that are ours to set: the run folder, and that our loaders divide the images."""


def make_parser(verb: str = "fit") -> ArgumentParser:
    """The keys of a page, which are also the flags, with their types and help."""
    parser = _empty_parser(verb)
    parser.add_argument("--config", action=ActionConfigFile, help="a page; several are merged in order")
    parser.add_argument("--print_config", type=bool, default=False, help="print the resolved configuration and exit")
    parser.add_argument("--out", type=Path | None, default=None, help="folder for what the command leaves; must be new")
    if verb != "fit":
        parser.add_argument("--ckpt", type=Path | None, default=None, help="run folder (its best checkpoint) or file")
    parser.add_argument("--experiment", type=str | None, default=None, help="name of the page; the file's by default")
    parser.add_argument("--seed_everything", type=int, default=0, help="seed of weights, order, augmentation, dropout")
    parser.add_argument(
        "--model", type=nn.Module, default={"class_path": "vit_lightning.ViT"}, help="the network; ViT by default"
    )
    _add_data(parser)
    parser.add_argument("--loss", type=LossConfig, default=LossConfig())
    parser.add_argument("--optimizer", type=OptimizerConfig, default=OptimizerConfig())
    parser.add_argument("--checkpoint", type=CheckpointConfig, default=CheckpointConfig())
    parser.add_class_arguments(Trainer, "trainer", instantiate=False, skip=OWN_TRAINER_ARGUMENTS)
    parser.set_defaults({"trainer.enable_model_summary": False})
    parser.add_argument("--init_from", type=Path | None, default=None, help="run folder or file with first weights")
    parser.add_argument("--test", type=bool, default=True, help="whether fit tests the best checkpoint at its end")
    return parser


def _empty_parser(verb: str) -> ArgumentParser:
    return ArgumentParser(prog=f"lightning {verb}", exit_on_error=False, print_config=None, allow_abbrev=False)


def _add_data(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=ImageData, default={"class_path": "vit_lightning.Digits"}, help="the images; Digits by default"
    )


def resolve(arguments: Sequence[str], verb: str = "fit") -> Namespace:
    """The complete configuration of a command: pages, flags, defaults, and what the model gets from the data.

    A verb that uses a trained model starts from the page in its checkpoint.

    Raises:
        UserError: names keys, values and choices.
    """
    flags = read_flags(arguments)
    if verb != "fit":
        flags = [*_page_of_checkpoint(flags), *flags]
    pages = {place: read_page(place) for key, place in flags if key == "config"}
    data = _parse_data(flags, pages)
    facts = data_facts(data)
    # first, so that what a page or a flag says of the same comes after it and shows
    base = [f"--model.{name}={json.dumps(value)}" for name, value in facts.items()]
    config = _parse(make_parser(verb), [*base, *(f"--{key}={value}" for key, value in flags)])
    if config.experiment is None:
        config.experiment = Path(list(pages)[-1]).stem if pages else "run"
    _check(config, facts)
    return config


def read_flags(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Keys and values of ``--key=value`` and ``--key value``, in order; a key without a value is switched on."""
    flags: list[tuple[str, str]] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"{word}: what is this? (keys are given as --key=value)")
        key, equals, value = word[2:].partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        flags.append((key, value))
    return flags


def read_page(place: str) -> dict[str, Any]:
    """The contents of a page, given as a file or, with line breaks or braces, as its text."""
    try:
        text = place if "\n" in place or place.startswith("{") else Path(place).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"config={place}: {fault.__class__.__name__}, is it there and is it a page?") from fault
    try:
        page = yaml.safe_load(text)
    except yaml.YAMLError as fault:
        raise UserError(f"config={place} is no YAML: {_flat(str(fault))}") from fault
    if not isinstance(page, dict):
        raise UserError(f"config={place} holds no keys")
    return page


def _page_of_checkpoint(flags: list[tuple[str, str]]) -> list[tuple[str, str]]:
    places = [value for key, value in flags if key == "ckpt"]
    if not places:
        raise UserError("ckpt is missing: give --ckpt RUN_FOLDER or --ckpt FILE")
    page = read_checkpoint(find_checkpoint(Path(places[-1]))).get("page")
    return [] if page is None else [("config", yaml.safe_dump(page))]


def _parse_data(flags: list[tuple[str, str]], pages: dict[str, dict[str, Any]]) -> ImageData:
    """The data module alone, before anything else: what it knows belongs into the rest of the configuration."""
    parser = _empty_parser("fit")
    _add_data(parser)
    arguments = []
    for key, value in flags:
        if key == "config" and "data" in pages[value]:
            arguments.append(f"--data={yaml.safe_dump(pages[value]['data'], default_flow_style=True, width=10**9)}")
        elif key == "data" or key.startswith("data."):
            arguments.append(f"--{key}={value}")
    return make_data(_parse(parser, arguments))


def _parse(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    try:
        return parser.parse_args(arguments)
    except ArgumentError as fault:
        raise UserError(_flat(str(fault))) from fault


def _check(config: Namespace, facts: dict[str, Any]) -> None:
    """What no single type can tell."""
    problems = []
    if config.seed_everything < 0:
        problems.append(f"seed_everything={config.seed_everything} must be at least 0")
    given = config.model.get("init_args", Namespace())
    for name, fact in facts.items():
        same = pair if name == "image_size" else int
        if name in given and same(given[name]) != same(fact):
            problems.append(f"model.{name}={given[name]} does not fit the data, which has {fact} (leave it out)")
    if problems:
        raise UserError(problems)


def data_facts(data: ImageData) -> dict[str, Any]:
    """Arguments of a network that follow from the data, as plain values."""
    height, width = data.image_size
    size = height if height == width else [height, width]
    return {"image_size": size, "in_channels": data.in_channels, "num_classes": data.num_classes}


def make_data(config: Namespace) -> ImageData:
    """The data module of a configuration; reads no images."""
    data: ImageData = _instantiate(config, "data")
    return data


def make_network(config: Namespace) -> nn.Module:
    """The network of a configuration, with freshly drawn weights."""
    network: nn.Module = _instantiate(config, "model")
    return network


def make_trainer_arguments(config: Namespace) -> dict[str, Any]:
    """Arguments of Lightning's Trainer, with callbacks, loggers, profiler and strategy made."""
    arguments: dict[str, Any] = vars(_instantiate(config, "trainer"))
    return dict(arguments)


def _instantiate(config: Namespace, key: str) -> Any:
    try:
        made = make_parser().instantiate(Namespace({key: config[key]}))[key]
    except UserError as error:
        raise UserError([f"{key}.{problem}" for problem in error.problems]) from error
    return made


class Settings(NamedTuple):
    """The groups of a page that are plain settings."""

    optimizer: OptimizerConfig
    loss: LossConfig
    checkpoint: CheckpointConfig


def make_settings(config: Namespace) -> Settings:
    """The plain settings of a configuration, checked."""
    return Settings(*(_instantiate(config, key) for key in Settings._fields))


def to_yaml(config: Namespace) -> str:
    """A page that repeats the run: everything that was resolved, nothing of where it came from or went to."""
    return str(make_parser().dump(_page(config), skip_unset=False))


def to_plain(config: Namespace) -> dict[str, Any]:
    """The same as plain data, for a checkpoint."""
    plain: dict[str, Any] = yaml.safe_load(to_yaml(config))
    return plain


def _page(config: Namespace) -> Namespace:
    page = config.clone()
    for key in ("config", "print_config", "out", "ckpt"):
        page.pop(key, None)
    return page


def _flat(message: str) -> str:
    """jsonargparse's message in one line."""
    return " ".join(line.strip() for line in message.splitlines() if line.strip())
