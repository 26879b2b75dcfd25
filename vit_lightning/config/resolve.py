"""From pages and flags to one resolved configuration, and from there to objects."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
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
from vit_lightning.config.command_options import VERB_KEYS, WORDS, verb_key_problems
from vit_lightning.config.files import Page, flatten, merge, page_of_flag, read_flags, read_page, unflatten
from vit_lightning.config.trust import restrict_imports
from vit_lightning.data.base import Digits, ImageData
from vit_lightning.data.image_files import data_of_files
from vit_lightning.errors import UserError
from vit_lightning.metric_facts import STEP_METRICS, metric_names
from vit_lightning.models.vit import ViT
from vit_lightning.sizes import pair
from vit_lightning.storage.checkpoint_files import find_checkpoint, network_weights, read_checkpoint
from vit_lightning.storage.wandb_mirror import WandbConfig
from vit_lightning.training.checkpoints import CheckpointConfig
from vit_lightning.training.distillation import DistillationConfig
from vit_lightning.training.ema import EMAConfig
from vit_lightning.training.losses import LossConfig
from vit_lightning.training.optim import OptimizerConfig, group_problems

OWN_TRAINER_ARGUMENTS: set[str | int] = {
    "default_root_dir",
    "use_distributed_sampler",
    "enable_checkpointing",
    "barebones",
}
"""Arguments of Lightning's Trainer that are ours to set: run folder, checkpoints, and how ranks share images."""


Resume = Literal["never", "auto", "must"]


class Settings(NamedTuple):
    """The groups of a page that are plain settings."""

    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    ema: EMAConfig = EMAConfig()
    distillation: DistillationConfig = DistillationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    wandb: WandbConfig = WandbConfig()


KEYS = {
    "experiment": Key(str | None),
    "seed_everything": Key(int),
    "model": Key(nn.Module, ViT, supplied=("image_size", "in_channels", "num_classes")),
    "data": Key(ImageData, Digits),
    **{name: Key(type(settings), type(settings)) for name, settings in Settings()._asdict().items()},
    "trainer": Key(Trainer, Trainer, hidden={str(name) for name in OWN_TRAINER_ARGUMENTS}),
    "init_from": Key(str | None),
    "test": Key(bool),
    "resume": Key(Resume),
    "out": Key(Path | None),
    "ckpt": Key(str | None),
    "print_config": Key(bool),
}
"""Keys of a page, which are also the flags."""

CLASS_DEFAULTS = {"model": "vit_lightning.ViT", "data": "vit_lightning.Digits"}
GROUPS = ("model", "data", "trainer", *Settings._fields)
"""Keys that hold keys; with nothing under them they say nothing."""
TRAINED = ("validate", "test", "predict")
"""Verbs that use a trained model, whose page lies in its checkpoint."""
NOT_IN_PAGE = ("resume", "out", "ckpt", "print_config", *(name for keys in VERB_KEYS.values() for name in keys))
"""What a run's own page leaves out: where it went, and what it was asked besides."""


def make_help(verb: str) -> ArgumentParser:
    """The keys once more, for reading: with the arguments of the classes that need not be named."""
    usage = f"lightning {verb} {WORDS.get(verb, '')}[--config PAGE.yaml ...] [--key=value ...]"
    parser = ArgumentParser(prog=f"lightning {verb}", usage=usage, description=HELP)
    parser.add_argument("--config", type=str, help="a page; several are merged in order, flags come after them")
    allow = "key that may differ from that of the run that goes on; may come several times"
    if verb == "fit":
        parser.add_argument("--allow-config-change", type=str, metavar="KEY", help=allow)
    parser.add_argument("--trust-config", type=bool, default=False, help="pages may name classes of any package")
    _add_plain_keys(parser, verb)
    for name, default in (("model", ViT), ("data", Digits), *((n, type(s)) for n, s in Settings()._asdict().items())):
        parser.add_class_arguments(default, name)
    parser.add_class_arguments(Trainer, "trainer", skip=OWN_TRAINER_ARGUMENTS)
    return parser


def _add_plain_keys(parser: ArgumentParser, verb: str) -> None:
    places = ", file, or https://...#sha256=CHECKSUM"
    parser.add_argument("--print_config", type=bool, default=False, help="print the resolved configuration and exit")
    parser.add_argument("--out", type=Path | None, default=None, help="folder for what the command leaves; must be new")
    if verb in TRAINED:
        parser.add_argument("--ckpt", type=str | None, default=None, help=f"run folder (its best checkpoint){places}")
    for name, key in VERB_KEYS.get(verb, {}).items():
        parser.add_argument(f"--{name}", type=key.kind, default=key.default, help=key.text)
    parser.add_argument("--experiment", type=str | None, default=None, help="name of the page; the file's by default")
    parser.add_argument("--seed_everything", type=int, default=0, help="seed of weights, order, augmentation, dropout")
    parser.add_argument("--init_from", type=str | None, default=None, help=f"first weights: run folder{places}")
    continues = "continues the newest run of this page that is not over and not in use"
    parser.add_argument(
        "--resume",
        type=Resume,
        default="never",
        help=f"auto {continues}, if there is one; must ends with exit code 3 if there is none; a run folder as a flag",
    )
    parser.add_argument("--test", type=bool, default=True, help="whether fit tests the best checkpoint at its end")


HELP = """Keys are written the same in a page and as flags. model.class_path and data.class_path name other classes
(data: CIFAR10, CIFAR100, Digits, HuggingFaceSet, ImageFolder, ShardedSet, TorchvisionSet), whose arguments stand in
their place; blocks such as model.attention have arguments of their own (--model.attention.dropout=0.1)."""


@lru_cache
def make_parser(verb: str = "fit") -> ArgumentParser:
    """The keys with their types and help."""
    parser = ArgumentParser(prog=f"lightning {verb}", exit_on_error=False, allow_abbrev=False)
    _add_plain_keys(parser, verb)
    for name, kind, text in (("model", nn.Module, "the network"), ("data", ImageData, "the images")):
        default = {"class_path": CLASS_DEFAULTS[name]}
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text}; {CLASS_DEFAULTS[name]} by default")
    for name, settings in Settings()._asdict().items():
        parser.add_argument(f"--{name}", type=type(settings), default=settings)
    parser.add_class_arguments(Trainer, "trainer", instantiate=False, skip=OWN_TRAINER_ARGUMENTS)
    parser.set_defaults({"trainer.enable_model_summary": False})
    return parser


def resolve(arguments: Sequence[str], verb: str = "fit", *, trust: bool = False, files: bool = False) -> Namespace:
    """The complete configuration of a command: pages, flags, defaults, and what the model gets from the data.

    A verb that uses a trained model starts from the page in its checkpoint. Only with ``trust`` may a page name classes
    of any package. With ``files``, image files come in the place of the page's data, which need not be there.

    Raises:
        UserError: all that is wrong, each with key, value and choices.
    """
    flags = read_flags(arguments)
    page, unreadable = read_all(flags, verb, files=files)
    restrict_imports(page, trust=trust)
    if unreadable:  # values cannot be judged without the rest of the page, but what the flags call keys can
        raise UserError([*unreadable, *(found.text for found in _key_problems(page, verb) if not found.missing)])
    if secrets := secret_problems(page):
        raise UserError(secrets)
    try:
        config, facts = _parse(page, verb)
        problems = _range_problems(config, facts, verb)
    except (ArgumentError, UserError) as fault:
        problems = _all_problems(page, verb, fault)
    if problems:
        raise UserError(problems)
    return config


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
        page = merge(page, said, CLASS_DEFAULTS)
    if places and "experiment" not in page:
        page["experiment"] = places[-1].stem
    for key, value in flags:
        if key != "config":
            page = merge(page, page_of_flag(key, value, list(CLASS_DEFAULTS)), CLASS_DEFAULTS)
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
    page = flatten(checkpoint.get("page") or {})
    if not isinstance(page, dict):
        raise UserError(f"ckpt={places[-1]} holds no page")
    if files:
        page["data"] = data_of_files(places[-1], checkpoint)
    page.pop("distillation", None)  # its teacher need not be there any more
    return {**page, "init_from": None}  # the weights are the checkpoint's own


def _parse(page: Page, verb: str) -> tuple[Namespace, dict[str, Any]]:
    """The typed configuration with all defaults, and what the data says that the model has to know."""
    parser = make_parser(verb)
    data = parser.parse_object(unflatten({"data": page["data"]} if "data" in page else {}))
    made = make_data(data)
    try:
        made.check()
        facts = data_facts(made)
    except UserError as error:
        raise UserError([f"data.{problem}" for problem in error.problems]) from error
    model = page.get("model", {})
    model = {"class_path": model} if isinstance(model, str) else model or {}
    if not isinstance(model, dict):
        raise UserError(f"model={model} must be a class path or its arguments")
    class_path = model.get("class_path", CLASS_DEFAULTS["model"])
    complete = {**page, "model": {"class_path": class_path, **accepted(facts, class_path), **model}}
    config = parser.parse_object(unflatten(complete))
    for name, fact in facts.items():  # an argument that a function hands on shows only now
        if name in config.model.init_args and name not in model:
            config.model.init_args[name] = fact
    leave_out_defaults_of_others(config.model, {**model, **facts})
    if config.experiment is None:
        config.experiment = "run"
    return config, facts


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
    return dict(vars(_instantiate(config, "trainer")))


def make_settings(config: Namespace) -> Settings:
    """The plain settings of a configuration, checked."""
    return Settings(*(_instantiate(config, key) for key in Settings._fields))


def _instantiate(config: Namespace, key: str) -> Any:
    try:
        return make_parser().instantiate(Namespace({key: config[key]}))[key]
    except NotImplementedError:  # of a network that cannot be built without memory
        raise
    except (ValueError, TypeError, OSError, RuntimeError, MisconfigurationException) as fault:
        cause: BaseException | None = fault
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__context__  # jsonargparse puts its own around those of classes in lists
        problems = [f": {' '.join(str(fault).split())}"] if cause is None else [f".{text}" for text in cause.problems]
        raise UserError([f"{key}{problem}" for problem in problems]) from fault


def to_yaml(config: Namespace) -> str:
    """A page that repeats the run: everything that was resolved, nothing of where it came from or went to."""
    return str(yaml.safe_dump(to_plain(config), sort_keys=False))


def to_plain(config: Namespace) -> dict[str, Any]:
    """The same as plain data, for a checkpoint."""
    page = config.clone()
    for key in NOT_IN_PAGE:
        page.pop(key, None)
    plain: dict[str, Any] = _plain(yaml.safe_load(make_parser().dump(page, skip_unset=False)))
    return plain


def _plain(value: Any) -> Any:
    """Without the defaults of networks of others that cannot be written down, such as a function."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _plain(item) for key, item in value.items() if not str(item).startswith("Unable to serialize")}


def _key_problems(page: Page, verb: str) -> list[Problem]:
    keys = {name: key for name, key in KEYS.items() if verb in TRAINED or name != "ckpt"}
    return find_problems(page, keys | {name: Key(key.kind) for name, key in VERB_KEYS.get(verb, {}).items()})


def _all_problems(page: Page, verb: str, fault: Exception) -> list[str]:
    """Everything that is wrong with a page that was refused: keys and types first, then the values of the others."""
    found = _key_problems(page, verb)
    problems = [problem.text for problem in found]
    for problem in found:
        _remove(page, problem.path)
    for _ in range(3):  # what only shows when the data's own problems are out of the way
        try:
            config, facts = _parse(page, verb)
            return [*problems, *_range_problems(config, facts, verb)]
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


def _range_problems(config: Namespace, facts: dict[str, Any], verb: str) -> list[str]:
    """What no single type can tell: values that do not fit, alone or together."""
    problems = verb_key_problems(verb, {name: config[name] for name in VERB_KEYS.get(verb, {})})
    if not 0 <= config.seed_everything < 2**32:
        problems.append(f"seed_everything={config.seed_everything} must be at least 0 and below 2**32")
    if Path(config.experiment).name != config.experiment:
        problems.append(f"experiment={config.experiment} must be a plain name, without slashes")
    given = config.model.get("init_args", Namespace())
    for name, fact in facts.items():
        same = pair if name == "image_size" else int
        if name in given and same(given[name]) != same(fact):
            problems.append(f"model.{name}={given[name]} does not fit the data, which has {fact} (leave it out)")
    if not any(problem.startswith("model.") for problem in problems):
        problems += _model_problems(config, facts)
    for key in Settings._fields:
        try:
            _instantiate(config, key)
        except UserError as error:
            problems += error.problems
    problems += [*trainer_problems(config.trainer), *average_problems(config)]
    monitored = [*metric_names("val", "train", classes=facts["num_classes"]), *STEP_METRICS]
    return [*problems, *monitor_problems(config, monitored)]


def _model_problems(config: Namespace, facts: dict[str, Any]) -> list[str]:
    """What the network says against its arguments, the data, the optimizer, and the weights it is to start from."""
    try:
        network = empty_network(lambda: make_network(config))
    except UserError as error:
        return error.problems
    problems = network_problems(network, (facts["in_channels"], *pair(facts["image_size"])), facts["num_classes"])
    with contextlib.suppress(UserError):  # its own problems are told elsewhere
        problems += [f"optimizer.{text}" for text in group_problems(network, _instantiate(config, "optimizer"))]
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
