"""YAML that may be anybody's, read strictly, to plain data of bearable size."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from vit_lightning.errors import UserError

DEPTH, VALUES = 100, 200_000
"""Depth and number of values at most; aliases can repeat a list a billion times."""


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that reports duplicate keys, and reads 1e-3 as a number and keys such as ``on`` as text."""

    duplicates: list[str]

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, TypeError, AttributeError) as fault:  # what numbers and dates without sense raise
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
        node = loader.get_single_node()
        _count(node, {}, 0)
        value = None if node is None else loader.construct_document(node)
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


def _count(node: yaml.Node | None, known: dict[int, int], depth: int) -> int:
    """Returns the number of values under a node, those of aliases each time.

    Raises:
        RecursionError: they are nested too deeply, or within themselves.
        YAMLError: they are too many.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if depth > DEPTH:
        raise RecursionError
    if id(node) not in known:
        pairs = isinstance(node, yaml.MappingNode)
        inner = [part for item in node.value for part in (item if pairs else (item,))]
        known[id(node)] = 1 + sum(_count(part, known, depth + 1) for part in inner)
        if known[id(node)] > VALUES:
            raise yaml.MarkedYAMLError(problem=f"more than {VALUES:,} values", problem_mark=node.start_mark)
    return known[id(node)]
