"""The text of ``lightning COMMAND --help`` for commands that take a config."""

from __future__ import annotations

import inspect
import re
import textwrap
from argparse import Action
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import Trainer

from vit_lightning.config.files import own_classes
from vit_lightning.config.options import Settings
from vit_lightning.config.parser import OWN_TRAINER_ARGUMENTS, add_plain_options, set_trainer_defaults
from vit_lightning.data.base import ImageData
from vit_lightning.data.digits import Digits
from vit_lightning.models.vit import ViT

WIDTH = 100

INTRODUCTION = """Options are written the same in a config and as flags. The model and data options below are those of
the default classes, ViT and Digits; with another model.class_path or data.class_path ({data}), its arguments take
their place. A class is given as MODULE.NAME, or NAME for those of vit_lightning, and takes arguments of its own
(--model.attention.dropout=0.1)."""

TYPES = {bool: "true | false", int: "int", float: "float", str: "text", Path: "path", dict: "mapping"}


def help_text(command: str, positional: str) -> str:
    """Returns all options of a command with types, defaults and explanations."""
    usage = " ".join(
        filter(None, ("lightning", command, positional, "[--config CONFIG.yaml ...] [--OPTION=VALUE ...]"))
    )
    parser = _parser_with_arguments_of_classes(command)
    defaults = parser.get_defaults()
    lines = [f"usage: {usage}", "", *_wrapped(INTRODUCTION.format(data=", ".join(own_classes(ImageData))), "")]
    for group in parser._action_groups:
        options = [action for action in group._group_actions if _is_option(action)]
        if options:
            lines += ["", f"{group.title}:".replace("``", "")]
        for action in options:
            lines += _explained(action, defaults.get(action.dest))
    return "\n".join(lines)


def _parser_with_arguments_of_classes(command: str) -> ArgumentParser:
    """Returns a parser that knows the arguments of the default classes as options of their own."""
    parser = ArgumentParser()
    parser.add_argument("--config", type=str, help="config file; several are merged in order, and flags come last")
    if command == "fit":
        text = "name of an option that may differ from that of the resumed run, such as optimizer.lr; may be repeated"
        parser.add_argument("--allow-config-change", type=str, help=text)
    parser.add_argument(
        "--trust-config", type=bool, default=False, help="configs may name, and so run, classes of any package"
    )
    add_plain_options(parser, command)
    for name, default in (("model", ViT), ("data", Digits), *((n, type(s)) for n, s in Settings()._asdict().items())):
        parser.add_class_arguments(default, name)
    parser.add_class_arguments(Trainer, "trainer", skip=OWN_TRAINER_ARGUMENTS)
    set_trainer_defaults(parser)
    return parser


def _is_option(action: Action) -> bool:
    """Whether it is neither a file for a whole group nor the help of one class, which jsonargparse adds."""
    return hasattr(action, "_typehint") and not action.option_strings[0].endswith(".help")


def _explained(action: Any, default: Any) -> list[str]:
    kind = " | ".join(dict.fromkeys(_kinds(action._typehint)))
    if isinstance(default, Namespace | dict):
        default = default["class_path"]
    shown = "" if default is None else f" (default: {str(default).lower() if isinstance(default, bool) else default})"
    text = re.sub(r":\w+:`~?([^`]+)`", r"\1", action.help or "").replace("``", "")  # Lightning writes reStructuredText
    if shown:
        text = re.sub(r"\s+Default: \S+\s*$", "", text)
    if classes := list(_own_choices(action._typehint)):
        text = f"{text.rstrip('.')}: {', '.join(classes)}."
    return [*_wrapped(f"{action.option_strings[0]} {kind}{shown}", "  "), *_wrapped(text, " " * 8)]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _kinds(hint: Any) -> Iterator[str]:
    """Yields the values that an option of a type takes, in words; null is left out."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for part in inner:
            yield from _kinds(part)
    elif origin is Literal:
        yield from map(str, inner)
    elif origin is tuple:
        yield f"[{', '.join(' | '.join(_kinds(part)) for part in inner)}]"
    elif inspect.isclass(origin) and issubclass(origin, list):
        yield f"list of {' | '.join(dict.fromkeys(_kinds(inner[0])))}"
    elif hint is not NoneType:
        yield TYPES.get(origin or hint, "class")


def _own_choices(hint: Any) -> Iterator[str]:
    """Yields our own classes that a type allows, if it is one of our own."""
    for part in get_args(hint) or (hint,):
        if get_args(part):
            yield from _own_choices(part)
        elif inspect.isclass(part) and part.__module__.startswith("vit_lightning."):
            yield from own_classes(part)
