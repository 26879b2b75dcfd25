"""The examples of ``.github/CONTRIBUTING.md``: each is short, and does what the text around it says."""

import re
import sys
import types

import pytest
import torch
from runs import REPOSITORY, example
from test_architecture import MAY_IMPORT

from vit_lightning import ViT, cli, from_reference, to_reference
from vit_lightning.cli import COMMANDS, main
from vit_lightning.weights import FAMILIES
from vit_lightning.weights.files import WeightsFile
from vit_lightning.weights.identify import identify

TEXT = (REPOSITORY / ".github" / "CONTRIBUTING.md").read_text()
DIGITS = f"--config={REPOSITORY / 'experiments' / 'digits.yaml'}"


@pytest.fixture(autouse=True)
def unchanged_tables():
    kept = [(table, dict(table)) for table in (FAMILIES, COMMANDS)]
    yield
    for table, entries in kept:
        table.clear()
        table.update(entries)


def test_its_rooms_may_import_what_the_rule_says():
    rows = re.findall(r"^\| `(\w+)/` \|.*\| (.*) \|$", TEXT, re.MULTILINE)
    assert {room: set(re.findall(r"\w+", rooms)) & set(MAY_IMPORT) for room, rooms in rows} == MAY_IMPORT


def test_a_family_goes_out_and_comes_back():
    exec(example("family"), {})
    vit = ViT(image_size=8, patch_size=4, emb_size=16, depth=2, num_heads=2, num_classes=5).eval()
    state, config = to_reference(vit, family="mine")
    assert {"layers.1.attn.qkv.bias", "fc.weight"} <= set(state)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(from_reference(state, family="mine", config=config).eval()(images), vit(images))
    found = identify(WeightsFile("weights", None, state), {"heads": 2})
    assert (found.family, found.config["layers"]) == ("mine", 2)


def test_a_command_is_a_file_and_a_line(capsys, monkeypatch):
    module = types.ModuleType("vit_lightning.commands.count")
    exec(example("command"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    COMMANDS.update(eval(f"{{{example('command line')}}}", vars(cli)))
    assert main(["count", DIGITS]) == 0
    assert re.search(r"^[\d,]+ parameters$", capsys.readouterr().out, re.MULTILINE)
    assert main(["count", DIGITS, "--model.dept=3"]) == 2
    assert "model.depth" in capsys.readouterr().err
