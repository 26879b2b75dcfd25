"""``resolve``: from a command line to one checked experiment, or to all of its problems."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from vit_lightning.config import from_weights
from vit_lightning.config.build import build
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import (
    CONFIG_FILES,
    Config,
    as_map,
    find_config,
    read_config,
    refuse_words,
    split_words,
    without_nulls,
)
from vit_lightning.config.lightning_cli import as_ours, of_the_module
from vit_lightning.config.merge import config_of_flags, merge, overruled_preset
from vit_lightning.config.options import GROUPS, TRAINED, RunOptions
from vit_lightning.config.own_files import folders_in_use, use_files
from vit_lightning.config.together import Merged, secret_problems
from vit_lightning.errors import UserError, gathered, near, refuse, unknown
from vit_lightning.storage.checkpoint_files import BEST, run_folder_of
from vit_lightning.storage.parsing import parse_yaml


def resolve(arguments: Sequence[str], command: str = "fit", folders: Sequence[Path] = ()) -> Experiment:
    """Returns the experiment of a command line: config files, flags, defaults, and what the model gets from the data.

    A command that uses a trained model starts from the config in its checkpoint. Where ``predict`` is given image
    files, they replace the data of that config, which need not be there.

    Args:
        arguments: the command line, without the command.
        command: the command.
        folders: more folders with files of the user's own, beside those of the configs and the working folder.

    Raises:
        UserError: all problems, each with option, value and choices.
    """
    flags, images = _words(arguments, command)
    allowed = tuple(key for name, value in flags if name == "allow-config-change" for key in value.split(","))
    if allowed and command != "fit":
        raise UserError(f"allow-config-change={','.join(allowed)} is for a run that is resumed, with fit")
    options = [(key, value) for key, value in flags if key != "allow-config-change"]
    told: Config = {}
    for flag in [flag for flag in options if images and flag[0] == "config" and flag[1].startswith("{")]:
        told |= parse_yaml(flag[1], f"config={flag[1]}")
        options.remove(flag)
    trust = dict(flags).get("trust", "").lower() == "true"
    use_files(_folders(options, folders, trust=trust))
    merged = merge_all(options, command, told=told if images else None, trust=trust)
    refuse(secret_problems(merged.config))
    return build(merged, command, allowed_changes=allowed, images=images, files=folders_in_use())


def merge_all(
    flags: Sequence[tuple[str, str]], command: str, *, told: Config | None = None, trust: bool = False
) -> Merged:
    """Merges what a command line names: what trained models say, then files in order, then flags.

    Args:
        flags: options and values of the command line, in order.
        command: the command; if it uses a trained model, the config of its checkpoint comes first.
        told: where image files replace the data of that config: what is not known about the model.
        trust: whether files of weights may name any class.
    """
    names = [value for key, value in flags if key == "config"]
    problems: list[str] = []
    sources: list[Config] = []
    for name in names:
        with gathered(problems):
            sources.append(as_ours(_read(name), problems))
    with gathered(problems):
        sources.append(as_ours(_with_files(config_of_flags(flags), Path()), problems))
    complete = len(sources) > len(names)
    opened, trained, initial = None, None, None
    configs: Sequence[Config] = sources
    with gathered(problems):
        if command in TRAINED:
            opened, configs = from_weights.with_checkpoint(flags, sources, told, trust=trust)
        else:
            initial, configs = from_weights.with_source(sources, trust=trust)
    merged: Config = {}
    for source in configs:
        config = of_the_module(source, merged)
        problems += overruled_preset(as_map(config.get("model")), as_map(merged.get("model")))
        merged = merge(merged, config)
    merged = without_nulls(merged, *GROUPS)  # --loss=null leaves it out
    if command in TRAINED:
        merged.pop("ckpt", None)  # it has been read
    if names and "experiment" not in merged:
        merged["experiment"] = Path(names[-1]).stem
    if initial is not None:
        initial = from_weights.fill_from_source(initial, merged)
    if opened is not None:
        with gathered(problems):
            trained = from_weights.fill_from_trained(opened, configs[0], merged)
    with gathered(problems):
        from_weights.fill_module(opened, merged, trust=trust)
    return Merged(merged, problems, trained, initial, complete and (trained is not None or command not in TRAINED))


def _read(name: str) -> Config:
    """Returns a config file that a command line names; a group with nothing under it says nothing."""
    path = find_config(name)
    config = read_config(path)
    if {"method", "parameters"} <= config.keys():
        raise UserError(f"config={name} is a sweep of W&B, not a config: wandb sweep {shlex.quote(name)}")
    if {"opt", "sched", "epochs"} <= config.keys():
        table = "the guide's page coming_from.md has a table of its options and ours"
        raise UserError(f"config={name} holds arguments of timm's train.py, it is no config: {table}")
    if "compare" in config:
        what = "the plan of an ablation, not a config"
        raise UserError(f"config={name} is {what}: lightning ablate {shlex.quote(name)}")
    flags_alone = [key for key in RunOptions.__dataclass_fields__ if key in config]
    refuse(f"config={name}: {key} is no option of a config (give --{key}, for one call)" for key in flags_alone)
    return _with_files(without_nulls(config, *GROUPS, "lr_scheduler"), path.parent)


def _with_files(config: Config, folder: Path) -> Config:
    """Returns a flat config with the files that it names in place of groups: ``model: model.yaml``, as LightningCLI."""
    found = dict(config)
    for key in GROUPS:
        given = as_map(config.get(key))
        if isinstance(name := given.get("class_path"), str) and name.endswith(CONFIG_FILES):
            more = {option: value for option, value in given.items() if option != "class_path"}
            found[key] = merge(read_config(folder / name, key), more)
    return found


def _words(arguments: Sequence[str], command: str) -> tuple[list[tuple[str, str]], tuple[Path, ...]]:
    """Returns the flags and the image files of a command line."""
    flags, words = split_words(arguments, command)
    refuse_words(words if command != "predict" else [word for word in words if word.startswith("-")])
    bare = [word for word in words if word.endswith(CONFIG_FILES)]
    refuse(f"{word} is no image and no checkpoint (a config is given as --config={word})" for word in bare)
    named = {key.split(".")[0] for key, _ in flags}
    if command not in TRAINED and not named & {"config", "model", "data", "module"}:
        trained = " or --ckpt RUN_FOLDER" if command == "summary" else ""
        hint = "lightning configs lists those of the package"
        misspelt = [unknown(key, value, "", ("config",)) for key, value in flags if near(key, ("config",), 0.7)]
        raise UserError([*misspelt, f"give a config: lightning {command} --config digits{trained} ({hint})"])
    return flags, tuple(Path(word) for word in words)


def _folders(flags: Sequence[tuple[str, str]], more: Sequence[Path], *, trust: bool) -> list[Path]:
    """Returns the folders whose Python files a config may name: of the trained run, of the configs, the working folder.

    The folder of the run itself comes last: for the other processes of a run, which may not know the folder of a plan.
    """
    given = [(key, Path(value)) for key, value in flags]
    trained = [run_folder_of(path / BEST if path.is_dir() else path) for key, path in given if key == "ckpt" and trust]
    configs = [find_config(path).parent for key, path in reversed(given) if key == "config"]
    return [*filter(None, trained), *configs, *more, Path.cwd(), *(path for key, path in given if key == "out")]
