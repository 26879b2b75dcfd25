import json
import math

import pytest
import torch

from vit_lightning.storage.metrics import MetricsFile, json_number, read_metrics, read_results, write_results


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    metrics = MetricsFile(tmp_path)
    metrics.log_metrics({"train/loss_step": 0.5, "epoch": 2}, step=7)
    (row,) = read_metrics(tmp_path)
    assert row.pop("time") > 1.7e9
    assert row == {"step": 7, "epoch": 2, "train/loss_step": 0.5}


def test_lines_are_appended_and_a_torn_one_is_left_out(tmp_path):
    MetricsFile(tmp_path).log_metrics({"a": 1.0}, step=1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a"')
    again = MetricsFile(tmp_path)
    again.log_metrics({"a": 3.0}, step=3)
    again.finalize("success")
    again.log_metrics({"a": 4.0}, step=4)
    assert [row["a"] for row in read_metrics(tmp_path)] == [1.0, 3.0, 4.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_become_words(tmp_path, value):
    metrics = MetricsFile(tmp_path)
    metrics.log_metrics({"loss": value}, step=0)
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=lambda word: pytest.fail(word))["loss"] == str(value)


def test_a_float32_keeps_its_own_digits():
    assert json_number(torch.tensor(0.2)) == 0.2
    assert json_number(0.1 + 0.2) == 0.1 + 0.2
    assert json_number(16777217.0) == 16777217.0


@pytest.mark.parametrize("value", ["0.9", ["1"], {"a": 1}, None, True])
def test_results_of_another_type_are_left_out(value, tmp_path):
    write_results(tmp_path, {"test/acc": value, "steps": 3, "val/loss": "nan"})
    assert read_results(tmp_path) == {"steps": 3, "val/loss": "nan"}


@pytest.mark.parametrize("text", ["[1, 2]", '"finished"', "7", "{"])
def test_a_file_of_results_of_another_type_is_none(text, tmp_path):
    (tmp_path / "results.json").write_text(text)
    assert read_results(tmp_path) is None


def test_rows_hold_numbers_alone(tmp_path):
    rows = ['{"step": 3, "loss": [1.0], "acc": "low", "lr": null, "best": 0.5, "worst": "inf"}', "[3]", '{"step": "3"}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    assert read_metrics(tmp_path) == [{"step": 3, "best": 0.5, "worst": "inf"}]
