import pytest

from vit_lightning import UserError
from vit_lightning.config.files import flatten, read_config, read_flags, split_words
from vit_lightning.config.merge import config_of_flag, merge
from vit_lightning.config.resolve import merge_all


def test_flags_are_read_in_order():
    words = ["--a.b=1", "--c", "2", "--on", "--d=", "--e=x=y"]
    assert read_flags(words) == [("a.b", "1"), ("c", "2"), ("on", "true"), ("d", ""), ("e", "x=y")]
    assert read_flags(["--print-config", "a.yaml", "--retry", "false", "--trust"]) == [
        ("print_config", "true"),
        ("config", "a.yaml"),
        ("retry", "false"),
        ("trust", "true"),
    ]


def test_a_tilde_is_the_folder_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert read_flags(["--data.root=~/photos", "--ckpt", "~/run"]) == [
        ("data.root", "/home/me/photos"),
        ("ckpt", "/home/me/run"),
    ]
    (tmp_path / "a.yaml").write_text("init_from: ~/a.pth\nout: ~\ndata: {path: '~/b', name: a~/b}\n")
    assert read_config(tmp_path / "a.yaml") == {
        "init_from": "/home/me/a.pth",
        "out": None,
        "data": {"path": "/home/me/b", "name": "a~/b"},
    }
    assert split_words(["~/a.jpg", "~/plan.yaml"]) == ([("config", "/home/me/plan.yaml")], ["/home/me/a.jpg"])


@pytest.mark.parametrize(("folder", "suffix"), [("", "yaml"), ("parts/", "yml")])
def test_a_group_may_stand_in_a_file_beside_the_config(tmp_path, monkeypatch, folder, suffix):
    """PL#11221: relative to the folder of the config, and on the command line to the working folder."""
    (tmp_path / "configs" / folder).mkdir(parents=True)
    for name, text in {
        "model": "class_path: vit_lightning.ViT\ninit_args: {depth: 3, patch_size: 4}\n",
        "data": "class_path: Digits\ninit_args: {batch_size: 7}\n",
        "trainer": "max_epochs: 2\n",
    }.items():
        (tmp_path / "configs" / folder / f"{name}.{suffix}").write_text(text)
    config = tmp_path / "configs" / "exp.yaml"
    config.write_text("".join(f"{name}: {folder}{name}.{suffix}\n" for name in ("model", "data", "trainer")))
    expected = {
        "model": {"class_path": "vit_lightning.ViT", "depth": 3, "patch_size": 4},
        "data": {"class_path": "Digits", "batch_size": 7},
        "trainer": {"max_epochs": 2},
        "experiment": "exp",
    }
    merged = merge_all([("config", str(config)), ("model.depth", "5")], "fit")
    assert merged.config == {**expected, "model": {**expected["model"], "depth": "5"}}
    monkeypatch.chdir(tmp_path / "configs")
    flags = [(name, f"{folder}{name}.{suffix}") for name in ("model", "data", "trainer")]
    assert merge_all([*flags, ("experiment", "exp")], "fit").config == expected
    missing = merge_all([("config", str(config)), ("data", "no.yaml")], "fit")
    assert [text.split(": ")[0] for text in missing.problems] == ["data=no.yaml cannot be read"]


def test_arguments_stand_beside_their_class():
    nested = {
        "x": [{"class_path": "a.B", "init_args": {"c": {"class_path": "d.E", "init_args": {"f": 1}}}}],
        "y": {"z": 2},
    }
    assert flatten(nested) == {"x": [{"class_path": "a.B", "c": {"class_path": "d.E", "f": 1}}], "y": {"z": 2}}
    more = {"class_path": "a.B", "init_args": {"c": 1}, "dict_kwargs": {"d": {"class_path": "E", "dict_kwargs": {}}}}
    assert flatten(more) == {"class_path": "a.B", "c": 1, "d": {"class_path": "E"}}


@pytest.mark.parametrize(
    ("base", "later", "merged"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}}),
        ({"a": [1]}, {"a": [2]}, {"a": [2]}),
        ({"a": [1]}, {"a+": [2]}, {"a": [1, 2]}),
        ({}, {"a+": 2}, {"a": [2]}),
        ({"m": {"class_path": "A", "x": 1}}, {"m": {"class_path": "B"}}, {"m": {"class_path": "B"}}),
        (
            {"m": {"class_path": "A", "x": 1}},
            {"m": {"class_path": "A", "y": 2}},
            {"m": {"class_path": "A", "x": 1, "y": 2}},
        ),
        ({"m": "A"}, {"m": {"x": 1}}, {"m": {"class_path": "A", "x": 1}}),
        (
            {"o": {"schedule": {"class_path": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "gamma": 0.5}}},
            {"o": {"schedule": {"class_path": "StepLR", "step_size": 3}}},
            {"o": {"schedule": {"class_path": "StepLR", "step_size": 3, "gamma": 0.5}}},
        ),
        ({"model": {"x": 1}}, {"model": {"class_path": "ViT"}}, {"model": {"x": 1, "class_path": "ViT"}}),
        ({"model": {"x": 1}}, {"model": {"class_path": "B"}}, {"model": {"class_path": "B"}}),
        ({"m": {"class_path": "A", "x": 1}}, {"m": "B"}, {"m": "B"}),
        (
            {"optimizer": {"class_path": "AdamW", "lr": 1, "weight_decay": 2}},
            {"optimizer": {"class_path": "NAdam", "lr": 3}},
            {"optimizer": {"class_path": "NAdam", "lr": 3, "weight_decay": 2}},
        ),
    ],
)
def test_a_later_config_wins_key_by_key(base, later, merged):
    assert merge(base, later) == merged


def test_values_win_in_an_order_that_the_kinds_of_sources_decide(tmp_path):
    """Defaults < preset < files in order < flags, which are one source in any order."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("model: {patch_size: 4, depth: 6, pool: mean, attention: {class_path: A, dropout: 0.1}}\n")
    second.write_text("model: {preset: S/16, depth: 5}\n")
    flags = [("model.num_heads", "3"), ("model.preset", "Ti/4"), ("model.attention", "B"), ("config", str(first))]
    expected = {"patch_size": 4, "depth": 5, "pool": "mean", "attention": "B", "preset": "Ti/4", "num_heads": "3"}
    assert merge_all([*flags, ("config", str(second))], "fit").config["model"] == expected
    other = merge_all([*flags[:1], ("config", str(first)), ("model.class_path", "a.B")], "fit")
    assert other.config["model"] == {"class_path": "a.B", "num_heads": "3"}


def test_a_flag_is_a_small_config():
    assert config_of_flag("a.init_args.b", "1") == {"a": {"b": "1"}}
    assert config_of_flag("a", "[1, {class_path: B, init_args: {c: 2}}]") == {"a": [1, {"class_path": "B", "c": 2}]}
    assert config_of_flag("a.dict_kwargs.b", "1") == {"a": {"b": "1"}}
    assert config_of_flag("a.b", "None") == config_of_flag("a.b", "null") == {"a": {"b": None}}
    assert config_of_flag("a", '"null"') == {"a": "null"}
    assert config_of_flag("data", "Digits") == {"data": {"class_path": "Digits"}}
    assert config_of_flag("a", '"[0.9]"') == {"a": "[0.9]"}
    assert config_of_flag("a", '"best" run') == {"a": '"best" run'}
    with pytest.raises(UserError, match="a="):
        config_of_flag("a", "[1")
