"""Config files and flags to one checked experiment."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch import Trainer
from torch import nn

from vit_lightning.config.check_keys import (
    Key,
    Problem,
    average_problems,
    find_problems,
    monitor_problems,
    secret_problems,
    trainer_problems,
)
from vit_lightning.config.check_network import (
    accepted,
    empty_network,
    leave_out_defaults_of_others,
    network_problems,
)
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import Page, flatten, merge, page_of_flag, read_page, split_words, unflatten
from vit_lightning.config.old_configs import with_block
from vit_lightning.config.options import COMMAND_OPTIONS, TRAINED, ConfigOptions, RunOptions, Settings
from vit_lightning.config.parser import DEFAULT_CLASSES, OWN_TRAINER_ARGUMENTS, instantiate, make_parser
from vit_lightning.config.trust import restrict_imports
from vit_lightning.data.base import ImageData
from vit_lightning.data.digits import Digits
from vit_lightning.data.image_files import data_of_files
from vit_lightning.errors import UserError
from vit_lightning.metric_facts import STEP_METRICS, metric_names
from vit_lightning.models.vit import ViT
from vit_lightning.sizes import pair
from vit_lightning.storage.checkpoint_files import find_checkpoint, network_weights, read_checkpoint
from vit_lightning.training.optim import OptimizerConfig, group_problems

KEYS = {
    "model": Key(nn.Module, ViT, supplied=("image_size", "in_channels", "num_classes")),
    "data": Key(ImageData, Digits),
    **{name: Key(type(settings), type(settings)) for name, settings in Settings()._asdict().items()},
    "trainer": Key(Trainer, Trainer, hidden={str(name) for name in OWN_TRAINER_ARGUMENTS}),
}
"""Keys of a config that hold the arguments of a class."""

GROUPS = ("model", "data", "trainer", *Settings._fields)
"""Keys that hold keys; with nothing under them they say nothing."""


def resolve(arguments: Sequence[str], command: str = "fit") -> Experiment:
    """Returns the experiment of a command line: config files, flags, defaults, and what the model gets from the data.

    A command that uses a trained model starts from the config in its checkpoint. Where ``predict`` is given image
    files, they replace the data of that config, which need not be there.

    Raises:
        UserError: all problems, each with option, value and choices.
    """
    flags, words = split_words(arguments)
    if words and command != "predict":
        raise UserError(f"{words[0]}: what is this? (options are given as --key=value)")
    trust, allowed = _permissions(flags, command)
    flags = [(key, value) for key, value in flags if key not in PERMISSIONS]
    page, unreadable = read_all(flags, command, files=bool(words))
    restrict_imports(page, trust=trust)
    if unreadable:  # values cannot be judged without the rest of the page, but what the flags call keys can
        raise UserError([*unreadable, *(found.text for found in _key_problems(page, command) if not found.missing)])
    if secrets := secret_problems(page):
        raise UserError(secrets)
    given = {"allowed_changes": allowed, "images": tuple(Path(word) for word in words)}
    try:
        return _build(page, command, given)
    except (ArgumentError, UserError) as fault:
        raise UserError(_all_problems(page, command, fault)) from fault


PERMISSIONS = ("trust-config", "allow-config-change")
"""Flags that no config can hold, because it cannot vouch for itself."""


def _permissions(flags: Sequence[tuple[str, str]], command: str) -> tuple[bool, tuple[str, ...]]:
    """Returns whether configs are trusted, and which options may differ from those of a resumed run."""
    trust = dict(flags).get("trust-config", "false")
    if trust not in ("true", "false"):
        raise UserError(f"trust-config={trust} must be true or false")
    allowed = tuple(key for name, value in flags if name == "allow-config-change" for key in value.split(","))
    if allowed and command != "fit":
        raise UserError(f"allow-config-change={','.join(allowed)} is for a run that is resumed, with fit")
    return trust == "true", allowed


def read_all(flags: Sequence[tuple[str, str]], verb: str, *, files: bool = False) -> tuple[Page, list[str]]:
    """What pages and flags say together, the later over the earlier and flags last; and what could not be read."""
    page: Page = {}
    pages: list[Page] = []
    unreadable: list[str] = []
    places = [Path(value) for key, value in flags if key == "config"]
    for place in places:
        try:
            pages.append(read_page(place))
        except UserError as error:
            unreadable += error.problems
    if verb in TRAINED:
        pages.insert(0, _page_of_checkpoint(flags, files=files))
    for said in pages:
        said = {key: value for key, value in said.items() if value is not None or key not in GROUPS}
        page = merge(page, said, DEFAULT_CLASSES)
    if places and "experiment" not in page:
        page["experiment"] = places[-1].stem
    for key, value in flags:
        if key != "config":
            page = merge(page, page_of_flag(key, value, list(DEFAULT_CLASSES)), DEFAULT_CLASSES)
    if verb in TRAINED:
        _refuse_another_split(pages[0], page)
    return page, unreadable


def _refuse_another_split(trained: Page, asked: Page) -> None:
    """A model is not measured on images that it has learned from."""
    before, now = trained.get("data"), asked.get("data")
    if not isinstance(before, dict) or not isinstance(now, dict) or before.get("class_path") != now.get("class_path"):
        return
    first, second = str(before.get("split_seed", 0)), str(now.get("split_seed", 0))
    if first != second:
        raise UserError(
            f"data.split_seed={second}: the model learned from split {first}, and so from images of this test"
        )


def _page_of_checkpoint(flags: Sequence[tuple[str, str]], *, files: bool) -> Page:
    places = [value for key, value in flags if key == "ckpt"]
    if not places:
        raise UserError("ckpt is missing: give --ckpt RUN_FOLDER or --ckpt FILE")
    checkpoint = read_checkpoint(find_checkpoint(places[-1]))
    page = flatten(checkpoint.get("config") or {})
    if not isinstance(page, dict):
        raise UserError(f"ckpt={places[-1]} holds no page")
    if files:
        page["data"] = data_of_files(places[-1], checkpoint)
    page.pop("distillation", None)  # its teacher need not be there any more
    return {**page, "init_from": None}  # the weights are the checkpoint's own


def _build(page: Page, command: str, given: Mapping[str, Any]) -> Experiment:
    """Makes and checks all parts of an experiment, each once."""
    parser = make_parser(command)
    images = unflatten({key: page[key] for key in ("data",) if key in page})
    data: ImageData = instantiate(make_parser().parse_object(images), "data")
    try:
        data.check()
        facts = data_facts(data)
    except UserError as error:
        raise UserError([f"data.{problem}" for problem in error.problems]) from error
    model = page.get("model", {})
    model = {"class_path": model} if isinstance(model, str) else model or {}
    if not isinstance(model, dict):
        raise UserError(f"model={model} must be a class path or its arguments")
    class_path = model.get("class_path", DEFAULT_CLASSES["model"])
    complete = with_block({**page, "model": {"class_path": class_path, **accepted(facts, class_path), **model}})
    config = parser.parse_object(unflatten(complete))
    for name, fact in facts.items():  # an argument that a function hands on shows only now
        if name in config.model.init_args and name not in model:
            config.model.init_args[name] = fact
    leave_out_defaults_of_others(config.model, {**model, **facts})
    if config.experiment is None:
        config.experiment = "run"
    problems: list[str] = []
    kind = COMMAND_OPTIONS.get(command)
    options = None if kind is None else _made(kind, config, problems)
    _made(ConfigOptions, config, problems)
    run = _made(RunOptions, config, problems)
    named = config.model.get("init_args", Namespace())
    for name, fact in facts.items():
        same = pair if name == "image_size" else int
        if name in named and same(named[name]) != same(fact):
            problems.append(f"model.{name}={named[name]} does not fit the data, which has {fact} (leave it out)")
    settings = {}
    for key in Settings._fields:
        try:
            settings[key] = instantiate(config, key)
        except UserError as error:
            problems += error.problems
    if not any(problem.startswith("model.") for problem in problems):
        problems += _model_problems(config, facts, settings.get("optimizer"))
    problems += [*trainer_problems(config.trainer), *average_problems(config)]
    monitored = [*metric_names("val", "train", classes=facts["num_classes"]), *STEP_METRICS]
    problems += monitor_problems(config, monitored)
    if problems:
        raise _Unfit(problems)
    return Experiment(
        config=to_plain(config), data=data, settings=Settings(**settings), options=options, **vars(run), **given
    )


class _Unfit(UserError):
    """Values of the right types that do not fit, alone or together; nothing else is wrong."""


def _made(kind: type[Any], config: Namespace, problems: list[str]) -> Any:
    """Returns the options of a class, with their values in a parsed config."""
    try:
        return kind(**{field.name: config[field.name] for field in fields(kind)})
    except UserError as error:
        problems += error.problems
        return None


def data_facts(data: ImageData) -> dict[str, Any]:
    """Arguments of a network that follow from the data, as plain values."""
    height, width = data.image_size
    size = height if height == width else [height, width]
    return {"image_size": size, "in_channels": data.in_channels, "num_classes": data.num_classes}


def to_plain(config: Namespace) -> dict[str, Any]:
    """Returns the config as plain data, without the options of one call of a command."""
    page = config.clone()
    for options in (RunOptions, *COMMAND_OPTIONS.values()):
        for field in fields(options):
            page.pop(field.name, None)
    plain: dict[str, Any] = _plain(yaml.safe_load(make_parser().dump(page, skip_unset=False)))
    return plain


def _plain(value: Any) -> Any:
    """Without the defaults of networks of others that cannot be written down, such as a function."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _plain(item) for key, item in value.items() if not str(item).startswith("Unable to serialize")}


def _key_problems(page: Page, command: str) -> list[Problem]:
    options = (ConfigOptions, RunOptions, *([COMMAND_OPTIONS[command]] if command in COMMAND_OPTIONS else []))
    plain = {name: Key(kind) for group in options for name, kind in get_type_hints(group).items()}
    return find_problems(page, plain | KEYS)


def _all_problems(page: Page, command: str, fault: Exception) -> list[str]:
    """Returns everything that is wrong with a refused config: keys and types first, then the values of the others."""
    if isinstance(fault, _Unfit):
        return fault.problems
    found = _key_problems(page, command)
    problems = [problem.text for problem in found]
    for problem in found:
        _remove(page, problem.path)
    for _ in range(3):  # some only show when the data's own problems are out of the way
        try:
            _build(page, command, {})
            break
        except _Unfit as error:
            problems += error.problems
            break
        except UserError as error:
            problems += error.problems
            if not all(_remove(page, tuple(text.split("=")[0].split("."))) for text in error.problems):
                break
        except ArgumentError as error:
            problems += [] if problems else [" ".join(str(error).split())]
            break
    return problems or [" ".join(str(fault).split())]


def _remove(page: Page, path: tuple[str, ...]) -> bool:
    """Takes a key out of a page; whether it was there."""
    node: Any = page
    for name in path[:-1]:
        node = node.get(name) if isinstance(node, dict) else None
    if not isinstance(node, dict) or path[-1] not in node:
        return False
    del node[path[-1]]
    return True


def _model_problems(config: Namespace, facts: dict[str, Any], optimizer: OptimizerConfig | None) -> list[str]:
    """Returns what does not fit: network and its arguments, data, optimizer, and the weights it is to start from."""
    try:
        network = empty_network(lambda: instantiate(config, "model"))
    except UserError as error:
        return error.problems
    problems = network_problems(network, (facts["in_channels"], *pair(facts["image_size"])), facts["num_classes"])
    if optimizer is not None:
        with contextlib.suppress(UserError):  # its own problems are told elsewhere
            problems += [f"optimizer.{text}" for text in group_problems(network, optimizer)]
    try:
        for key in ("init_from", "ckpt"):
            if config.get(key) is not None:
                path = find_checkpoint(config[key], key)
                network_weights(network, read_checkpoint(path), path)
        if (teacher := config.distillation.teacher) and not teacher.startswith(("torchvision:", "timm:")):
            find_checkpoint(teacher, "distillation.teacher")
    except UserError as error:
        problems += error.problems
    return problems
