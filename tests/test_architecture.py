"""The rules of the house: who may import whom, what is loaded when, what lies where."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from conftest import REPOSITORY

LEVELS = [
    [
        "errors",
        "random_keys",
        "sizes",
        "memory",
        "resampling",
        "optimizers",
        "schedules",
        "verb_keys",
        "statistics",
        "study",
    ],
    [
        "averaging",
        "blocks",
        "distillation",
        "losses",
        "optim",
        "augment",
        "decoding",
        "mixing",
        "pages",
        "folder",
        "variance",
        "splits",
    ],
    [
        "claims",
        "tracking",
        "colour",
        "positions",
        "patches",
        "feed_forward",
        "heads",
        "crate",
        "sampling",
        "trust",
        "changes",
        "stopping",
    ],
    ["data", "decoded", "policies", "attention_variants", "checks", "checkpoint_io", "resuming"],
    ["imagefolder", "network_checks", "torchvision_sets", "vit", "analysis"],
    ["huggingface", "image_files", "sharded", "options", "report_checks", "wording"],
    ["anatomy", "renaming", "report_figures", "report_tables"],
    ["family_timm", "family_torch", "family_einops", "family_vit_pytorch", "family_jax"],
    ["weights", "report_page"],
    [
        "classifier",
        "callbacks",
        "crate_measures",
        "checkpoints",
        "environment",
        "figures",
        "flops",
        "wandb_mirror",
    ],
    ["config", "reports", "report"],
    ["teachers", "wandb_report"],
    ["ablation_plan", "run"],
    [
        "check_data",
        "dashboard",
        "evaluation",
        "ledger",
        "predicting",
        "shard_writing",
        "show_batch",
        "sweep_flags",
        "training",
        "tuning",
    ],
    ["trials"],
    ["ablation_runs"],
    ["slurm"],
    ["ablation"],
    ["cli"],
    ["__main__"],
]
"""Modules from the bottom up; a module imports only from levels below its own, inside functions too."""

LEVEL = {module: number for number, modules in enumerate(LEVELS) for module in modules}
MODULES = sorted((REPOSITORY / "vit_lightning").glob("*.py"))


def imported_modules(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the package"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("vit_lightning.")} & set(LEVEL)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_go_down_only(path):
    if path.stem == "__init__":
        return
    assert path.stem in LEVEL, f"{path.name} has no level"
    upward = {name for name in imported_modules(path.read_text()) if LEVEL[name] >= LEVEL[path.stem]}
    assert not upward


def test_the_rule_finds_an_import_inside_a_function():
    assert imported_modules("def f():\n    from vit_lightning.commands import run\n    import vit_lightning.cli\n") == {
        "run",
        "cli",
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_files_and_functions_stay_short(path):
    source = path.read_text()
    assert source.count("\n") <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__":
            assert node.end_lineno - node.lineno <= 50, f"{path.name}: {node.name}"


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
