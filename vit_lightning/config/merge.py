"""One config of a command line: what a checkpoint or a source of weights says, then files in order, then flags.

Later ones win; a network's sizes win over its preset, and its preset over the defaults, wherever they are given.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule, LightningModule

from vit_lightning.config.files import (
    ARGUMENTS,
    Config,
    as_flag,
    as_list,
    as_map,
    flatten,
    read_config,
    without_nulls,
    word,
)
from vit_lightning.config.foreign import as_ours, of_the_module, takes_no_network
from vit_lightning.config.names import can_be_class, class_of, find_class, full_name, is_same_class
from vit_lightning.config.networks import network_in_file
from vit_lightning.config.options import BESIDE_OTHER_CLASS, DEFAULT_CLASSES, GROUPS, TRAINED, RunOptions
from vit_lightning.config.own_files import also_search
from vit_lightning.config.shipped import CONFIG_FILES, find_config
from vit_lightning.config.signatures import signature_of
from vit_lightning.config.typed import scalar
from vit_lightning.data.image_files import data_of_files
from vit_lightning.data.image_set import ImageSet
from vit_lightning.data.wrapped import WrappedDataset
from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
from vit_lightning.models.presets import PRESETS
from vit_lightning.models.vit import ViT
from vit_lightning.sizes import pair, side
from vit_lightning.storage.checkpoint_files import find_checkpoint, read_checkpoint, run_folder_of
from vit_lightning.storage.parsing import parse_yaml
from vit_lightning.weights.files import is_ours, read_weights
from vit_lightning.weights.hubs import LIBRARIES, model_of_library
from vit_lightning.weights.identify import OURS
from vit_lightning.weights.init_from import FROM_DATA, InitialWeights, facts_of_images, open_initial_weights
from vit_lightning.weights.options import model_config
from vit_lightning.weights.sources import for_size, open_source
from vit_lightning.weights.trust import refuse_untrusted


class Trained(NamedTuple):
    """The checkpoint that ``--ckpt`` names."""

    path: Path
    checkpoint: dict[str, Any]
    notes: tuple[str, ...] = ()
    """Sentences on what the weights do not tell, and what was taken in its place."""


class Merged(NamedTuple):
    """The config of a command line."""

    config: Config
    problems: list[str]
    """What is wrong with config files and the source of the initial weights."""
    trained: Trained | None = None
    initial: InitialWeights | None = None
    """The source of the initial weights."""
    complete: bool = True
    """Whether all config files could be read."""


def merge_all(
    flags: Sequence[tuple[str, str]], command: str, *, facts: Config | None = None, trust: bool = False
) -> Merged:
    """Merges what a command line names; flags are one source, in which an argument holds wherever its class is named.

    Args:
        flags: options and values of the command line, in order.
        command: the command; if it uses a trained model, the config of its checkpoint comes first.
        facts: where image files replace the data of that config: what is not known about the model.
        trust: whether files of weights may name any class.
    """
    configs: list[Config] = []
    problems: list[str] = []
    names = [value for key, value in flags if key == "config"]
    for text in names:
        try:
            path = find_config(text)
            config = read_config(path)
            if {"method", "parameters"} <= config.keys():
                raise UserError(f"config={text} is a sweep of W&B, not a config: wandb sweep {shlex.quote(text)}")
            if {"opt", "sched", "epochs"} <= config.keys():
                table = "the guide's page coming_from.md has a table of its options and ours"
                raise UserError(f"config={text} holds arguments of timm's train.py, it is no config: {table}")
            flags_alone = [name for name in RunOptions.__dataclass_fields__ if name in config]
            refuse(f"config={text}: {key} is no option of a config (give --{key}, for one call)" for key in flags_alone)
            if "compare" in config:
                what = "the plan of an ablation, not a config"
                raise UserError(f"config={text} is {what}: lightning ablate {shlex.quote(text)}")
            config = without_nulls(config, *GROUPS, "lr_scheduler")  # which say nothing
            configs.append(as_ours(_with_files(config, path.parent), problems))
        except UserError as error:
            problems += error.problems
    complete = len(configs) == len(names)
    given: Config = {}
    try:
        given = as_ours(_with_files(_together(flags), Path()), problems)
    except UserError as error:
        problems += error.problems
    sources = [*configs, given]
    first: Config = {}
    trained, initial = None, None
    if command in TRAINED:
        as_it_is, heads = takes_no_network(sources), _heads(sources)
        trained, first = _config_of_checkpoint(flags, facts, as_it_is=as_it_is, heads=heads, trust=trust)
        if "data" not in first and "test_view" in trained.checkpoint:  # weights of others, on the data of the config
            place = [value for key, value in flags if key in ("ckpt", "ckpt_path")][-1]
            sources, trained = _for_foreign(place, trained, sources)
    else:
        try:
            initial, first = _config_of_source(sources, trust=trust)
        except UserError as error:
            problems += error.problems
    merged: Config = {}
    for source in (first, *sources):
        config = of_the_module(source, merged)
        problems += _overruled_preset(as_map(config.get("model")), as_map(merged.get("model")))
        merged = merge(merged, config)
    merged = without_nulls(merged, *GROUPS)  # --loss=null leaves it out
    if command in TRAINED:
        merged.pop("ckpt", None)  # it has been read
    if names and "experiment" not in merged:
        merged["experiment"] = Path(names[-1]).stem
    if initial is not None:
        initial = _with_its_images(initial, merged)
    if trained is not None:
        trained = _for_its_data(trained, first, merged)
    return Merged(merged, problems, trained, initial, complete)


def _overruled_preset(model: Config, before: Config) -> list[str]:
    """Returns a preset that sizes of an earlier config win over, as a problem: the network would stay as it was."""
    preset = PRESETS.get(str(model.get("preset")).partition("/")[0])
    sizes = zip(("emb_size", "depth", "num_heads"), preset or (), strict=False)
    kept = [name for name, size in sizes if name not in model and before.get(name) not in (None, size)]
    if not kept or model.get("class_path") not in (None, before.get("class_path")):
        return []
    beside = ", ".join(f"model.{name}={before[name]}" for name in kept)
    return [f"model.preset={model['preset']}: {beside} of an earlier config win over it (give null for the preset's)"]


def _with_files(config: Config, folder: Path) -> Config:
    """Returns a flat config with the files that it names in place of groups: ``model: model.yaml``, as LightningCLI."""
    found = dict(config)
    for key in GROUPS:
        given = as_map(config.get(key))
        if isinstance(name := given.get("class_path"), str) and name.endswith(CONFIG_FILES):
            more = {option: value for option, value in given.items() if option != "class_path"}
            found[key] = merge(read_config(folder / name, key), more)
    return found


def _together(flags: Sequence[tuple[str, str]]) -> Config:
    """Returns all flags but the config files as one config."""
    together: Config = {}
    for key, value in sorted(
        flags, key=lambda flag: len([part for part in flag[0].split(".") if part != "class_path"])
    ):
        if key != "config":
            _add(together, config_of_flag(key, value))
    return together


def _add(together: Config, more: Config) -> None:
    for key, value in more.items():
        before = together.get(key)
        if isinstance(before, str) and isinstance(value, dict):
            together[key] = {"class_path": before, **value}
        elif isinstance(before, dict) and isinstance(value, dict):
            _add(before, value)
        else:
            together[key] = [*as_list(before), *as_list(value)] if key.endswith("+") else value


def _config_of_checkpoint(
    flags: Sequence[tuple[str, str]], facts: Config | None, *, as_it_is: bool, heads: Config | None, trust: bool
) -> tuple[Trained, Config]:
    """Returns the checkpoint that ``--ckpt`` names, and the config of its run.

    Args:
        flags: options and values of the command line.
        facts: see ``merge_all``.
        as_it_is: whether the config's own LightningModule loads it, so that any Lightning may have written it.
        heads: those of the config's network, for weights that do not tell them.
        trust: whether it may name any class.
    """
    places = [value for key, value in flags if key in ("ckpt", "ckpt_path")]
    if not places:
        raise UserError("ckpt is missing: give --ckpt RUN_FOLDER or --ckpt FILE")
    of_library = places[-1].partition(":")[0] in LIBRARIES
    if facts is None:
        trained = _trained_by_run(places[-1], as_it_is=as_it_is, heads=heads, trust=trust)
    else:
        trained = _trained(places[-1], facts, trust=trust)
    config = flatten(trained.checkpoint.get("config") or {})
    if not isinstance(config, dict):
        raise UserError(f"ckpt={places[-1]} holds no config")
    if facts is not None:
        config["data"] = data_of_files(places[-1], trained.checkpoint)
    # its teacher may be gone; where a call writes, and whom it trusts, is said by that call alone
    config = _without(config, "distillation", *RunOptions.__dataclass_fields__)
    if not trust and not of_library:  # which the user has named
        refuse_untrusted(config)
    if not trust and isinstance(config.get("trainer"), dict):  # a profiler writes where it says
        config["trainer"] = _without(config["trainer"], "profiler")
    if isinstance(config.get("model"), dict):  # these come from the data, which may give other sizes
        config["model"] = {name: value for name, value in config["model"].items() if name not in FROM_DATA[:2]}
    return trained, {**config, "init_from": None}  # the weights are the checkpoint's own


def _for_foreign(place: str, trained: Trained, sources: Sequence[Config]) -> tuple[list[Config], Trained]:
    """Returns configs without a network, whose weights are those of others, with a sentence on what is not used.

    Args:
        place: the weights as the user names them.
        trained: the weights.
        sources: configs, the last one of flags.
    """
    of_training = ("model", "module", "init_from", "lora", "freeze", "ema")
    unused = [name for name in of_training if any(config.get(name) for config in sources)]
    if not any(config.get("data") for config in sources):
        way_out = f"lightning predict --ckpt {shlex.quote(place)} IMAGES takes it with image files or folders"
        raise UserError(f"ckpt={place} is no run, whose images are known: give --config with data ({way_out})")
    if trained.checkpoint["test_view"].get("multi_label"):
        raise UserError(f"ckpt={place} gives several labels an image, the data has one (lightning predict shows them)")
    notes = [f"of the config, data, metrics and trainer are used; {', '.join(unused)} are not"] if unused else []
    return [_without(config, *of_training) for config in sources], trained._replace(notes=(*trained.notes, *notes))


def _for_its_data(trained: Trained, first: Config, merged: Config) -> Trained:
    """Prepares images of another class of data as the model knows them, where the user says nothing else about them.

    Args:
        trained: the model; comes back with sentences on what was taken from either.
        first: the config of its run, without data for weights of others.
        merged: the config, which is changed.

    Raises:
        UserError: data of the same class is split so that the model is measured on images that it was trained on.
    """
    before, data = (as_map(config.get("data")) for config in (first, merged))
    learned_from, name = (str(one.get("class_path", DEFAULT_CLASSES["data"])) for one in (before, data))
    if before and is_same_class(learned_from, name):
        refuse(other_cuts(before, data))
        return trained
    known = options_of_data(name)
    view = trained.checkpoint.get("test_view") or {}
    other_channels = () if "in_channels" in known or view.get("in_channels", 3) == 3 else ("mean", "std")  # do not fit
    view = _without(view, "class_names", "multi_label", *other_channels, *{"in_channels"} - known)
    given = {name: scalar(data[name]) for name in view if name in data}
    facts = facts_of_images(given)
    if "image_size" in view:
        size = pair(view["image_size"])
        view = for_size(view, pair(facts.get("image_size", size))) | {"image_size": side(size)}
    if "centre_share" in data:  # which would have no effect
        view.pop("resize", None)
    taken = {name: value for name, value in view.items() if name in known and name not in data}
    merged["data"] = {**data, **taken}
    shown = ", ".join(f"data.{key}={word(value)}" for key, value in taken.items())
    notes = [f"{shown} as in the source"] if taken else []
    notes += [
        f"data.{key} is not that of the source, {word(value)}"
        for key, value in view.items()
        if key not in taken and (given | facts).get(key) != parse_yaml(word(value), key)
    ]
    return trained._replace(notes=(*trained.notes, *notes))


def other_cuts(before: Config, data: Config) -> list[str]:
    """Returns what is wrong with measured images that are cut in another way from what a model learned from."""
    problems = []
    for key in ("split_seed", "val_share", "test_share"):
        cut, other = before.get(key), data.get(key, before.get(key))
        if scalar(cut) != scalar(other):
            images = "and so from images that this one has for its measurement (leave it out)"
            problems.append(f"data.{key}={other}: the model learned from the split of {key}={cut}, {images}")
    return problems


def options_of_data(name: Any) -> set[str]:
    """Returns the options of a class of data, with those beside a dataset of others."""
    kind = class_of(name)
    is_module = issubclass(kind, LightningDataModule | LightningModule)
    return {*signature_of(kind).options, *(() if is_module else signature_of(WrappedDataset).options)}


def _heads(sources: Sequence[Config]) -> Config | None:
    """Returns the heads of the network that configs name, the last one of all; None if none does."""
    given = [model["num_heads"] for config in sources if "num_heads" in (model := flatten(config.get("model")) or {})]
    return {"num_heads": scalar(given[-1])} if given else None


def _without(config: Config, *names: str) -> Config:
    return {key: value for key, value in config.items() if str(key).rstrip("+") not in names}


def _trained_by_run(place: str, *, as_it_is: bool, heads: Config | None, trust: bool) -> Trained:
    """Returns the checkpoint of a run, whose config says which images there are, or the weights of others."""
    way_out = ""
    try:
        if place.partition(":")[0] not in (*LIBRARIES, "hf-hub"):  # these would be fetched
            path = find_checkpoint(place)
            checkpoint = read_checkpoint(path)
            if as_it_is or is_ours(checkpoint) or checkpoint.get("test_view"):
                return Trained(path, checkpoint)
            way_out = " (--module=CLASS, the LightningModule that wrote it, loads it as it is)"
    except UserError as error:
        if not Path(place).exists():  # nothing is fetched twice
            raise
        try:
            read_weights(place, "ckpt")
        except UserError:  # it is no source at all
            raise error from error.__cause__
    try:
        return _trained(place, {}, heads=heads, trust=trust)
    except UserError as error:
        heads_of_config = functools.partial(re.sub, r"--config='\{num_\w*heads: \.\.\.\}'", "--model.num_heads=...")
        raise UserError(heads_of_config(text) + way_out for text in error.problems) from error


def _trained(place: str, facts: Config, *, heads: Config | None = None, trust: bool) -> Trained:
    """Returns any trained model as the checkpoint that a run of it would have."""
    try:
        file = read_weights(place, "ckpt")
        if file.checkpoint is not None and file.path is not None and not facts:
            return Trained(file.path, file.checkpoint)
        source = open_source(file, make_network=network_in_file, config=facts, heads=heads, trust=trust, key="ckpt")
    except UserError as error:
        raise UserError(as_flag(problem) for problem in error.problems) from error
    names = source.class_names or [str(label) for label in range(getattr(source.network, "num_classes", 0))]
    if not names:
        raise UserError(f"ckpt={place} gives features and no classes (lightning embed writes them)")
    model = (file.config or {}).get("model") if source.family in ("run", OURS) else None
    if model is None:
        model = model_config(source.network) if source.vit is not None else model_of_library(place)
    state = {f"network.{name}": tensor for name, tensor in source.network.state_dict().items()}
    checkpoint = {"config": {"model": model}, "state_dict": state, "test_view": {**source.view, "class_names": names}}
    return Trained(Path(place.partition(":")[2] or place), checkpoint, tuple(map(as_flag, source.notes)))


def _config_of_source(sources: Sequence[Config], *, trust: bool) -> tuple[InitialWeights | None, Config]:
    """Returns the source of the initial weights and its architecture; nothing without one."""
    given = [config["init_from"] for config in sources if "init_from" in config]
    if not given or given[-1] is None:
        return None, {}
    models = [config["model"] for config in sources if config.get("model")]
    named = [str(name) for model in models if (name := as_map(model).get("class_path")) is not None]
    given_model: Config = functools.reduce(merge, (model for model in models if isinstance(model, dict)), {})
    attention = given_model.get("attention")
    heads = {"num_heads": given_model.get("num_heads")}
    heads["dim_head"] = attention.get("dim_head") if isinstance(attention, dict) else None
    preset = PRESETS.get(str(given_model.get("preset")).partition("/")[0])
    if preset is not None and heads["num_heads"] is None:
        heads["num_heads"] = preset[2]
    initial = open_initial_weights(str(given[-1]), network_in_file, trust=trust)
    if trust and initial.file.path is not None and (folder := run_folder_of(initial.file.path)) is not None:
        also_search(folder)
    for_vit = not named or find_class(full_name(named[-1])) is ViT
    initial = initial.described(for_vit=for_vit, heads=heads)
    return initial, {"model": flatten(initial.model)}


def _with_its_images(initial: InitialWeights, merged: Config) -> InitialWeights:
    """Fills in size, mean and std of the images as those of a source where the config gives none.

    Only for data that takes images of any size; ``predict`` takes the same for the source itself.

    Args:
        initial: the source; comes back with a sentence on what was taken from it.
        merged: the config, which is changed.
    """
    data = as_map(merged.get("data"))
    if not issubclass(class_of(data.get("class_path")), ImageSet):
        return initial
    taken = {name: value for name, value in initial.images.items() if data.get(name) is None}
    merged["data"] = {**data, **taken}
    shown = {name: f"data.{name}={word(value)}" for name, value in taken.items()}
    guessed = [shown.pop(name) for name in ("mean", "std") if initial.usual and name in shown]
    notes = [f"{' and '.join(shown.values())} as in the source"] if shown else []
    if guessed:
        notes.append(f"{' and '.join(guessed)} as for most weights of {initial.usual}; nothing beside the file tells")
    return replace(initial, notes=(*initial.notes, *notes))


def merge(base: Config, config: Config, group: str = "") -> Config:
    """Returns ``base`` updated by ``config``, without arguments of a replaced class; ``key+`` appends to a list.

    Args:
        base: the earlier config.
        config: the later one.
        group: dotted key of what the configs are the arguments of; empty for whole configs.
    """
    merged = dict(base)
    for key, value in config.items():
        if str(key).endswith("+"):
            merged[key[:-1]] = [*as_list(merged.get(key[:-1])), *as_list(value)]
        else:
            merged[key] = _merge_value(merged.get(key), value, f"{group}.{key}" if group else key)
    return merged


def _merge_value(before: Any, value: Any, key: str) -> Any:
    """Returns a value where a later config changes it: arguments alone leave the class as it was.

    Another class has its own arguments, and those of the earlier one that stay beside any class.
    """
    if isinstance(before, str) and isinstance(value, dict) and "class_path" not in value:
        return {"class_path": before, **value}
    is_class = isinstance(value, dict) or (
        isinstance(value, str) and (can_be_class(value) or key not in BESIDE_OTHER_CLASS)
    )
    if not isinstance(before, dict) or not is_class:
        return merge({}, value) if isinstance(value, dict) else value
    if isinstance(value, dict) and _keeps_class(before, value, key):
        return merge(before, value, key)
    kept = {name: item for name, item in before.items() if name in BESIDE_OTHER_CLASS.get(key, ())}
    if isinstance(value, str):
        return {**kept, "class_path": value} if kept else value
    return {**kept, **merge({}, value)}


def _keeps_class(before: Config, value: Config, key: str) -> bool:
    """Whether the arguments of a later config are for the class of an earlier one."""
    old, new = before.get("class_path", DEFAULT_CLASSES.get(key)), value.get("class_path")
    if new is None:  # optimizer.name chooses one of ours again
        return old is None or key not in BESIDE_OTHER_CLASS or "name" not in value
    return old is not None and is_same_class(str(old), str(new))


def config_of_flag(key: str, value: str) -> Config:
    """Returns a flag as a config; ``--model=CLASS`` and ``--data=CLASS`` name a class."""
    # other values stay words, which are read as what the option's type needs
    quoted = len(value) > 1 and value[0] == value[-1] == '"'
    given: Any = flatten(parse_yaml(value, f"{key}={value}")) if value[:1] in ("[", "{") or quoted else value
    given = None if value in ("null", "None") else given  # the second as Python, and so agents of sweeps, write it
    parts = [part for part in key.split(".") if part not in ARGUMENTS]
    if len(parts) == 1 and parts[0] in ("module", *DEFAULT_CLASSES) and isinstance(given, str):
        given = {"class_path": given}
    for part in reversed(parts):
        given = {part: given}
    config: Config = given
    return config
