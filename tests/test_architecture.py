"""The rules of the house: who may import whom, what is loaded when, what lies where."""

import ast
import importlib.util
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from runs import REPOSITORY

MAY_IMPORT: dict[str, set[str]] = {
    "models": set(),
    "data": set(),
    "storage": set(),
    "weights": {"models", "storage"},
    "inspect": {"models"},
    "training": {"models", "storage", "inspect"},
    "config": {"models", "data", "storage", "training", "weights"},
    "figures": {"data", "storage", "training", "config", "inspect"},
    "commands": {"data", "storage", "training", "config", "weights", "figures", "inspect"},
    "report": {"storage", "config", "figures"},
    "ablation": {"data", "storage", "training", "config", "commands", "report"},
}
"""Rooms that a room may import from, inside functions too. ``cli`` may import all, other root modules none."""

PLAIN_TYPES = {"data.batches"}
"""What training may import of the data: the form of a batch."""

CEILINGS = {
    "models": 1_271, "data": 2_400, "storage": 958, "weights": 2_700, "inspect": 445, "training": 2_620,
    "config": 1_963, "figures": 760, "commands": 2_209, "report": 1_932, "ablation": 1_634, "(root)": 540,
}  # fmt: skip
"""Lines of code that a room may have; one that needs more takes them from another, and its commit says why."""
ABOVE = {"(root)": 684, "config": 2_445, "data": 2_808, "training": 2_665, "weights": 2_912}
"""Most lines of rooms that are above their ceiling still; lower them with the room.

Attempts, of 25,400 lines in all: promises taken back and satellites out, 22,415; features that no config, page or study
named, 21,870; fewer concepts in config, 31 lines less, and in config and weights, 46; every behaviour listed, and those
gone that neither a promise nor a page's reader asks for, 21,217, and once more, with leaves that were imported together
made one, 20,867; annotations that are evaluated at once, 20,718. Mends of what people bring took some of it back.

Climbs of build and fit (experiments/benchmarks/climbs.py) are 76 and 84, where 35 and 45 were wanted. Tried: any two
files of a room made one, at most 3 and 4 less; weights read before build, 55 and 82; no leaves at the root, 60 and 71.
With a single file a room they would still be 39 and 63.
"""
MOST_LINES, MOST_FILES = 19_900, 18

PACKAGE = REPOSITORY / "vit_lightning"
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_modules(source: str) -> set[str]:
    """Modules of this package that a source imports, such as ``models.vit``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the package"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.removeprefix("vit_lightning.") for name in names if name.startswith("vit_lightning.")} & set(MODULES)


@pytest.mark.parametrize("module", [name for name in MODULES if name not in ("cli", "__init__", "__main__")])
def test_a_room_imports_from_those_that_it_may(module):
    room, _, rest = module.partition(".")
    allowed = MAY_IMPORT[room] | {room} if rest else set()
    imported = imported_modules(MODULES[module].read_text()) - (PLAIN_TYPES if room == "training" else set())
    assert {name.split(".")[0] for name in imported if "." in name} <= allowed


def test_the_rule_finds_an_import_inside_a_function():
    source = "def f():\n    from vit_lightning.commands import fit\n    import vit_lightning.cli\n"
    assert imported_modules(source) == {"commands.fit", "cli"}


def test_imports_form_no_cycle():
    graph = {
        name: imported_modules(path.read_text()) for name, path in MODULES.items() if not name.endswith("__init__")
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


PUBLIC_OF_TUPLES = {"_replace", "_fields", "_asdict"}
OF_TORCH = {"_call_impl", "_compiled_call_impl", "_step_supports_amp_scaling", "_modules", "_parameters", "_buffers"}
OF_TORCH |= {f"_{when}{kind}_hooks" for when in ("forward", "backward") for kind in ("", "_pre")}


def private_names(source: str) -> set[str]:
    """Private attributes of other objects, and private names that are imported, but those of torch."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] not in ("self", "torch", "nn"):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning"):
            names |= {alias.name for alias in node.names}
    private = {name for name in names if name.startswith("_") and not name.startswith("__")}
    return private - PUBLIC_OF_TUPLES - OF_TORCH


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("training.")])
def test_private_names_of_lightning_stand_in_one_file(module):
    found = private_names(MODULES[module].read_text())
    assert bool(found) == (module == "training.lightning_detours"), found


def test_the_package_is_rooms_and_a_few_leaves():
    names = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert len(names) <= 23
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"} == set(MAY_IMPORT)


def code_lines():
    spec = importlib.util.spec_from_file_location("code_lines", REPOSITORY / "experiments/benchmarks/code_lines.py")
    counter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(counter)
    return counter.count(PACKAGE)


def test_no_room_grows():
    lines, files = code_lines()
    assert {room: count for room, count in lines.items() if count > max(CEILINGS[room], ABOVE.get(room, 0))} == {}
    assert {room: count for room, count in files.items() if count > MOST_FILES} == {}


@pytest.mark.xfail(reason="rooms above their ceiling are being emptied", strict=True)
def test_the_rooms_stay_within_their_budget():
    lines, _ = code_lines()
    assert lines.total() <= MOST_LINES
    assert {room: count for room, count in lines.items() if count > CEILINGS[room]} == {}


def test_scripts_and_the_site_import_what_is_there():
    scripts = [*(REPOSITORY / "experiments").rglob("*.py"), *(REPOSITORY / "notebooks").rglob("*.py")]
    nodes = [(path.name, node) for path in scripts for node in ast.walk(ast.parse(path.read_text()))]
    asked = [
        (path, node.module, one.name) for path, node in nodes if isinstance(node, ast.ImportFrom) for one in node.names
    ]
    ours = [one for one in asked if str(one[1]).split(".")[0] == PACKAGE.name]
    assert ours
    known = {module: importlib.import_module(module) for _, module, _ in ours}
    is_module = {f"{PACKAGE.name}.{name}" for name in MODULES}
    assert [one for one in ours if not hasattr(known[one[1]], one[2]) and f"{one[1]}.{one[2]}" not in is_module] == []


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split())


def test_models_need_torch_and_einops_alone():
    loaded = loaded_by("import vit_lightning; vit_lightning.ViT('Ti/4', image_size=8)")
    assert {"torch", "einops"} <= loaded
    assert not loaded & {"lightning", "wandb", "torchvision", "matplotlib", "torchmetrics", "sklearn", "jsonargparse"}


def test_help_loads_nothing_heavy():
    loaded = loaded_by("from vit_lightning.cli import main; main(['--help'])")
    assert not loaded & {"torch", "lightning", "wandb", "torchvision", "matplotlib", "jsonargparse", "yaml"}


def test_every_public_name_can_be_imported():
    import vit_lightning

    assert all(getattr(vit_lightning, name).__name__ == name for name in vit_lightning.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Vit'"):
        vit_lightning.Vit  # noqa: B018


def test_the_top_level_is_the_user_s():
    allowed = {"pyproject.toml", "vit_lightning", "experiments", "notebooks", "tests", "README.md", "LICENSE"}
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert {name.split("/")[0] for name in listed.stdout.split() if not name.startswith(".")} <= allowed


def test_docstrings_begin_with_a_verb_or_a_noun():
    odd = []
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                continue
            first = (ast.get_docstring(node) or "-").split()[0]
            returns = getattr(node, "returns", None)
            boolean = returns is not None and "bool" in ast.unparse(returns)
            if first in ("What", "Of", "Where", "How", "Who", "Which") or (first == "Whether" and not boolean):
                odd.append(f"{name}: {first} ... ({getattr(node, 'name', 'module')})")
    assert not odd
