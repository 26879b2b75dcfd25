import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from runs import SMALL
from scipy.stats import binomtest

from vit_lightning import Digits
from vit_lightning.cli import main
from vit_lightning.commands.console import stage_line
from vit_lightning.figures.curves import curves, save
from vit_lightning.figures.pictures import balanced, sheet, short
from vit_lightning.figures.test_report import class_rows, interval, report_test, wilson


@pytest.mark.parametrize(("correct", "images"), [(0, 10), (10, 10), (7, 10), (445, 1000), (356, 360)])
def test_the_interval_is_wilson_s(correct, images):
    expected = binomtest(correct, images).proportion_ci(method="wilson")
    assert wilson(correct, images) == pytest.approx((expected.low, expected.high), abs=1e-7)


def made_up_table(images: int) -> dict[str, np.ndarray]:
    """A test of Digits in which every third image is wrong, the later ones the more so."""
    labels = Digits().dataset("test").labels[:images].numpy()
    wrong = np.arange(images) % 3 == 0
    return {
        "index": np.arange(images),
        "label": labels,
        "prediction": np.where(wrong, (labels + 1) % 10, labels),
        "confidence": np.full(images, 0.8, dtype=np.float32),
        "loss": np.where(wrong, 1.0 + np.arange(images), 0.1).astype(np.float32),
    }


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def test_accuracies_by_class_count_each_image_once():
    table = made_up_table(90)
    rows = class_rows(table, [*map(str, range(10)), "none of these"])
    assert sum(row[1] for row in rows) == 90
    assert sum(row[2] for row in rows) == 60
    assert rows[-1][:3] == ("none of these", 0, 0)
    assert math.isnan(rows[-1][3])
    assert interval(table)["test/acc_low"] < 60 / 90 < interval(table)["test/acc_high"]
    assert interval({}) == {}


def test_the_worst_errors_are_errors_of_the_highest_loss(tmp_path):
    data, table = Digits(), made_up_table(90)
    said = report_test(tmp_path, table, data)
    rows = read(tmp_path / "errors.csv")
    assert [int(row["index"]) for row in rows] == list(range(87, 87 - 60, -3))
    assert all(row["label"] != row["prediction"] for row in rows)
    assert len(said.splitlines()) == 11
    assert len(read(tmp_path / "classes.csv")) == 10
    table["prediction"] = table["label"]  # without errors there is no sheet of them
    (tmp_path / "perfect").mkdir()
    report_test(tmp_path / "perfect", table, data)
    assert read(tmp_path / "perfect" / "errors.csv") == []
    assert not (tmp_path / "perfect" / "worst_errors.png").exists()


@pytest.mark.usefixtures("drawn")
def test_a_test_reports_the_same_in_fit_and_on_its_own(in_folder, capsys):
    assert main(["fit", *SMALL, "--out=run"]) == 0
    said = capsys.readouterr().out
    assert "95 % interval" in said
    assert main(["test", "--ckpt=run", "--out=again"]) == 0
    table = [line for line in said.splitlines() if " to " in line and not line.startswith("test")]
    assert len(table) == 10
    assert all(line in capsys.readouterr().out.splitlines() for line in table[:1])
    fitted, tested = (json.loads(Path(place, "results.json").read_text()) for place in ("run", "again"))
    assert tested["test/acc_low"] == fitted["test/acc_low"] < fitted["test/acc"] < fitted["test/acc_high"]
    for name in ("classes.csv", "errors.csv"):
        assert Path("run", name).read_bytes() == Path("again", name).read_bytes()
    table = np.load("run/test_predictions.npz")
    assert table["loss"].mean() == pytest.approx(fitted["test/loss"], abs=1e-5)
    assert len(read(Path("run/errors.csv"))) == 20
    for name in ("worst_errors", "confusion", "test_images"):
        with Image.open(f"again/{name}.png") as picture:
            assert min(picture.size) > 100


def test_names_with_dollars_and_line_breaks_are_drawn_as_they_are(tmp_path):
    target = tmp_path / "elsewhere"
    target.write_text("mine")
    (tmp_path / "curves.png").symlink_to(target)
    save(curves([{"step": 0, "val/loss": 1.0, "val/acc": 0.5}], "a$^$b"), tmp_path / "curves.png")
    assert target.read_text() == "mine"  # the link is replaced, not followed
    assert short("first\nsecond \t", 200) == "first second"


def test_long_names_stay_within_their_image():
    drawn = np.asarray(
        sheet(np.full((2, 3, 8, 8), 255, dtype=np.uint8), ["n" * 60, "$_a$\nb"], [False, False], "title")
    )
    middle = drawn.shape[1] // 2
    assert (drawn[26:, middle - 1 : middle + 1] == 255).all()
    assert (drawn[26:, :middle] < 128).any()
    assert (drawn[26:, middle:] < 128).any()
    assert short("n" * 60, 100.0) == short("n" * 90, 100.0) != "n" * 60
    assert short("cat", 100.0) == "cat"


@pytest.mark.parametrize(("classes", "count", "each"), [(2, 40, 20), (10, 40, 4), (100, 40, 1), (10, 8, 1)])
def test_a_sample_is_balanced_and_spread(classes, count, each):
    labels = np.sort(np.arange(1000) % classes)
    chosen = balanced(labels, count)
    shown, counts = np.unique(labels[chosen], return_counts=True)
    assert len(chosen) == len({*chosen}) == each * len(shown)
    assert set(counts.tolist()) == {each}
    assert len(shown) == min(classes, count)
    assert shown[-1] + 1 >= 0.85 * classes
    assert np.ptp(np.array(chosen)[labels[chosen] == shown[0]]) >= (each - 1) * (1000 // classes) // each


def test_losses_that_differ_in_kind_share_no_panel():
    rows = [{"step": 9, "val/loss": 2.0, "val/acc": 0.25}, {"step": 9, "train/loss": 1.0, "train/acc": 0.5}]
    plain = curves(rows, "run", best_step=10).axes
    averaged = curves([*rows, {"step": 9, "lr": 0.001}], "run", averaged=True, best_step=10).axes
    assert [axis.get_ylabel() for axis in plain] == ["training loss", "validation loss", "accuracy"]
    assert averaged[3].get_ylabel() == "learning rate"
    assert plain[2].get_title().endswith(": 25.00 %")
    assert plain[1].get_title().endswith(": 2.0000")
    assert all(axis.lines[0].get_marker() == "o" for axis in plain)  # a point is seen
    [marked] = [line for line in plain[0].lines if line.get_linestyle() == ":"]
    [legend] = plain[0].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["training", "validation", "best checkpoint (step 10)"]
    assert averaged[0].figure.legends[0].get_texts()[1].get_text() == "validation, averaged weights"
    assert {*marked.get_xdata()} == {10}


def test_metrics_are_printed_in_words_and_percent_and_those_of_others_by_their_name():
    results = {
        "test/loss": 0.25,
        "test/acc": 0.5,
        "test/f1": 0.5,
        "test/acc_low": 0.4,
        "test/acc_high": 0.6,
        "val/acc": 1,
    }
    said = "test        accuracy 50.00 % (95 % interval 40.0 to 60.0 %), f1 0.5000, loss 0.2500"
    assert stage_line("test", results) == said
    assert stage_line("train", results) == ""
