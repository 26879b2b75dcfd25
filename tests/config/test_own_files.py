"""Files of the user's own: where they are found, whose errors are shown, and what a run keeps of them."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from runs import REPOSITORY

from vit_lightning.commands.fit import fit
from vit_lightning.config.own_files import changed_files, keep_own_files, own_modules, search
from vit_lightning.config.own_parts import class_problems
from vit_lightning.config.resolve import resolve
from vit_lightning.config.trust import restrict_imports
from vit_lightning.errors import CannotResume, UserError

NET = """import torch
from pieces.width import WIDTH


class Net(torch.nn.Sequential):
    def __init__(self, num_classes: int):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, WIDTH), torch.nn.Linear(WIDTH, num_classes))
"""


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    search(())


def project(folder: Path, *, net: str = NET, width: int = 7) -> str:
    """Writes a config and the files that it names; returns the flag."""
    (folder / "pieces").mkdir(parents=True)
    (folder / "pieces" / "width.py").write_text(f"WIDTH = {width}\n")
    (folder / "my_net.py").write_text(net)
    (folder / "exp.yaml").write_text("model: {class_path: my_net.Net}\n")
    return f"--config={folder / 'exp.yaml'}"


def width(flag: str) -> int:
    return resolve([flag, "--trust-config"]).make_network()[1].out_features


def problems(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve([*arguments, "--trust-config"])
    return str(caught.value)


def test_a_file_beside_the_config_is_found_from_another_folder_and_none_is_taken_for_another(in_folder):
    one, other = project(in_folder / "one"), project(in_folder / "other", width=9)
    (in_folder / "away").mkdir()
    assert (width(one), width(other), width(one)) == (7, 9, 7)
    assert set(own_modules()) == {"my_net", "pieces.width"}
    (in_folder / "one" / "pieces" / "width.py").write_text("WIDTH = 8\n")  # of the same length, in the same second
    assert width(one) == 8
    assert not list(in_folder.rglob("__pycache__"))
    with pytest.raises(UserError, match="--trust-config"):
        resolve([one])
    assert not own_modules()
    assert "my_net" not in sys.modules
    assert not [place for place in sys.path if str(in_folder) in place]


def test_what_the_program_has_imported_from_the_working_folder_stays(in_folder, monkeypatch):
    search(())
    (in_folder / "imported_by_hand.py").write_text("VALUE = 1\n")
    spec = importlib.util.spec_from_file_location("imported_by_hand", in_folder / "imported_by_hand.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "imported_by_hand", module)
    flag = project(in_folder)
    assert width(flag) == 7
    search(())
    assert sys.modules["imported_by_hand"] is module


def test_an_experiment_keeps_its_own_files_when_another_config_is_checked(in_folder):
    one, other = project(in_folder / "one"), project(in_folder / "other", width=9)
    (in_folder / "one" / "mine.py").write_text("from lightning.pytorch import Callback\nclass Mine(Callback): ...\n")
    experiment = resolve([one, "--trainer.callbacks=[mine.Mine]", "--trust-config"])
    for arguments in ([one, "--trust-config"], [other, "--trust-config"], ["--data=Digits", "--model.patch_size=2"]):
        last = resolve(arguments)
        assert type(experiment.make_trainer_arguments()["callbacks"][0]).__name__ == "Mine"
        assert experiment.make_network()[1].out_features == 7
        assert last.make_network() is not None
    with pytest.raises(UserError, match="--trust-config"):
        resolve([one])


def test_a_run_of_an_earlier_version_is_resumed_when_another_config_was_checked(in_folder):
    (in_folder / "mine.py").write_text("import torch\nclass Loss(torch.nn.CrossEntropyLoss): ...\n")
    flags = "--data=Digits", "--model.patch_size=2", "--trust-config"
    experiment = replace(resolve([*flags, "--loss=mine.Loss"]), out=Path("run"), resume="must")
    config = yaml.safe_load(experiment.to_yaml())
    del config["optimizer"]["warmup_lr"]
    Path("run").mkdir()
    Path("run", "config.yaml").write_text(yaml.safe_dump(config))
    resolve(flags)
    with pytest.raises(CannotResume, match="no checkpoint yet"):
        fit(experiment)


def test_the_last_config_and_then_the_working_folder_are_searched(in_folder):
    one, other = project(in_folder / "one"), project(in_folder / "other", width=9)
    project(in_folder / "here", width=5)
    assert resolve([one, other, "--trust-config"]).make_network()[1].out_features == 9
    digits = f"--config={REPOSITORY / 'experiments' / 'digits.yaml'}"
    in_here = [digits, "--model=here.my_net.Net", "--trust-config"]
    (in_folder / "here" / "my_net.py").write_text(NET.replace("pieces", "here.pieces"))  # folders are packages too
    assert resolve(in_here).make_network()[1].out_features == 5


@pytest.mark.parametrize("name", ["random", "datasets_of_mine", "yaml"])
def test_a_file_shadows_no_installed_module(in_folder, name):
    flag = project(in_folder / "one")
    (in_folder / "one" / f"{name}.py").write_text(NET)
    (in_folder / "one" / "exp.yaml").write_text(f"model: {{class_path: {name}.Net}}\n")
    if name == "datasets_of_mine":
        assert width(flag) == 7
    else:
        assert f"one/{name}.py has the name of a module of" in problems(flag)
        assert "my_net" not in str(sys.modules[name].__file__)


ERRORS = {
    "a name": (
        NET.replace("WIDTH)", "WIDE)", 1),
        ["one/my_net.py, line 7: NameError: name 'WIDE'", "Flatten()"],
    ),
    "at import": (f"{NET}\nnnn.Linear(3)\n", ["one/my_net.py, line 9: NameError: name 'nnn'", "\n    nnn.Linear(3)"]),
    "a syntax": (NET.replace("):", ")", 1), ["one/my_net.py, line 5: SyntaxError: expected ':'", "\n    class Net"]),
    "another module": (
        f"import nowhere_to_be_found\n{NET}",
        ["one/my_net.py, line 1: ModuleNotFoundError: No module named 'nowhere_to_be_found'"],
    ),
    "a name of a module": (NET.replace("import WIDTH", "import WIDE"), ["one/my_net.py, line 2: ImportError: cannot"]),
    "the forward pass": (
        f"{NET}    def forward(self, images):\n        return images.nope\n",
        ["one/my_net.py, line 9: AttributeError", "\n    return images.nope"],
    ),
    "no such class": (NET.replace("class Net", "class Nett"), ["model.class_path=my_net.Net is not there", "one"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_in_a_file_of_the_user_s_is_shown_with_its_line(in_folder, case):
    text, expected = ERRORS[case]
    found = problems(project(in_folder / "one", net=text))
    for part in expected:
        assert part in found, found
    assert len(found.splitlines()) <= 3


def test_a_module_that_is_not_there_names_the_folders(in_folder):
    (in_folder / "configs").mkdir()
    (in_folder / "configs" / "exp.yaml").write_text("model: {class_path: no_such.Net}\n")
    found = problems("--config=configs/exp.yaml")
    assert "model.class_path=no_such.Net is not there" in found
    assert "searched: installed packages, configs, the working folder" in found


def test_a_network_that_looks_at_its_numbers_is_built_all_the_same(in_folder):
    looks = NET.replace(
        "        super()", "        rates = [float(r) for r in torch.linspace(0, 1, 3)]\n        super()"
    )
    looks += "    def forward(self, images):\n        return super().forward(images / images.std().item())\n"
    assert width(project(in_folder / "one", net=looks)) == 7


def test_the_folder_of_wandb_in_a_run_is_not_taken_for_the_package(tmp_path):
    (tmp_path / "wandb" / "cache").mkdir(parents=True)
    for name in ("config.yaml", "environment.json"):
        (tmp_path / name).write_text("{}")
    search([tmp_path])
    assert importlib.util.find_spec("wandb").origin.endswith("__init__.py")


def test_copies_are_what_was_imported_and_win_in_a_run_folder(in_folder):
    flag = project(in_folder / "one")
    run = in_folder / "run"
    run.mkdir()
    experiment = resolve([flag, "--trust-config"])
    (in_folder / "one" / "my_net.py").write_text("raise SystemError('edited while the run began')\n")
    keep_own_files(run)
    assert (run / "my_net.py").read_text() == NET
    assert (run / "pieces" / "width.py").read_text() == "WIDTH = 7\n"
    (run / "config.yaml").write_text(experiment.to_yaml())
    (run / "environment.json").write_text("{}")
    assert width(f"--config={run / 'config.yaml'}") == 7
    assert set(own_modules().values()) == {run / "my_net.py", run / "pieces" / "width.py"}
    (in_folder / "one" / "my_net.py").write_text(NET.replace("Flatten()", "Flatten(1)"))
    assert width(flag) == 7
    assert list(changed_files(run)) == ["my_net.py"]
    torch.manual_seed(0)


CACHED = """import functools, torch
POSITIONS = torch.arange(64.0)

class Table:
    @staticmethod
    @functools.lru_cache
    def of(length):
        return torch.ones(length)

class Net(torch.nn.Linear):
    def __init__(self, num_classes: int):
        super().__init__(64, num_classes)
    def forward(self, images):
        return super().forward(images.flatten(1) + Table.of(64) + (POSITIONS if images.shape[0] == 3 else 0))
"""


@pytest.mark.parametrize("constant", [False, True])
def test_the_check_of_a_network_leaves_nothing_in_its_caches(in_folder, constant):
    net = CACHED.replace("== 3", "> 0") if constant else CACHED
    network = resolve([project(in_folder / "one", net=net), "--trust-config"]).make_network()
    assert network(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def test_a_file_that_a_run_has_imported_late_is_known_to_have_changed(in_folder):
    project(in_folder / "one")
    run = in_folder / "run"
    run.mkdir()
    (run / "late.py").write_text("SCALE = 1\n")
    search([in_folder / "one"])
    assert not changed_files(run)
    (in_folder / "one" / "late.py").write_text("SCALE = 2\n")
    assert list(changed_files(run)) == ["late.py"]


UNPICKLING = {"checkpoint_path": "some.pt", "weights_only": False}
CALLED = {
    "data": {"class_path": "timm.models.load_state_dict", **UNPICKLING},
    "dataset_class": {"class_path": "WrappedDataset", "dataset_class": "timm.models.load_state_dict"},
    "augment": {"augment": [{"class_path": "timm.models.load_checkpoint", **UNPICKLING}]},
    "loader": {
        "class_path": "torchvision.datasets.DatasetFolder",
        "root": ".",
        "loader": "lightning.fabric.utilities.load._lazy_load",
        "extensions": [".pt"],
    },
    "transform": {"augment": [{"class_path": "PerImage", "transform": "timm.models.load_checkpoint"}]},
}


@pytest.mark.parametrize("key", CALLED)
def test_functions_of_known_packages_that_may_read_files_are_not_called_without_trust(in_folder, key):
    (in_folder / "exp.yaml").write_text(yaml.safe_dump({"data": CALLED[key]}))
    with pytest.raises(UserError, match=f"(class|{key}).*=(timm|lightning).*called without --trust-config"):
        resolve(["--config=exp.yaml", "--model.patch_size=2"])


FUNCTION = {"class_path": "timm.models.load_state_dict", **UNPICKLING}
NAMED = {
    "model.attention.class_path": {"model": {"attention": FUNCTION}},
    "model.norm.class_path": {"model": {"norm": str(FUNCTION)}},  # YAML within a string
    "model.act_layer": {
        "model": {"class_path": "timm.models.VisionTransformer", "act_layer": "timm.models.load_state_dict"}
    },
    "model.block.class_path": {
        "model": {"block": {"class_path": "lightning.pytorch.LightningModule.load_from_checkpoint"}}
    },
    "data.augment.0.transforms.0": {"data": {"augment": [{"class_path": "Compose", "transforms": [FUNCTION]}]}},
}


@pytest.mark.parametrize("key", NAMED)
def test_an_argument_names_no_function_that_may_read_files_without_trust(in_folder, key):
    (in_folder / "exp.yaml").write_text(yaml.safe_dump(NAMED[key]))
    with pytest.raises(UserError, match=f"{key}.*=.*called without --trust-config"):
        resolve(["--config=exp.yaml", "--data=Digits"])


def test_a_network_or_a_loss_of_known_functions_needs_no_trust():
    names = "torchvision.models.resnet18", "torch.nn.functional.cross_entropy", "torch.nn.GELU", "/some/path.pt", "a.b"
    restrict_imports({"values": list(names)}, trust=False)


def test_a_loss_or_an_optimizer_is_called_without_trust_only_if_it_is_one(in_folder):
    function = "timm.models.load_checkpoint"
    with pytest.raises(UserError) as caught:
        resolve(["--data=Digits", f"--loss.class_path={function}", f"--optimizer.class_path={function}"])
    assert str(caught.value).count("called without --trust-config") == 2
    losses = "torch.nn.functional.cross_entropy", "torchvision.ops.sigmoid_focal_loss"
    assert [class_problems("loss", name) for name in losses] == [[], []]


def test_an_argument_of_any_type_makes_no_object_without_trust():
    def made(*, trust: bool) -> object:
        restrict_imports({}, trust=trust)
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--any", type=Any)
        return parser.instantiate(parser.parse_object({"any": '{"class_path": "torch.nn.ReLU"}'})).any

    assert isinstance(made(trust=True), torch.nn.ReLU)
    assert not isinstance(made(trust=False), torch.nn.Module)


def test_an_error_of_a_loss_or_an_optimizer_in_the_check_names_file_and_line(in_folder):
    (in_folder / "own_parts.py").write_text(
        "import torch\ndef loss(logits, targets):\n    return undefined(logits)\n"
        "def third(logits, targets, weight):\n    return None\n"
        "class Own(torch.optim.SGD):\n    def step(self):\n        raise KeyError('oh')\n"
    )
    flags = "--data=Digits", "--model.patch_size=2", "--loss=own_parts.loss", "--optimizer=own_parts.Own"
    assert "loss.weight is missing" in problems(*flags[:2], "--loss=own_parts.third")
    found = problems(*flags)
    assert "NameError: name 'undefined' is not defined (own_parts.py, line 3)" in found
    assert "KeyError: 'oh' (own_parts.py, line 8)" in found
