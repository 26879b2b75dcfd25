"""Files of the user's own: where they are found, whose errors are shown, and what a run keeps of them."""

import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from runs import REPOSITORY

import vit_lightning
from vit_lightning.config.own_files import _is_own, digests, keep_own_files, use_files
from vit_lightning.config.resolve import resolve
from vit_lightning.errors import UserError

NET = """import torch
from pieces.width import WIDTH


class Net(torch.nn.Sequential):
    def __init__(self, num_classes: int):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, WIDTH), torch.nn.Linear(WIDTH, num_classes))
"""


def project(folder: Path, *, net: str = NET, width: int = 7) -> str:
    """Writes a config and the files that it names; returns the flag."""
    (folder / "pieces").mkdir(parents=True)
    (folder / "pieces" / "width.py").write_text(f"WIDTH = {width}\n")
    (folder / "my_net.py").write_text(net)
    (folder / "exp.yaml").write_text("model: {class_path: my_net.Net}\n")
    return f"--config={folder / 'exp.yaml'}"


def width(flag: str) -> int:
    return resolve([flag]).make_network()[1].out_features


def problems(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve(arguments)
    return str(caught.value)


def test_a_file_beside_the_config_is_found_from_another_folder_and_a_process_has_one_version(in_folder):
    one, other = project(in_folder / "one"), project(in_folder / "other", width=9)
    (in_folder / "away").mkdir()
    experiment = resolve([one])
    assert (width(one), set(digests())) == (7, {"my_net.py", "pieces/width.py"})
    text = "other/pieces/width.py is not as this process has imported it, one/pieces/width.py: start another process"
    assert text in problems(other)
    (in_folder / "other" / "pieces" / "width.py").write_text("WIDTH = 7\n")
    assert width(other) == 7, "a copy, such as that of a run, is the same version"
    assert set(digests()) == {"my_net.py", "pieces/width.py"}
    use_files([in_folder / "away"])
    assert not digests()
    use_files(experiment.files)
    assert set(digests()) == {"my_net.py", "pieces/width.py"}
    (in_folder / "one" / "pieces" / "width.py").write_text("WIDTH = 8\n")
    assert "one/pieces/width.py is not as this process has imported it: start another process" in problems(one)
    use_files()
    assert not [place for place in sys.path if str(in_folder) in place]


def test_a_folder_that_was_searched_before_is_searched_afterwards(in_folder, monkeypatch):
    monkeypatch.syspath_prepend(str(in_folder))
    use_files([in_folder])
    use_files()
    assert sys.path.count(str(in_folder)) == 1


def test_the_last_config_and_then_the_working_folder_are_searched(in_folder):
    one, other = project(in_folder / "one"), project(in_folder / "other", width=9)
    project(in_folder / "here", width=5)
    assert resolve([one, other]).make_network()[1].out_features == 9
    assert str(in_folder / "other") == str(Path(sys.modules["my_net"].__file__).parent)
    digits = f"--config={REPOSITORY / 'experiments' / 'digits.yaml'}"
    in_here = [digits, "--model=here.my_net.Net"]
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
    "a name": (NET.replace("WIDTH)", "WIDE)", 1), ["one/my_net.py, line 7: NameError: name 'WIDE'", "Flatten()"]),
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
    "no such class": (NET.replace("class Net", "class Nett"), ["my_net.Net is not there (did you mean my_net.Nett?)"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_in_a_file_of_the_user_s_is_shown_with_its_line(in_folder, case):
    text, expected = ERRORS[case]
    found = problems(project(in_folder / "one", net=text))
    for part in expected:
        assert part in found, found
    assert len(found.splitlines()) <= 3


def test_a_file_that_cannot_be_imported_is_one_problem_of_all_its_parts(in_folder):
    (in_folder / "parts.py").write_text("class Part:\n    def f(self:\n")
    keys = ("data", "loss", "model.block", "model.attention", "model.feed_forward", "optimizer.schedule")
    found = problems("--config=digits", *(f"--{key}.class_path=parts.Part" for key in keys), "--model.depth=x")
    assert found.count("parts.py, line 2: SyntaxError") == 1
    assert "model.depth=x must be" in found


def test_a_network_that_looks_at_its_numbers_is_built_all_the_same(in_folder):
    looks = NET.replace(
        "        super()", "        rates = [float(r) for r in torch.linspace(0, 1, 3)]\n        super()"
    )
    looks += "    def forward(self, images):\n        return super().forward(images / images.std().item())\n"
    assert width(project(in_folder / "one", net=looks)) == 7


def test_copies_are_what_was_imported(in_folder):
    flag, run = project(in_folder / "one"), in_folder / "run"
    run.mkdir()
    resolve([flag])
    (in_folder / "one" / "my_net.py").write_text("raise SystemError('edited while the run began')\n")
    keep_own_files(run)
    assert (run / "my_net.py").read_text() == NET
    assert (run / "pieces" / "width.py").read_text() == "WIDTH = 7\n"


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
    network = resolve([project(in_folder / "one", net=net)]).make_network()
    assert network(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


PACKAGE, LIBRARY = Path(vit_lightning.__file__).parent, Path(sysconfig.get_path("stdlib"))


@pytest.mark.parametrize(
    ("searched", "own", "installed"),
    [
        (PACKAGE.parent, f"{PACKAGE}_mine", PACKAGE),
        (LIBRARY.parent, f"{LIBRARY}_mine", LIBRARY),
        (PACKAGE / "configs", PACKAGE / "configs", PACKAGE),  # else the rates of cifar10_vit_lite are lost to a resume
    ],
)
def test_files_are_the_user_s_by_their_folder_not_by_how_its_name_begins(searched, own, installed):
    use_files([searched])
    try:
        assert [_is_own(f"{folder}/rates.py") for folder in (own, installed)] == [True, False]
    finally:
        use_files()


def test_an_error_of_a_loss_or_an_optimizer_in_the_check_names_file_and_line(in_folder):
    (in_folder / "own_parts.py").write_text(
        "import torch\ndef loss(logits, targets):\n    return undefined(logits)\n"
        "def third(logits, targets, weight):\n    return None\n"
        "class Own(torch.optim.SGD):\n    def step(self, closure=None):\n        raise KeyError('oh')\n"
    )
    flags = "--data=Digits", "--model.patch_size=2", "--loss=own_parts.loss", "--optimizer=own_parts.Own"
    assert "loss.weight is missing" in problems(*flags[:2], "--loss=own_parts.third")
    found = problems(*flags)
    assert "NameError: name 'undefined' is not defined (own_parts.py, line 3)" in found
    assert "KeyError: 'oh' (own_parts.py, line 8)" in found
