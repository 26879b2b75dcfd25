"""The help of commands, from the signatures and docstrings of what they call and of the classes that a config names.

``--help`` lists all options with a line each; ``--help.GROUP`` explains those of one group in full.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, is_typeddict

from docstring_parser import parse
from lightning.pytorch import Trainer

from vit_lightning.config.build import option_groups, trainer_options
from vit_lightning.config.files import SWITCHES, find_config, split_words
from vit_lightning.config.names import own_classes
from vit_lightning.config.options import COMPILES, TRAINED, ConfigOptions, RunOptions
from vit_lightning.config.own_files import use_files
from vit_lightning.config.signatures import REQUIRED, called_with, can_be_written, signature_of
from vit_lightning.config.typed import LISTS, MAPPINGS, Reader
from vit_lightning.errors import UserError, refuse

WIDTH = 118

INTRODUCTION = """Options are written the same in a config and as flags. A class is given as MODULE.NAME, or NAME for
those of vit_lightning, and takes arguments of its own (--model.attention.dropout=0.1). model.image_size, in_channels
and num_classes come from the data. The options below are those of the default classes, ViT and Digits;
--model.class_path, --data.class_path, --module.class_path (a LightningModule),
--optimizer.class_path and --loss.class_path choose others, also from files of your own beside the config."""

MORE = """Explained in full: lightning {} --help.GROUP (GROUP: {}); with --help.GROUP=CLASS those of
another class."""

CKPT = """run folder (its best checkpoint), checkpoint file, or wandb:ENTITY/PROJECT/ARTIFACT:ALIAS"""
WITH_IMAGES = """; with images also a file or folder of weights, timm:NAME, torchvision:NAME, hf-hub:OWNER/NAME, of
which --config='{num_heads: 3, mean: [...], std: [...]}' tells what they do not"""

WORDS: dict[Any, str] = {bool: "true | false", str: "string", Path: "path", int: "int", float: "float", Any: "value"}
WORDS |= {timedelta: "time"}

USED = {
    **dict.fromkeys(("check-data", "show-batch"), ("data",)),
    **dict.fromkeys(("validate", "test", "predict"), ("data", "trainer")),
    "summary": ("model", "data", "lora"),
}
"""Groups of options that a command uses, where it does not use all: a trained model has its own, in its checkpoint."""

OF_TRAINER = {
    "precision": """auto takes bf16-mixed where the hardware multiplies bfloat16 fast (GPUs from Ampere on, CPUs with
    AMX, of AMD with AVX512-BF16), else 32-true; a resumed run keeps the precision it began with. With
    bf16-mixed and 16-mixed weights are in float32, but products are not, nor the tokens between blocks without
    float32_residual of a ViT; with bf16-true nothing is.""",
    "deterministic": """On a GPU a resumed run ends in the same bits only with true, which costs speed: the fastest
    kernels add in any order.""",
}
"""What is said of options of the Trainer beside Lightning's words."""

NOT_USED = {"resume", "init_from", "reset_head", "freeze", "test", "experiment"}
NOT_USED |= {"pictures_every_n_epochs", "watchdog_minutes"}
"""General options that only commands that train use."""


class HelpItem(NamedTuple):
    """One option of a class, in words."""

    name: str
    kind: str
    default: str
    text: str

    @property
    def value(self) -> str:
        """Returns what is written behind its name, and the default; nothing for a switch."""
        if self.name.replace("_", "-") in (switch.replace("_", "-") for switch in SWITCHES):
            return ""
        return f" {self.kind}{f' (default: {self.default})' if self.default else ''}"


def help_text(command: str, summary: str, function: Callable[..., Any], arguments: Sequence[str]) -> str:
    """Returns all options of a command, a line each with type and default; for ``--help.GROUP`` that group in full.

    Args:
        command: the command.
        summary: its line in the list of commands.
        function: its function.
        arguments: the command line.
    """
    usage, own = f"usage: {usage_of(command, function)}", command_options(function)
    first = next(iter(inspect.signature(called_with(function)).parameters.values()))
    if first.name != "experiment":
        return "\n".join([usage, "", summary, "", *map(explained, own)]).rstrip()
    flags, _ = split_words([word for word in arguments if word not in ("-h", "--help")])
    asked = [(key.removeprefix("help."), value) for key, value in flags if key.startswith("help.")]
    general = {option.name: option for option in general_options(command)}
    instead = first.default is not REQUIRED  # of a config
    for option in () if instead else own:
        general.setdefault(option.name, option)
    if asked:
        in_full = "\n".join(["general:", "", *map(explained, general.values())])
        return "\n\n".join(in_full if group == "general" else _in_full(group, value, flags) for group, value in asked)
    groups = {group: kind for group, kind in option_groups().items() if group in USED.get(command, option_groups())}
    more = MORE.format(command, "|".join(["general", *groups]))
    lines = [usage, "", *_wrapped(INTRODUCTION, ""), *_wrapped(more, ""), "", "general:"]
    lines += [_line("", option) for option in general.values()]
    for group, kind in groups.items():
        lines += ["", f"{group}:", *(_line(f"{group}.", option) for option in help_items(kind))]
    if instead:
        lines += ["", "in place of all these:", *map(explained, own)]
    return "\n".join(lines)


def command_options(function: Callable[..., Any]) -> list[HelpItem]:
    """Returns a command's own options, with hyphens; the experiment is made of those of a config."""
    target = called_with(function)
    words = [name for name, one in inspect.signature(target).parameters.items() if one.kind is one.VAR_POSITIONAL]
    found = [HelpItem(f"*{name}", "path", "", _texts(target)[f"*{name}"]) for name in words]
    found += [option for option in help_items(target) if option.name != "experiment"]
    return [option._replace(name=option.name.replace("_", "-")) for option in found]


def usage_of(command: str, function: Callable[..., Any]) -> str:
    """Returns the usage line of a command, by the arguments of its function."""
    parameters = inspect.signature(called_with(function)).parameters.values()
    words = []
    for one in parameters:
        name = one.name.upper()
        if one.kind is one.VAR_POSITIONAL:
            words.append(f"[{name} ...]")
        elif one.kind is one.POSITIONAL_OR_KEYWORD and one.name != "experiment":
            words.append(name if one.default is REQUIRED else f"[{name}]")
        elif one.kind is one.KEYWORD_ONLY and one.default is REQUIRED:
            words.append(f"--{one.name.replace('_', '-')}={name}")
    words += ["--ckpt RUN_FOLDER"] if command in TRAINED else []
    words += ["[--config CONFIG.yaml ...]"] if any(one.name == "experiment" for one in parameters) else []
    return " ".join(["lightning", command, *words, "[--OPTION=VALUE ...]"])


def general_options(command: str) -> list[HelpItem]:
    """Returns the options that belong to no group."""
    found = [HelpItem("config", "path", "", "config file; several are merged in order, and flags come last")]
    if command == "fit":
        text = "option that may differ from that of the resumed run, such as optimizer.lr; may be repeated"
        found.append(HelpItem("allow-config-change", "string", "", text))
    found += help_items(RunOptions)
    if command in TRAINED:
        found.append(HelpItem("ckpt", "string", "", CKPT + WITH_IMAGES * (command == "predict")))
    found += help_items(ConfigOptions)
    unused = NOT_USED if command in USED else {"resume"} if command != "fit" else set()
    unused = unused | ({"compile"} if command not in COMPILES else set())
    return [option for option in found if option.name not in unused]


def _in_full(group: str, value: str, flags: Sequence[tuple[str, str]]) -> str:
    """Returns all options of a group with their explanations."""
    groups, named = option_groups(), value if value != "true" else ""
    if not named and group not in groups:
        hint = f"choose {', '.join(['general', *groups])}, or give a class, such as --help.model.attention=MSSA"
        raise UserError(f"help.{group}: there is no such group ({hint})")
    kind: Any = groups.get(group)
    if named:
        use_files([*(find_config(path).parent for key, path in flags if key == "config"), Path.cwd()])
        reader = Reader()
        found = reader.find(kind, {"class_path": named}, f"help.{group}")
        refuse(reader.problems)
        kind = found.target if found is not None else kind
    about = _plain((inspect.getdoc(kind) or "").partition("\n\n")[0])
    lines = [f"{group}: {kind.__name__}", *_wrapped(about, ""), ""]
    return "\n".join([*lines, *(explained(option, f"{group}.") for option in help_items(kind))])


def explained(option: HelpItem, prefix: str = "") -> str:
    """Returns an option with its whole explanation."""
    name = f"{option.name[1:].upper()} ..." if option.name.startswith("*") else f"--{prefix}{option.name}"
    return "\n".join([*_wrapped(f"{name}{option.value}", "  "), *_wrapped(option.text, " " * 8)])


def help_items(target: Any) -> list[HelpItem]:
    """Returns the arguments of a class or a function in the words of its docstring, or of the base that has them."""
    options, more = (trainer_options(), OF_TRAINER) if target is Trainer else (signature_of(target).options, {})
    texts, found = _texts(target), []
    for name, option in options.items():
        noted = " ".join(text for text in getattr(option.kind, "__metadata__", ()) if isinstance(text, str))
        text = _plain(f"{texts.get(name) or noted} {more.get(name, '')}")
        choices = [one for base in _classes(option.kind) for one in own_classes(base)]
        text = f"{text.rstrip('.')}: {', '.join(choices)}." if choices else text
        kind = " | ".join(dict.fromkeys(_kinds(option.kind)))
        found.append(HelpItem(name, kind, _shown(option.default), text))
    return found


def _texts(target: Any) -> dict[str, str]:
    """Returns the explanations of arguments by name; a class may have its own words for those of its bases."""
    bases = reversed(target.__mro__) if inspect.isclass(target) else ()
    parts = [part for base in bases for part in (base, vars(base).get("__init__"))] or [target]
    params = [item for part in parts for item in parse(inspect.cleandoc(part.__doc__ or "")).params]
    return {item.arg_name: _plain(item.description or "") for item in params}


def _classes(kind: Any) -> Iterator[Any]:
    """Yields the classes of ours in a type."""
    if inspect.isclass(kind) and kind.__module__.startswith("vit_lightning."):
        yield kind
    for part in get_args(kind):
        yield from _classes(part)


def _plain(text: str) -> str:
    """Returns an explanation without reStructuredText and the default, which is shown anyway."""
    text = " ".join(re.sub(r":\w+:`~?([^`]+)`", r"\1", text).replace("`", "").split())
    return re.sub(r"\s*Default: \S+$", "", text)


def _shown(default: Any) -> str:
    """Returns a default as a config has it, a class by its name; empty if there is none or it is null."""
    if default is REQUIRED or default in (None, (), [], {}):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return str(default) if can_be_written(default) else str(getattr(default, "__name__", ""))


def _kinds(kind: Any) -> Iterator[str]:
    """Yields the values that an option of a type takes, in words; null is left out."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType, Annotated):
        for part in parts[:1] if origin is Annotated else parts:
            yield from _kinds(part)
    elif origin is Literal or (inspect.isclass(kind) and issubclass(kind, Enum)):
        yield from map(str, parts or kind.__members__)
    elif origin is tuple and parts and parts[1:] != (...,):
        yield f"[{', '.join(' | '.join(_kinds(part)) for part in parts)}]"
    elif origin in (*LISTS, tuple):
        yield f"list of {' | '.join(dict.fromkeys(_kinds((*parts, Any)[0])))}"
    elif origin in MAPPINGS or is_typeddict(kind):
        yield "mapping"
    elif kind not in (None, NoneType):
        yield WORDS.get(kind, "class")


def _line(prefix: str, option: HelpItem) -> str:
    """Returns the line of one option: its first sentence, cut where the line ends."""
    left = f"  --{prefix}{option.name}{option.value}"
    left = left if len(left) < WIDTH - 4 else left[: WIDTH - 8].rpartition(" ")[0]
    text = re.split(r"(?<=\w)[.;:](?:\s|$)", option.text)[0]
    return textwrap.shorten(f"{left:<50}".replace(" ", "\0") + f" {text}", WIDTH, placeholder=" ...").replace("\0", " ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
