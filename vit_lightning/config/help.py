"""The help of commands that take a config, read from the source of the classes: nothing heavy is imported for it.

``--help`` lists all options with a line each; ``--help.GROUP`` explains those of one group in full.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from docstring_parser import parse

import vit_lightning
from vit_lightning.config.files import SWITCHES, read_config, split_words, value_at
from vit_lightning.config.shipped import find_config
from vit_lightning.errors import UserError
from vit_lightning.limits import meant

WIDTH = 118

INTRODUCTION = """Options are written the same in a config and as flags. A class is given as MODULE.NAME, or NAME for
those of vit_lightning, and takes arguments of its own (--model.attention.dropout=0.1). model.image_size, in_channels
and num_classes come from the data. The options below are those of the default classes, ViT and Digits;
--model.class_path, --data.class_path, --module.class_path (a LightningModule),
--optimizer.class_path and --loss.class_path choose others, also from files of your own beside the config."""

MORE = """Explained in full: lightning {} --help.GROUP (GROUP: {}); with --help.GROUP=CLASS or --config CONFIG.yaml
those of another class."""

CKPT = """run folder (its best checkpoint), checkpoint file, wandb:ENTITY/PROJECT/ARTIFACT:ALIAS, or
https://...#sha256=CHECKSUM"""
WITH_IMAGES = """; with images also a file or folder of weights, timm:NAME, torchvision:NAME, hf-hub:OWNER/NAME, of
which --config='{num_heads: 3, mean: [...], std: [...]}' tells what they do not"""

TYPES = {"bool": "true | false", "str": "string", "Path": "path", "dict": "mapping", "Any": "value"}

OPTIONS = "vit_lightning.config.options"
FOREIGN = "vit_lightning.config.foreign"

USED = {
    **dict.fromkeys(("check-data", "show-batch"), ("data",)),
    **dict.fromkeys(("validate", "test", "predict"), ("data", "trainer")),
    "summary": ("model", "data", "lora"),
}
"""Groups of options that a command uses, where it does not use all: a trained model has its own, in its checkpoint."""

AUTO_PRECISION = """auto takes bf16-mixed where the hardware multiplies bfloat16 fast (GPUs from Ampere on, CPUs with
AMX, of AMD with AVX512-BF16, of ARM with BF16), else 32-true; a resumed run keeps the precision it began with. With
bf16-mixed and 16-mixed weights are in float32, but products are not, nor the tokens between blocks without
float32_residual of a ViT; with bf16-true nothing is."""

DETERMINISTIC = """On a GPU a resumed run ends in the same bits only with true, which costs speed: the fastest kernels
add in any order."""

NOT_USED = {"resume", "init_from", "reset_head", "freeze", "test", "experiment"}
NOT_USED |= {"pictures_every_n_epochs", "watchdog_minutes"}
"""General options that only commands that train use."""


PLAN = ast.arguments([], [ast.arg("plan")], None, [], [], None, [])
"""Arguments of ``ablate``, whose other options are those of a dataclass."""


class Option(NamedTuple):
    """One option of a class."""

    name: str
    kind: str
    default: str
    text: str
    module: str = ""
    """Module in which its type is written."""
    annotation: ast.expr | None = None

    @property
    def value(self) -> str:
        """Returns what is written behind its name, and the default; nothing for a switch."""
        if self.name.replace("_", "-") in (switch.replace("_", "-") for switch in SWITCHES):
            return ""
        return f" {self.kind}{f' (default: {self.default})' if self.default else ''}"


def help_text(command: str, summary: str, function: str, arguments: Sequence[str]) -> str:
    """Returns all options of a command, a line each with type and default; for ``--help.GROUP`` that group in full.

    Args:
        command: the command.
        summary: its line in the list of commands.
        function: its function, as ``commands.fit:fit``.
        arguments: the command line.
    """
    usage, own = f"usage: {usage_of(command, function)}", command_options(function)
    if not own or own[0].name != "experiment":
        lines = [usage, "", summary, "", *map(explained, own)]
        return "\n".join(lines).rstrip()
    flags, _ = split_words([word for word in arguments if word not in ("-h", "--help")])
    asked = [(key.removeprefix("help."), value) for key, value in flags if key.startswith("help.")]
    general = {option.name: option for option in general_options(command)}
    instead = "None" in ast.unparse(own[0].annotation) if own[0].annotation else False  # of a config
    for option in () if instead else own[1:]:
        general.setdefault(option.name, option)
    if asked:
        in_full = "\n".join(["general:", "", *map(explained, general.values())])
        return "\n\n".join(in_full if group == "general" else _in_full(group, value, flags) for group, value in asked)
    groups = [group for group in option_groups() if group in USED.get(command, option_groups())]
    more = MORE.format(command, "|".join(["general", *groups]))
    lines = [usage, "", *_wrapped(INTRODUCTION, ""), *_wrapped(more, ""), "", "general:"]
    lines += [_line("", option) for option in general.values()]
    for group in groups:
        lines += ["", f"{group}:", *(_line(f"{group}.", option) for option in options_of(*option_groups()[group]))]
    if instead:
        lines += ["", "in place of all these:", *map(explained, own[1:])]
    return "\n".join(lines)


def command_options(function: str) -> list[Option]:
    """Returns a command's own options, with hyphens; ``experiment``, the first, stands for those of a config."""
    return [option._replace(name=option.name.replace("_", "-")) for option in options_of(*_options_class(function))]


def usage_of(command: str, function: str) -> str:
    """Returns the usage line of a command, by the arguments of its function."""
    _, node = _defined(*_options_class(function))
    parts = node.args if isinstance(node, ast.FunctionDef) else PLAN
    words = [argument.arg.upper() for argument in parts.args if argument.arg != "experiment"]
    first = len(words) - len(parts.defaults)
    words = [word if number < first else f"[{word}]" for number, word in enumerate(words)]
    words += [f"[{parts.vararg.arg.upper()} ...]"] if parts.vararg else []
    keywords = zip(parts.kwonlyargs, parts.kw_defaults, strict=True)
    words += [f"--{word.arg.replace('_', '-')}={word.arg.upper()}" for word, default in keywords if default is None]
    words += ["--ckpt RUN_FOLDER"] if command in _constant("TRAINED") else []
    words += ["[--config CONFIG.yaml ...]"] if any(argument.arg == "experiment" for argument in parts.args) else []
    return " ".join(["lightning", command, *words, "[--OPTION=VALUE ...]"])


def _options_class(function: str) -> tuple[str, str]:
    """Returns the place of a function, such as ``commands.fit:fit``, or of the dataclass that is its only argument."""
    module, _, name = f"vit_lightning.{function}".partition(":")
    home, node = _defined(module, name)
    arguments = node.args.args if isinstance(node, ast.FunctionDef) else []
    if len(arguments) == 1 and not node.args.kwonlyargs and isinstance(arguments[0].annotation, ast.Name):
        kind = arguments[0].annotation.id
        if kind != "Experiment" and isinstance(_defined(home, kind)[1], ast.ClassDef):
            return home, kind
    return module, name


def option_groups() -> dict[str, tuple[str, str]]:
    """Returns the groups of options, each with module and name of its class."""
    classes = {key: _own(name.rpartition(".")[2]) for key, name in _constant("DEFAULT_CLASSES").items()}
    _, settings = _defined(OPTIONS, "Settings")
    fields = [node for node in settings.body if isinstance(node, ast.AnnAssign)]
    kinds = [ast.unparse(node.annotation).split(" | ")[0] for node in fields]  # ours come first
    named = {ast.unparse(node.target): (OPTIONS, kind) for node, kind in zip(fields, kinds, strict=True)}
    return {**classes, **named, "trainer": ("lightning.pytorch.trainer.trainer", "Trainer")}


def _constant(name: str) -> Any:
    """Returns a constant of ``options.py``, which is not imported for it."""
    return ast.literal_eval(_defined(OPTIONS, name)[1])


def _own(name: str) -> tuple[str, str]:
    return vars(vit_lightning)["_MODULES"][name], name


def general_options(command: str) -> list[Option]:
    """Returns the options that belong to no group."""
    found = [Option("config", "path", "", "config file; several are merged in order, and flags come last")]
    if command == "fit":
        text = "option that may differ from that of the resumed run, such as optimizer.lr; may be repeated"
        found.append(Option("allow-config-change", "string", "", text))
    found += options_of(OPTIONS, "RunOptions")
    if command in _constant("TRAINED"):
        found.append(Option("ckpt", "string", "", CKPT + WITH_IMAGES * (command == "predict")))
    found += options_of(OPTIONS, "ConfigOptions")
    unused = NOT_USED if command in USED else {"resume"} if command != "fit" else set()
    unused = unused | ({"compile"} if command not in _constant("COMPILES") else set())
    return [option for option in found if option.name not in unused]


def _in_full(group: str, value: str, flags: Sequence[tuple[str, str]]) -> str:
    """Returns all options of a group with their explanations."""
    named = value if value != "true" else _class_in_use(group, flags)
    if named:
        place = _place_of(named, [find_config(path) for key, path in flags if key == "config"])
    elif group in option_groups():
        place = option_groups()[group]
    else:
        groups = ", ".join(["general", *option_groups()])
        hint = f"choose {groups}, or give a class, such as --help.model.attention=MSSA"
        raise UserError(f"help.{group}: there is no such group ({hint})")
    node = _defined(*place)[1]
    about = ast.get_docstring(node) if isinstance(node, ast.ClassDef | ast.FunctionDef) else None
    lines = [f"{group}: {place[1]}", *_wrapped(_plain((about or "").partition("\n\n")[0]), ""), ""]
    lines += [explained(option, f"{group}.") for option in options_of(*place)]
    return "\n".join(lines)


def explained(option: Option, prefix: str = "") -> str:
    """Returns an option with its whole explanation."""
    name = f"{option.name[1:].upper()} ..." if option.name.startswith("*") else f"--{prefix}{option.name}"
    choices = list(_own_choices(option.module, option.annotation))
    text = f"{option.text.rstrip('.')}: {', '.join(choices)}." if choices else option.text
    return "\n".join([*_wrapped(f"{name}{option.value}", "  "), *_wrapped(text, " " * 8)])


def _class_in_use(group: str, flags: Sequence[tuple[str, str]]) -> str:
    """Returns the class of a group that configs or flags name, empty if none does."""
    named = ""
    for key, value in flags:
        if key == "config":
            named = str(value_at(read_config(find_config(value)), f"{group}.class_path") or named)
    return next((value for key, value in reversed(flags) if key in (group, f"{group}.class_path")), named)


def _place_of(class_path: str, configs: Sequence[Path]) -> tuple[str, str]:
    """Returns module and name of a class; one that is not our own is imported, also from beside a config."""
    name = class_path.removeprefix("vit_lightning.")
    if name in vit_lightning.__all__:
        return _own(name)
    # they import Lightning, which a list of options need not wait for
    from vit_lightning.config.names import find_class
    from vit_lightning.config.own_files import use_files

    use_files([*(path.parent for path in configs), Path.cwd()])
    found = find_class(class_path)
    if found is None:
        raise UserError(f"{class_path} is not there{meant(name, vit_lightning.__all__) or ' (give module.Class)'}")
    return found.__module__, found.__name__


@cache
def _tree(module: str) -> ast.Module:
    package, *rest = module.split(".")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*rest) if rest else Path(spec.origin)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _defined(module: str, name: str) -> tuple[str, Any]:
    """Returns where a name is defined and by what, following imports between our own modules; None if elsewhere."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in map(ast.unparse, _targets(node)):
            return module, node.value
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            home = node.module or ""
            return _defined(home, name) if home.startswith("vit_lightning") else (home, None)
    return module, None


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def options_of(module: str, name: str) -> list[Option]:
    """Returns the arguments of a class or function, with those of its bases if it is a dataclass."""
    module, node = _defined(module, name)
    if not isinstance(node, ast.ClassDef | ast.FunctionDef):  # of another package, or another name of such a class
        return []
    made = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    made = node if isinstance(node, ast.FunctionDef) else made
    bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
    inherited = {option.name: option for base in bases for option in options_of(module, base)}
    found: dict[str, Option] = {}
    named: list[tuple[str, ast.expr | None, ast.expr | None]]
    if made is None:
        found |= inherited
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and ast.unparse(item.target) != "_"]
        named = [(ast.unparse(item.target), item.annotation, item.value) for item in fields]
    else:
        parts = made.args
        plain = [*parts.posonlyargs, *parts.args][0 if made is node else 1 :]
        defaults = [*[None] * (len(plain) - len(parts.defaults)), *parts.defaults][-len(plain) or len(parts.defaults) :]
        pairs = [*zip(plain, defaults, strict=True), *zip(parts.kwonlyargs, parts.kw_defaults, strict=True)]
        named = [(item.arg, item.annotation, value) for item, value in pairs]
        if parts.vararg and made is node:
            named.insert(0, (f"*{parts.vararg.arg}", parts.vararg.annotation, None))
    texts = {
        item.arg_name: _plain(item.description or "")
        for part in (node, made)
        if part is not None
        for item in parse(ast.get_docstring(part) or "").params
    }
    hidden = ast.literal_eval(_defined(FOREIGN, "OURS")[1]) if name == "Trainer" else set()
    for key, annotation, value in named:
        text = texts.get(key, inherited[key].text if key in inherited else _annotated(module, annotation))
        kind, default = (ast.unparse(part) if part else "" for part in (annotation, value))
        if "init=False" in default or "ClassVar" in kind:
            found.pop(key, None)
        elif key not in hidden:
            kind = " | ".join(dict.fromkeys(_kinds(module, annotation))) or "value"
            found[key] = Option(key, kind, _shown(module, value), text, module, annotation)
    for key, text in texts.items():  # a class may describe fields of its base in its own words
        if key in found:
            found[key] = found[key]._replace(text=text)
    if name == "Trainer":
        given = found["precision"]
        kinds = "auto | 32-true | bf16-mixed | bf16-true | 16-mixed | 64-true"
        found["precision"] = given._replace(kind=kinds, text=f"{given.text} {AUTO_PRECISION}")
        found["deterministic"] = found["deterministic"]._replace(text=f"{found['deterministic'].text} {DETERMINISTIC}")
    return list(found.values())


def _annotated(module: str, hint: ast.expr | None) -> str:
    """Returns the explanation that a type such as ``Size = Annotated[int, "..."]`` carries."""
    _, alias = _defined(module, hint.id) if isinstance(hint, ast.Name) else (module, None)
    match alias:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[_, text])):
            return _plain(ast.literal_eval(text))
    return ""


def _plain(text: str) -> str:
    """Returns an explanation without reStructuredText and the default, which is shown anyway."""
    text = " ".join(re.sub(r":\w+:`~?([^`]+)`", r"\1", text).replace("`", "").split())
    return re.sub(r"\s*Default: \S+$", "", text)


def _shown(module: str, value: ast.expr | None) -> str:
    """Returns a default as a config has it; empty if there is none or it is null."""
    if isinstance(value, ast.Name):
        constant = _defined(module, value.id)[1]
        with contextlib.suppress(ValueError):  # a class stays a name
            ast.literal_eval(constant)
            value = constant
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        value = next((word.value for word in value.keywords if word.arg == "default"), None)
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Path":
        value = value.args[0]
    text = "" if value is None else ast.unparse(value)
    return {"None": "", "()": "", "True": "true", "False": "false"}.get(text, text.strip("'"))


def _kinds(module: str, hint: ast.expr | None) -> Iterator[str]:
    """Yields the values that an option of a type takes, in words; null is left out."""
    match hint:
        case ast.BinOp():
            yield from _kinds(module, hint.left)
            yield from _kinds(module, hint.right)
        case ast.Subscript(value=value, slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            origin = ast.unparse(value).rpartition(".")[2]
            if origin == "Literal":
                yield from (str(ast.literal_eval(part)) for part in parts)
            elif origin in ("Annotated", "Union", "Optional"):
                for part in parts[:1] if origin == "Annotated" else parts:
                    yield from _kinds(module, part)
            elif origin.lower() == "tuple":
                yield f"[{', '.join(' | '.join(_kinds(module, part)) for part in parts if ast.unparse(part) != '...')}]"
            elif origin.lower() in ("list", "sequence", "iterable"):
                yield f"list of {' | '.join(dict.fromkeys(_kinds(module, parts[0])))}"
            else:
                yield TYPES.get(origin.lower(), "class")
        case ast.Constant(value=str(text)):
            yield from _kinds(module, ast.parse(text, mode="eval").body)
        case ast.Name(id=name):
            _, alias = (module, None) if name in (*TYPES, "int", "float") else _defined(module, name)
            if isinstance(alias, ast.BinOp | ast.Subscript) and "Callable" not in ast.unparse(alias):
                yield from _kinds(module, alias)
            else:
                yield TYPES.get(name, name if name in ("int", "float") else "class")
        case ast.Constant(value=None) | None:
            return
        case _:
            yield "class"


def _own_choices(module: str, hint: ast.expr | None) -> Iterator[str]:
    """Yields our own classes that a type allows, if it is one of our own."""
    from vit_lightning.config.names import own_classes

    for node in ast.walk(hint) if hint is not None else ():
        if isinstance(node, ast.Name):
            home, found = _defined(module, node.id)
            if isinstance(found, ast.ClassDef) and home.startswith("vit_lightning."):
                yield from own_classes(getattr(importlib.import_module(home), node.id))


def _line(prefix: str, option: Option) -> str:
    """Returns the line of one option: its first sentence, cut where the line ends."""
    left = f"  --{prefix}{option.name}{option.value}"
    left = left if len(left) < WIDTH - 4 else left[: WIDTH - 8].rpartition(" ")[0]
    text = re.split(r"(?<=\w)[.;:](?:\s|$)", option.text)[0]
    return textwrap.shorten(f"{left:<50}".replace(" ", "\0") + f" {text}", WIDTH, placeholder=" ...").replace("\0", " ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
