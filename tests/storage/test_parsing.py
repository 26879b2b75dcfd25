"""YAML of anybody's: what it cannot mean is one sentence with its line, never a traceback or a wait without end."""

import pytest

from vit_lightning import UserError
from vit_lightning.storage.parsing import parse_yaml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n? [b]\n: 2", "line 2, column 3: a key must be a text"),
        ("? {b: c}\n: 2", "line 1, column 3: a key must be a text"),
        ("a: !!map b", "expected a mapping node"),
        ("a: 2020-13-45", "2020-13-45 is no timestamp .in quotes"),
        ("a: [1, 0x_]", "column 8: 0x_ is no whole number"),
        (f"a: {'1' * 5000}", "is no whole number"),
        ("a: !!bool x", "x is no truth value"),
        ("a: !!timestamp x", "x is no timestamp"),
        ("a: 1\nb: {c: 2, c: 3}", r"c comes twice \(line 2\)"),
        ("a:\n\t- 1", "indent with spaces"),
        ("a: !!python/object/apply:builtins.open [marker, w]", "could not determine a constructor for the tag"),
    ],
)
def test_what_yaml_cannot_mean_is_named_with_its_place(text, message):
    with pytest.raises(UserError, match=f"^x.yaml.*{message}"):
        parse_yaml(text, "x.yaml")


def test_numbers_keys_and_aliases_are_read_as_they_are_meant():
    text = "{lr: 1e-3, on: yes, null: ~, 3: [&a {b: 1}, *a], '2020-13-45': '2020-13-45', <<: {d: 1}}"
    expected = {"lr": 0.001, "on": True, "null": None, 3: [{"b": 1}] * 2, "2020-13-45": "2020-13-45", "d": 1}
    assert parse_yaml(text, "") == expected
