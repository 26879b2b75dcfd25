"""Classes that go by name."""

import pytest

from vit_lightning.classes import are_named, in_order, match_classes
from vit_lightning.errors import UserError


def match(model, data, classes=None):
    return match_classes(model, data, whose="the model", ours="the data", classes=classes or len(model or data))


@pytest.mark.parametrize(
    ("model", "data", "labels"),
    [
        (["cat", "dog", "owl"], ["cat", "dog", "owl"], [0, 1, 2]),
        (["cat", "dog", "owl"], ["owl", "cat", "dog"], [2, 0, 1]),
        (["cat", "dog", "owl"], ["owl", "dog"], [2, 1]),
        (["1", "2", "5"], ["5", "1"], [2, 0]),
        (["crane", "crane"], ["crane", "crane"], [0, 1]),
        (["crane", "crane", "owl"], ["owl"], [2]),
        (["caf\u00e9", "zoo"], ["zoo", "cafe\u0301"], [1, 0]),
    ],
)
def test_labels_are_those_of_the_same_name(model, data, labels):
    assert match(model, data) == (labels, "")


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (["cat", "dog", "owl"], ["canine", "feline", "strix"]),
        (["cat", "dog"], ["cat", "dog", "owl"]),
        (["crane", "crane", "owl"], ["owl", "crane"]),
        (["cat", "dog", "owl"], ["0", "1"]),
        (["0", "1", "2"], ["cat", "dog"]),
        (None, ["cat", "dog"]),
    ],
)
def test_other_classes_are_refused_with_both_lists(model, data):
    with pytest.raises(UserError) as error:
        match(model, data, classes=len(model or "abc"))
    assert all(name in str(error.value) for name in data + (model or []))


@pytest.mark.parametrize("data", [["0", "1", "2"], ["0", "2", "5"], ["03", "9"]])
@pytest.mark.parametrize("model", [None, list("0123456789"), [f"LABEL_{n}" for n in range(10)]])
def test_classes_that_are_numbers_are_outputs_of_a_model_without_names_with_a_note(model, data):
    found = match(model, data, classes=10)
    assert found.labels == [int(name) for name in data]
    assert "equated by their numbers" in found.note


@pytest.mark.parametrize("data", [["0", "12"], ["1", "01"], ["0", "x"]])
def test_numbers_that_are_no_outputs_are_refused(data):
    with pytest.raises(UserError):
        match(list("0123456789"), data)


@pytest.mark.parametrize("turned", [False, True])
def test_imagenet_s_classes_have_one_order_under_synonyms(turned):
    short = [f"animal {number}" for number in range(998)] + ["crane bird", "crane"]
    long = [f"animal {number}, Animalia {number}" for number in range(998)] + ["crane", "crane"]
    assert match(*((short, long) if turned else (long, short))) == (list(range(1000)), "")
    with pytest.raises(UserError, match="the model has no"):
        match(long, short[::-1])


@pytest.mark.parametrize("model", [None, ["0", "1"], ["LABEL_0", "LABEL_1"]])
def test_classes_without_names_are_equated_with_a_note(model):
    found = match(model, ["cat", "dog"], classes=2)
    assert found.labels == [0, 1]
    assert "numbers" in found.note


def test_folders_that_are_numbers_are_in_order_of_value():
    assert in_order(["10", "2", "1"]) == ["1", "2", "10"]
    assert in_order(["1", "01", "0"]) == in_order(["01", "1", "0"]) == ["0", "01", "1"]
    assert in_order(["10", "2", "a"]) == ["10", "2", "a"]
    assert not are_named(["0", "1"])
    assert are_named(["1", "2"])
