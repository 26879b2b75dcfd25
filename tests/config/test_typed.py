"""Plain values as the types of signatures: what is read, what is refused and in which words, what is made."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from functools import partial
from numbers import Number
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch import nn

from vit_lightning import MSSA, UserError
from vit_lightning.config.signatures import Part, made, signature_of
from vit_lightning.config.typed import Place, Reader


class Colour(Enum):
    RED = "red"


READ: list[tuple[Any, Any, Any]] = [
    (int, "3", 3),
    (int, 3, 3),
    (int, "32.0", 32),  # as agents of sweeps write it
    (int, 1e3, 1000),
    (int | None, "1e3", 1000),
    (int | str, "2.0", 2),
    (int | float | None, "1.0", 1.0),
    (float, "1e-3", 0.001),
    (float, 1, 1.0),
    (bool, "true", True),
    (str, "3", "3"),
    (Path, "a/b", Path("a/b")),
    (str | None, "", ""),
    (Optional[int | str], "", ""),  # noqa: UP045
    (Any, "", ""),
    (str | None, None, None),
    (Optional[int], "null", None),  # noqa: UP045  # as libraries write it
    (int | None, None, None),
    (int | str, "3", 3),
    (Union[str, int], "auto", "auto"),  # noqa: UP007
    (int | float, "0.5", 0.5),
    (float | int, "1", 1),  # Optional[Union[int, float]] may be given in either order
    (Number | None, "0.5", 0.5),  # as torchvision's transforms have it
    (Literal["a", 2], "2", 2),
    (bool | Literal["warn"], "warn", "warn"),
    (list[float], [1, "2"], [1.0, 2.0]),
    (tuple[int, int], ["1", 2], (1, 2)),
    (tuple[float, ...], [1], (1.0,)),
    (Sequence[str], ["x"], ["x"]),
    (Mapping[str, int], {"a": "1"}, {"a": 1}),
    (timedelta, "00:30:00", timedelta(minutes=30)),
    (timedelta | None, {"minutes": 5}, timedelta(minutes=5)),
    (Colour, "RED", Colour.RED),
    (Any, "1e3", 1000.0),
    (Any, "a: b", "a: b"),
    (type[nn.Module], "torch.nn.GELU", nn.GELU),
]


@pytest.mark.parametrize(("kind", "given", "value"), READ)
def test_a_value_is_read_as_its_type(kind, given, value):
    reader = Reader()
    found = reader.value(kind, given, "a.b")
    found = found.make() if isinstance(found, Part) else found
    assert (found, type(found), reader.problems) == (value, type(value), [])


REFUSED: list[tuple[Any, Any, str]] = [
    (int, True, "a.b=True must be an int"),
    (int, 2.5, "a.b=2.5 must be an int"),
    (int, "2.5", "a.b=2.5 must be an int"),
    (bool, 1, "a.b=1 must be true or false"),
    (str, 3, "a.b=3 must be a string"),
    (Literal["timm", "deit"] | None, "tim", "a.b=tim must be one of timm, deit or null (did you mean timm?)"),
    (Literal["x"] | Literal["y"] | None, "z", "a.b=z must be one of x, y or null"),
    (list[int], [1, "x"], "a.b.1=x must be an int"),
    (dict[str, int], {"k": "x"}, "a.b.k=x must be an int"),
    (Iterable[int], 3, "a.b=3 must be a list"),
    (nn.Module, "torch.optim.SGD", "a.b.class_path=torch.optim.SGD must be a Module"),
    (nn.Module, 3, "a.b=3 must be a class"),
    (Callable[[int], nn.Module], {"class_path": "RMSNorm", "ep": 1}, "a.b.ep=1: there is no such option (did you mean"),
]


@pytest.mark.parametrize(("kind", "given", "problem"), REFUSED)
def test_a_wrong_value_is_named_with_its_key_and_its_type(kind, given, problem):
    reader = Reader()
    reader.value(kind, given, "a.b")
    assert len(reader.problems) == 1
    assert reader.problems[0].startswith(problem)


def test_a_factory_has_the_options_that_nobody_gives_it():
    def block(emb_size, attention, norm=nn.LayerNorm, *, scale=1.0, other: int = 2): ...

    options = signature_of(block, 3).options
    assert list(options) == ["scale", "other"]
    kind = Callable[[int, int], nn.Module]
    part = Reader().value(kind, {"class_path": "MSSA", "dim_head": "4"}, "a")
    made = part.make()
    assert isinstance(made, partial)
    assert made.func is MSSA
    assert isinstance(made(8, 2), MSSA)
    assert part.plain()["init_args"]["dim_head"] == 4


def test_a_transform_of_torchvision_is_made_where_any_function_may_stand():
    normalise = {"class_path": "torchvision.transforms.Normalize", "mean": [0.5], "std": [0.25]}
    given = {"class_path": "torchvision.transforms.Compose", "transforms": [normalise]}
    compose = made(Reader().value(Callable[[Any], Any] | None, given, "a"))
    assert compose(torch.ones(1, 2, 2)).unique().tolist() == [2.0]


def test_what_a_class_passes_on_belongs_to_it_without_its_defaults():
    class Derived(EarlyStopping):
        def __init__(self, *args, extra=1, **kwargs):
            super().__init__(*args, **kwargs)

    signature = signature_of(Derived)
    assert signature.options["patience"].passed_on
    reader = Reader()
    assert reader.arguments(signature.options, {"monitor": "x", "patience": "5"}, "") == {
        "extra": 1,
        "monitor": "x",
        "patience": 5,
    }
    assert reader.problems == []


def like(width: int, heads: int, norm: str, rate: float = 0.0): ...


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (lambda width, norm, gate=2: (width, norm, gate), (8, "n", 3)),  # those that it has, by name
        (lambda norm, width, gate=2: (norm, width, gate), ("n", 8, 3)),
        (lambda w, h, n, r, gate=2: (w, h, n, r, gate), (8, 4, "n", 0.0, 3)),  # all, in their order
        (lambda width, heads, norm, rate, gate=2: (width, heads, norm, rate, gate), (8, 4, "n", 0.0, 3)),
    ],
)
def test_a_factory_gets_the_arguments_that_it_has_by_name_or_all_in_their_order(target, expected, monkeypatch):
    monkeypatch.setattr("vit_lightning.config.typed.find_class", lambda name: target)
    reader = Reader()
    place = Place(None, partial, 4)
    part = reader.part(place, {"class_path": "my.Part", "gate": 3}, "block", like)
    assert not reader.problems
    assert part.make()(8, 4, "n", 0.0) == expected
    assert part.plain() == {"class_path": "my.Part", "init_args": {"gate": 3}}
    if len(expected) == 3:
        with pytest.raises(UserError, match="rate: <lambda> takes no rate"):
            part.make()(8, 4, "n", 0.1)
    reader.part(place, {"class_path": "my.Part", "width": 3, "gat": 3}, "block", like)
    far, near = sorted(reader.problems, reverse=True)
    assert near.startswith("block.gat=3: there is no such option (did you mean block.gate?")
    assert far.startswith("block: my.Part has no width (")


@pytest.mark.parametrize(
    "target",
    [lambda w, rate=0.1: None, lambda w, h=8, n=None, r=0.0: None, lambda w: None],
    ids=["an option would take the heads", "a default of another name", "too few"],
)
def test_arguments_that_would_fall_on_others_are_refused(target, monkeypatch):
    monkeypatch.setattr("vit_lightning.config.typed.find_class", lambda name: target)
    reader = Reader()
    assert reader.part(Place(None, partial, 4), "my.Part", "block", like) is None
    assert "block.class_path=my.Part gets width, heads, norm, rate as its first arguments" in reader.problems[0]


class Swallows(nn.Module):
    def __init__(self, hidden: int = 4, **kwargs):
        super().__init__()


class Hands(LightningModule):
    def __init__(self, hidden: int = 4, **kwargs):
        super().__init__()
        self.layers = nn.Linear(hidden, **kwargs)


class HandsOn(Hands):
    def __init__(self, more: int = 1, **kwargs):
        super().__init__(**kwargs)


@pytest.mark.parametrize(
    ("kind", "given", "problem"),
    [
        ("WandbLogger", {"entity": "me", "group": "g", "tags": ["a"], "notes": "n", "job_type": "fit"}, ""),
        ("TensorBoardLogger", {"save_dir": "logs", "flush_secs": 3}, ""),
        ("lightning.pytorch.strategies.DDPStrategy", {"find_unused_parameters": True}, ""),
        (f"{__name__}.Hands", {"out_features": 3}, ""),
        (f"{__name__}.HandsOn", {"out_features": 3, "hidden": 2}, ""),
        (f"{__name__}.Hands", {"hiddn": 3}, "a.hiddn=3: there is no such option (did you mean a.hidden?)"),
        (f"{__name__}.Swallows", {"out_features": 3}, "a.out_features=3: there is no such option (choose hidden)"),
    ],
)
def test_names_that_a_class_hands_on_are_taken_and_those_that_it_would_swallow_are_not(kind, given, problem):
    """PL#17486: to a known function with its types, else as only the callee knows."""
    base = Logger if "Logger" in kind else Strategy if "Strategy" in kind else nn.Module
    reader = Reader()
    part = reader.part(Place(base), {"class_path": kind, **given}, "a")
    assert reader.problems == ([problem] if problem else [])
    if not problem:
        assert part.plain()["init_args"].items() >= given.items()
