"""YAML that may be anybody's, read strictly."""

import os
import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from vit_lightning.errors import UserError


def at_home(text: str) -> str:
    """Returns a text with the folder of the user in place of ~/ at its beginning, as a shell has it."""
    return os.path.expanduser(text) if text.startswith("~/") else text


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that reports duplicate keys, and reads 1e-3 as a number, keys such as ``on`` as text, ~/ as home."""

    duplicates: list[str]

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            str(value if isinstance(value, int) else "")  # refuses one of so many digits that no message can show it
            return at_home(value) if isinstance(value, str) else value
        except (ValueError, LookupError, TypeError, AttributeError) as fault:  # of numbers and dates without sense
            kind = {"int": "whole number", "bool": "truth value"}.get(kind := node.tag.rpartition(":")[2], kind)
            text = f"{str(node.value)[:40]} is no {kind} (in quotes it is a text)"
            raise ConstructorError(None, None, text, node.start_mark) from fault

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                raise ConstructorError(None, None, "a key must be a text", key.start_mark)
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:int":
                key.tag = "tag:yaml.org,2002:str"
            name = self.construct_object(key)
            if name in seen:
                self.duplicates.append(f"{name} comes twice (line {key.start_mark.line + 1})")
            seen.add(name)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, source: str) -> Any:
    """Returns YAML as plain data; errors name ``source``."""
    try:
        loader = _StrictLoader(text)
        loader.duplicates = []
        value = loader.get_single_data()
    except RecursionError:
        raise UserError(f"{source} is not valid YAML: nested too deeply") from None
    except yaml.YAMLError as fault:
        mark = getattr(fault, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = " ".join(str(getattr(fault, "problem", None) or fault).split())
        tabs = " (indent with spaces, not with tabs)" if "'\\t'" in reason else ""
        raise UserError(f"{source} is not valid YAML: {where}{reason}{tabs}") from fault
    if loader.duplicates:
        raise UserError([f"{source}: {duplicate}" for duplicate in loader.duplicates])
    return value
