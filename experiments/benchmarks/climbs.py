"""Counts the files that the calls of a function lead through, and how often they climb, from the source alone.

python experiments/benchmarks/climbs.py vit_lightning.config.build:build [MODULE:FUNCTION ...] [--root FOLDER] [--way]

Calls are followed in the order in which they are evaluated, depth first, each function entered once. A stay is the
time in one file until a call leads to another; the floor of a file is the longest chain of imports below it, within
the package; a climb is a stay on a higher floor than the stay before it. Methods and attributes are found by
annotations, by what is assigned from a class or from a function with an annotated result, and through base classes. A
function that is handed on as an argument counts as called there.
"""

from __future__ import annotations

import argparse
import ast
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

WRAPPERS = (ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Starred, ast.Subscript, ast.Await)


class Place(NamedTuple):
    """A function, or a class, or (``made``) an object of a class; ``owner`` is the object of a method."""

    module: str
    node: Any
    owner: Any = None
    made: bool = False

    @property
    def kind(self) -> str:
        if isinstance(self.node, ast.ClassDef):
            return "object" if self.made else "class"
        return "property" if any("property" in ast.unparse(each) for each in self.node.decorator_list) else "function"


def binding(node: Any) -> tuple[Any, Any]:
    """Returns target and value of an assignment, a loop or a with, and None for others."""
    targets = [getattr(node, name, None) for name in ("target", "optional_vars")] + getattr(node, "targets", [])[:1]
    values = [getattr(node, name, None) for name in ("value", "iter", "context_expr")]
    return next(filter(None, targets), None), next(filter(None, values), None)


def names(module: str, tree: ast.Module) -> Any:
    """Yields the names of a module: where they are imported from, a Place, or the statement that assigns them."""
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        yield from ((alias.asname or alias.name, [str(node.module), alias.name]) for alias in node.names)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, Place(module, node)
        elif isinstance(target := binding(node)[0], ast.Name):
            yield target.id, node


class Package:
    """Modules of a package, and what the names and expressions in them stand for."""

    def __init__(self, folder: Path) -> None:
        paths = {".".join(path.relative_to(folder.parent).with_suffix("").parts): path for path in folder.rglob("*.py")}
        self.trees = {name.removesuffix(".__init__"): ast.parse(path.read_text()) for name, path in paths.items()}
        self.names = {module: dict(names(module, tree)) for module, tree in self.trees.items()}
        self.floors: dict[str, int] = {}

    def imports(self, module: str) -> set[str]:
        found = [node for node in ast.walk(self.trees[module]) if isinstance(node, ast.ImportFrom)]
        pairs = {(str(node.module), f"{node.module}.{alias.name}") for node in found for alias in node.names}
        return {inner if inner in self.trees else outer for outer, inner in pairs} & self.trees.keys() - {module}

    def floor(self, module: str, above: tuple[str, ...] = ()) -> int:
        if module not in self.floors:
            below = sorted(self.imports(module) - {*above})
            self.floors[module] = max((1 + self.floor(other, (*above, module)) for other in below), default=0)
        return self.floors[module]

    def find(self, module: str, name: str) -> Any:
        found = self.names.get(module, {}).get(name)
        if isinstance(found, list):
            return inner if (inner := ".".join(found)) in self.trees else self.find(*found)
        return self.bound(found, module, {}) if isinstance(found, ast.stmt) else found

    def annotated(self, module: str, annotation: Any) -> Place | None:
        """Returns an object of the first class of the package that an annotation names."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        inner = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)] if annotation else []
        found = [place for name in inner if isinstance(place := self.find(module, name), Place)]
        return next((place._replace(made=True) for place in found if place.kind in ("class", "object")), None)

    def bound(self, node: Any, module: str, known: dict[str, Any]) -> Any:
        return self.annotated(module, getattr(node, "annotation", None)) or self.value(binding(node)[1], module, known)

    def parameters(self, function: Any, module: str) -> dict[str, Any]:
        given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        return {each.arg: self.annotated(module, each.annotation) for each in given}

    def bases(self, owner: Place) -> list[Place]:
        return [found for base in owner.node.bases if (found := self.annotated(owner.module, base))]

    def member(self, owner: Any, name: str) -> Any:
        """Returns the method of a class, or what its attribute stands for; of its bases too."""
        if not isinstance(owner, Place) or owner.kind not in ("class", "object"):
            return None
        inner = [(node, name, {}) for node in owner.node.body]
        for method in (node for node in owner.node.body if isinstance(node, ast.FunctionDef)):
            if method.name == name:
                return Place(owner.module, method, owner._replace(made=True))
            known = self.parameters(method, owner.module)
            inner += [(node, f"self.{name}", known) for node in ast.walk(method)]
        for node, target, known in inner:
            if binding(node)[0] is not None and ast.unparse(binding(node)[0]) == target:
                return self.bound(node, owner.module, known)
        return next((found for base in self.bases(owner) if (found := self.member(base, name))), None)

    def value(self, node: Any, module: str, known: dict[str, Any]) -> Any:
        if isinstance(node, ast.Name):
            return known[node.id] if node.id in known else self.find(module, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value, module, known)
            if isinstance(owner, str):
                return inner if (inner := f"{owner}.{node.attr}") in self.trees else self.find(owner, node.attr)
            found = self.member(owner, node.attr)
            return self.result(found) if isinstance(found, Place) and found.kind == "property" else found
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) == "super" and known.get("self"):
                return next(iter(self.bases(known["self"])), None)
            return self.result(self.value(node.func, module, known))
        parts = ast.iter_child_nodes(node) if isinstance(node, WRAPPERS) else ()
        return next((found for part in parts if (found := self.value(part, module, known))), None)

    def result(self, called: Any) -> Place | None:
        if not isinstance(called, Place) or called.kind == "class":
            return called._replace(made=True) if isinstance(called, Place) else None
        return self.annotated(called.module, getattr(called.node, "returns", None))


class Way:
    """The stays of the calls from one function."""

    def __init__(self, package: Package, start: Place) -> None:
        self.package, self.stays = package, list[str]()
        self.entered, self.closures = set[Any](), dict[Any, dict[str, Any]]()
        self.enter(start)

    def enter(self, place: Any, kinds: tuple[str, ...] = ("class", "object", "function")) -> None:
        """Follows the body of a function; of a class what makes an object, of an object what a call of it calls."""
        if not isinstance(place, Place) or place.kind not in kinds or place.node in self.entered:
            return
        if place.kind in ("class", "object"):
            for name in ("__new__", "__init__", "__post_init__") if place.kind == "class" else ("__call__", "forward"):
                self.enter(self.package.member(place, name), ("function",))
            return
        self.entered.add(place.node)
        if self.stays[-1:] != [place.module]:
            self.stays.append(place.module)
        known = {**self.closures.get(place.node, {}), **self.package.parameters(place.node, place.module)}
        known |= {"self": place.owner, "cls": place.owner._replace(made=False)} if place.owner else {}
        for statement in place.node.body:
            self.follow(statement, place.module, known)

    def follow(self, node: Any, module: str, known: dict[str, Any]) -> None:
        if isinstance(node, ast.FunctionDef):
            known[node.name], self.closures[node] = Place(module, node), known
            return
        target, value = binding(node)
        if isinstance(target, ast.Name) and value is not None:
            self.follow(value, module, known)
            known[target.id] = self.package.bound(node, module, known)
        for part in sorted(ast.iter_child_nodes(node), key=lambda part: not isinstance(part, ast.comprehension)):
            self.follow(part, module, known)
        if isinstance(node, ast.Call):
            for given in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if isinstance(given, ast.Name | ast.Attribute):
                    self.enter(self.package.value(given, module, known), ("function",))
            self.enter(self.package.value(node.func, module, known))
        elif isinstance(node, ast.Attribute):
            self.enter(self.package.member(self.package.value(node.value, module, known), node.attr), ("property",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("functions", nargs="+", metavar="MODULE:FUNCTION")
    parser.add_argument("--root", type=Path, default=Path(), help="folder in which the package lies")
    parser.add_argument("--way", action="store_true", help="print each stay, indented by its floor")
    given = parser.parse_args()
    package = Package(given.root / given.functions[0].partition(".")[0])
    print("| function | stays | files | climbs |\n|---|---|---|---|")
    for name in given.functions:
        module, _, path = name.partition(":")
        outer, _, method = path.partition(".")
        place = package.find(module, outer)
        stays = Way(package, package.member(place, method) if method else place).stays
        assert stays, f"{name} is not there"
        floors = [package.floor(stay) for stay in stays]
        print(f"| `{name}` | {len(stays)} | {len({*stays})} | {sum(b > a for a, b in pairwise(floors))} |")
        for stay, floor in zip(stays, floors, strict=True) if given.way else ():
            print(f"{'  ' * floor}{stay}")


if __name__ == "__main__":
    main()
