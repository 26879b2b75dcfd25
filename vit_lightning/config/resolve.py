"""``resolve``: from a command line to one checked experiment, or to all of its problems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentError

from vit_lightning.config.build import Unfit, build
from vit_lightning.config.check_options import find_problems, remove
from vit_lightning.config.check_values import secret_problems
from vit_lightning.config.experiment import Experiment
from vit_lightning.config.files import Config, refuse_words, split_words
from vit_lightning.config.merge import merge_all
from vit_lightning.config.options import TRAINED
from vit_lightning.config.own_data import with_own_data
from vit_lightning.config.parser import make_parser
from vit_lightning.config.shipped import CONFIG_FILES, find_config
from vit_lightning.config.trust import Imports, restrict_imports, with_full_trainer_names
from vit_lightning.errors import UserError
from vit_lightning.storage.checkpoint_files import BEST, run_folder_of

PERMISSIONS = ("trust-config", "allow-config-change")
"""Flags that no config can hold, because it cannot vouch for itself."""


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
    flags, words = split_words(arguments)
    refuse_words(words if command != "predict" else [word for word in words if word.startswith("-")])
    trust, allowed = _permissions(flags, command)
    pairs = zip(["", *arguments], arguments, strict=False)
    bare = [word for before, word in pairs if word.endswith(CONFIG_FILES) and before != "--config" and word[:2] != "--"]
    if command == "predict" and bare:
        raise UserError(f"{word} is no image and no checkpoint (a config is given as --config={word})" for word in bare)
    options = [(key, value) for key, value in flags if key not in PERMISSIONS]
    named = {key.split(".")[0] for key, _ in flags}
    if command not in TRAINED and not named & {"config", "model", "data", "module"}:
        trained = " or --ckpt RUN_FOLDER" if command == "summary" else ""
        hint = "lightning configs lists those of the package"
        raise UserError(f"give a config: lightning {command} --config digits{trained} ({hint})")
    config, unreadable, replaced = merge_all(options, command, files=bool(words))
    config = with_full_trainer_names(config)
    imports = restrict_imports(config, trust=trust, folders=_folders(flags, folders))
    if unreadable:  # values cannot be checked without the rest of the config, but names of options can
        found, _ = find_problems(config, make_parser(command))
        raise UserError([*unreadable, *(problem.text for problem in found if not problem.missing)])
    if secrets := secret_problems(config):
        raise UserError(secrets)
    config, problems = with_own_data(config)
    if problems:
        found, _ = find_problems(config, make_parser(command))
        raise UserError([*problems, *(problem.text for problem in found if not problem.missing)])
    images = tuple(Path(word) for word in words)
    given = {"allowed_changes": allowed, "images": images, "replaced": tuple(replaced), "imports": imports}
    try:
        return build(config, command, given)
    except Unfit:
        raise
    except (ArgumentError, UserError) as error:
        fault = error
    raise UserError(_all_problems(config, command, imports, fault))


def _permissions(flags: Sequence[tuple[str, str]], command: str) -> tuple[bool, tuple[str, ...]]:
    """Returns whether configs are trusted, and which options may differ from those of a resumed run."""
    trust = dict(flags).get("trust-config", "false")
    if trust not in ("true", "false"):
        raise UserError(f"trust-config={trust} must be true or false")
    allowed = tuple(key for name, value in flags if name == "allow-config-change" for key in value.split(","))
    if allowed and command != "fit":
        raise UserError(f"allow-config-change={','.join(allowed)} is for a run that is resumed, with fit")
    return trust == "true", allowed


def _folders(flags: Sequence[tuple[str, str]], more: Sequence[Path]) -> list[Path]:
    """Returns the folders whose Python files a config may name: of the trained run, of the configs, the working folder.

    The folder of the run itself comes last: for the other processes of a run, which may not know the folder of a plan.
    """
    given = [(key, Path(value)) for key, value in flags]
    trained = [run_folder_of(path / BEST if path.is_dir() else path) for key, path in given if key == "ckpt"]
    configs = [find_config(path).parent for key, path in reversed(given) if key == "config"]
    return [*filter(None, trained), *configs, *more, Path.cwd(), *(path for key, path in given if key == "out")]


def _path(config: Config, text: str) -> tuple[str, ...]:
    """Returns the option of a flat config that a problem names; the whole list for one of an item."""
    path = text.split("=")[0].split(".")
    return tuple(path[:1] if isinstance(config.get(path[0]), list) else path)


def _all_problems(config: Config, command: str, imports: Imports, fault: Exception) -> list[str]:
    """Returns all problems of a refused config: names and types of options first, then the values of the others."""
    found, rest = find_problems(config, make_parser(command))
    problems = [problem.text for problem in found]
    unknown = {problem.path for problem in found}
    if ("model",) in unknown or ("data",) in unknown:  # what the default class has to say is about another one
        return problems
    for _ in range(3):  # some only show when the data's own problems are out of the way
        try:
            build(rest, command, {"imports": imports})
            break
        except Unfit as error:
            problems += error.problems
            break
        except UserError as error:
            problems += error.problems
            if any(text.startswith("module.") for text in error.problems):  # without its class, others would follow
                break
            paths = dict.fromkeys(_path(rest, text) for text in error.problems)
            if not all(remove(rest, path) for path in paths):
                break
        except ArgumentError:  # a required option is missing
            break
    return problems or [" ".join(str(fault).split())]
