"""``resolve``: from a command line to one checked experiment, or to all of its problems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vit_lightning.config.build import build
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import Config, refuse_words, split_words
from vit_lightning.config.merge import merge_all
from vit_lightning.config.names import near
from vit_lightning.config.options import TRAINED
from vit_lightning.config.own_files import folders_in_use, use_files
from vit_lightning.config.shipped import CONFIG_FILES, find_config
from vit_lightning.config.together import secret_problems
from vit_lightning.config.typed import unknown
from vit_lightning.errors import UserError
from vit_lightning.limits import refuse
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
    facts: Config = {}
    for flag in [flag for flag in options if images and flag[0] == "config" and flag[1].startswith("{")]:
        facts |= parse_yaml(flag[1], f"config={flag[1]}")
        options.remove(flag)
    trust = dict(flags).get("trust", "").lower() == "true"
    use_files(_folders(options, folders, trust=trust))
    merged = merge_all(options, command, facts=facts if images else None, trust=trust)
    refuse(secret_problems(merged.config))
    return build(merged, command, allowed_changes=allowed, images=images, files=folders_in_use())


def _words(arguments: Sequence[str], command: str) -> tuple[list[tuple[str, str]], tuple[Path, ...]]:
    """Returns the flags and the image files of a command line."""
    flags, words = split_words(arguments)
    refuse_words(words if command != "predict" else [word for word in words if word.startswith("-")])
    pairs = zip(["", *arguments], arguments, strict=False)
    bare = [word for before, word in pairs if word.endswith(CONFIG_FILES) and before != "--config" and word[:2] != "--"]
    if command == "predict" and bare:
        raise UserError(f"{word} is no image and no checkpoint (a config is given as --config={word})" for word in bare)
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
