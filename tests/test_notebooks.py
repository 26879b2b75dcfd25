import ast
import re

import nbformat
import pytest
from nbclient import NotebookClient
from runs import REPOSITORY

ENGLISH = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
CHINESE = [path.parent / "zh" / path.name for path in ENGLISH]


def read_code(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


ABLATION = [path for path in ENGLISH if "ablate" in path.read_text()]
"""Takes a minute; what it calls is tested in ``tests/ablation`` and ``tests/faults``."""


@pytest.mark.parametrize(
    "paths",
    [[path for path in ENGLISH if path not in ABLATION], pytest.param(ABLATION, marks=pytest.mark.full)],
    ids=["others", "ablation"],
)
def test_the_notebooks_run_from_top_to_bottom(paths, monkeypatch):
    """For an epoch and two seeds, without figures of runs, in one process: imports take longer than the cells."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests"))
    monkeypatch.setenv("WANDB_MODE", "disabled")  # of a dozen runs; what W&B gets is tested elsewhere
    all_cells = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import undrawn")])
    for path in paths:
        all_cells.cells += [*nbformat.read(path, as_version=4).cells, nbformat.v4.new_code_cell("%reset -f")]
    for cell in all_cells.cells:
        cell.source = re.sub(r"(max_epochs|every_n_epoch): \d+", r"\1: 1", cell.source).replace(
            "seed in range(3)", "seed in range(2)"
        )
    NotebookClient(all_cells, timeout=900).execute()


@pytest.mark.parametrize("path", ENGLISH, ids=lambda path: path.stem)
def test_the_chinese_notebook_has_the_same_code(path):
    code, same = ([cell.source for cell in read_code(there)] for there in (path, path.parent / "zh" / path.name))
    assert code
    assert code == same


@pytest.mark.parametrize("path", ENGLISH, ids=lambda path: path.stem)
def test_a_notebook_begins_with_the_lines_that_install(path):
    """From the clone in which it is opened, in whichever folder; from an index of packages once it is published."""
    first, second, *_ = read_code(path)[0].source.splitlines()
    assert first.startswith('# %pip install -q "$(git rev-parse --show-toplevel)" ')
    assert second.startswith("# %pip install -q vit-lightning ")


@pytest.mark.parametrize("path", ENGLISH, ids=lambda path: path.stem)
def test_a_notebook_defines_nothing(path):
    nodes = [node for cell in read_code(path) for node in ast.walk(ast.parse(cell.source))]
    assert not [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda)]


@pytest.mark.parametrize("path", [*ENGLISH, *CHINESE], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_notebook_is_stored_with_its_outputs(path):
    assert path.stat().st_size < 400_000
    cells = read_code(path)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert len(outputs) >= 5
    for output in outputs:
        assert output.output_type != "error"
        assert output.get("name") != "stderr"
        text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
        assert not re.search(r"/(tmp|home|root|usr|Users|work)/", text), "a path of the machine that ran it"
