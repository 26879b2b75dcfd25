"""The HTML page of runs: its data are read back from it, and a browser draws it."""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from vit_lightning.cli import main
from vit_lightning.figures.board import read_board
from vit_lightning.storage.folder import hold, runs_in
from vit_lightning.storage.metrics import write_results

CLASSES = ["cat", "<b>dog</b>"]


def make_run(folder: Path, *, seed: int = 0, depth: int = 2, rows: int = 40, finished: bool = True) -> Path:
    """Writes the files of a run that nobody trained."""
    (folder / "validation").mkdir(parents=True)
    config = {"experiment": "small", "seed_everything": seed, "model": {"class_path": "vit_lightning.ViT"}}
    config["model"]["init_args"] = {"depth": depth}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    home = Path.home()
    environment = {
        "command": f"lightning fit --data.root={home}/images --init_from=hf_{'k' * 20}",
        "folder": str(home),
        "git": {"package": {"commit": "a" * 40}},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    lines = []
    for step in range(rows):
        loss = 2.0 / (1 + step) + 0.1 * math.sin(step)
        row = {"step": step, "epoch": step // 10, "train/loss_step": loss, "speed/step_seconds": 0.1}
        if step % 10 == 9:
            row |= {"val/acc": step / rows, "val/loss": loss}
        lines.append(json.dumps(row | {"time": 1.7e9 + step}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "warnings.log").write_text(f"a warning in {home}/x.py </script><script>alert(1)</script>\n")
    counts = {"confusion": [[0, 0, 3], [1, 0, 1]], "class_images": [3, 1], "class_accuracy": [1.0, 0.0]}
    bins = {"edges": [0.0, 0.5, 1.0], "right": [0, 3], "wrong": [1, 0]}
    for epoch in (1, 4):
        facts = {"epoch": epoch, "classes": CLASSES, **counts, "confidence": bins, "images": 4, "accuracy": 0.75}
        (folder / "validation" / f"epoch-{epoch:04d}.json").write_text(json.dumps(facts))
        Image.new("RGB", (20, 10), "red").save(folder / "validation" / f"epoch-{epoch:04d}.png")
    if finished:
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 2000, 3), dtype=np.uint8)).save(
            folder / "worst_errors.png"
        )
        label = np.array([0, 0, 1, 1])
        np.savez(folder / "test_predictions.npz", label=label, prediction=label[::-1], confidence=np.full(4, 0.7))
        (folder / "classes.csv").write_text("class,images\ncat,2\n<b>dog</b>,2\n")
        (folder / "errors.csv").write_text("index,label\n3,<i>cat</i>\n")
        write_results(
            folder, {"test/acc": 0.5 + depth / 10 + seed / 100, "val/acc": 0.9, "best_step": 30, "test/f1": math.nan}
        )
    return folder


def charts_of(page: Path) -> list[dict]:
    text = page.read_text()
    assert text.count("<script") == text.count("</script>") == 3
    packed = re.search(r'<script type="text/plain" id="plots">(.*?)</script>', text).group(1)
    found = gzip.decompress(base64.b64decode(packed)).decode()
    assert str(Path.home()) not in found
    return json.loads(found, parse_constant=pytest.fail)


def test_a_page_holds_what_the_files_of_runs_say(tmp_path, capsys):
    runs = tmp_path / "<runs>"
    first = make_run(runs / "a", seed=0)
    make_run(runs / "b", seed=1)
    make_run(runs / "c", depth=3, rows=5000)
    live = make_run(runs / "d", depth=3, finished=False, rows=0)
    diverged = make_run(runs / "e", depth=4, finished=False)
    (diverged / "diverged.json").write_text("{}")
    with (diverged / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "train/loss_step": "nan", "time": 1700000040}\n{"step": 41, "tra')
    make_run(runs / "g", depth=5, finished=False)
    (tmp_path / "ledger" / "g").mkdir(parents=True)
    (tmp_path / "ledger" / "g" / "0001.end").write_text('{"outcome": "failed", "cause": "out of memory"}')
    empty = runs / "f"
    empty.mkdir()
    (empty / "environment.json").write_text("{broken")
    for name in ("config.yaml", "metrics.jsonl", "test_predictions.npz", "worst_errors.png", "classes.csv"):
        (empty / name).write_bytes(b"\xff: [")
    (empty / "test_images.png").symlink_to(Path("/proc/self/environ"))  # a file that is no picture
    with hold(live, "test"):
        holder = os.fork()
        if holder == 0:  # another process, since a lock does not hold against one's own
            (tmp_path / "data.json").write_text(json.dumps(read_board(runs_in(runs))))
            os._exit(main(["board", str(runs)]))
        assert os.waitpid(holder, 0)[1] == 0
    data = json.loads((tmp_path / "data.json").read_text())
    by_name = {run["name"]: run for run in data["runs"]}
    assert data["name"] == "<runs>"
    assert data["differing"] == ["model.depth"]
    states = {name: run["state"] for name, run in by_name.items()}
    assert states == dict.fromkeys("abc", "finished") | {"d": "running", "e": "diverged", "f": "stopped", "g": "failed"}
    assert by_name["g"]["cause"] == "out of memory"
    assert by_name["f"]["pictures"] == {}
    assert [by_name[name]["group"] for name in "abcde"] == [0, 0, 1, 1, 2]  # seeds of one config belong together
    a, c, e = by_name["a"], by_name["c"], by_name["e"]
    assert a["results"]["test/acc"] == 0.7
    assert a["config"]["model.depth"] == "2"
    assert a["series"]["val/acc"]["step"] == [10, 20, 30, 40]  # steps done, as best_step is counted
    assert a["steps_per_epoch"] == 10
    assert a["environment"]["command"] == "lightning fit --data.root=~/images --init_from=***"
    assert a["environment"]["all"]["git"]["package"]["commit"] == "a" * 40
    assert a["environment"]["commit"] == f"{'a' * 12} (package)"
    assert e["series"]["train/loss_step"]["bad"] == 1
    assert len(e["series"]["train/loss_step"]["y"]) == 40
    assert {*a["evaluations"]} == {"validation, epoch 1", "validation, epoch 4", "test"}
    assert a["evaluations"]["test"]["confusion"] == [[0, 1, 2], [1, 0, 2]]
    assert a["evaluations"]["test"]["classes"] == CLASSES
    thin = c["series"]["train/loss_step"]
    whole = [2.0 / (1 + step) + 0.1 * math.sin(step) for step in range(5000)]
    assert thin["n"] == 5000
    assert len(thin["y"]) == len(thin["low"]) < 2500
    assert (thin["step"][0], thin["step"][-1]) == (1, 5000)
    assert [thin["y"][0], thin["y"][-1]] == pytest.approx([whole[0], whole[-1]], rel=1e-4)
    assert (min(thin["low"]), max(thin["high"])) == pytest.approx((min(whole), max(whole)), rel=1e-4)
    figure = a["pictures"]["Worst errors of the test"]
    with Image.open(io.BytesIO(base64.b64decode(figure.partition(",")[2]))) as image:
        assert image.width == 1400
    page = (runs / "board.html").read_text()
    assert len(page) < 5_000_000
    assert str(Path.home()) not in page
    assert "<b>dog" not in page
    assert "alert(1)</script>" not in page
    assert '<tr class="differs"><th>model.depth</th><td>2</td></tr>' in page
    drawn = [[line["trace"]["name"] for line in plot.get("lines", ())] for plot in charts_of(runs / "board.html")]
    assert [*"abceg"] in drawn
    capsys.readouterr()
    assert main(["board", str(first), f"--out={tmp_path / 'new' / 'one.html'}"]) == 0
    assert "<h1>a <span" in (tmp_path / "new" / "one.html").read_text()
    assert capsys.readouterr().out == f"{tmp_path / 'new' / 'one.html'}\n"


def lines_of(page: Path) -> dict[str, list[tuple]]:
    """Colour, dash and places of the curves of a page, by metric."""
    lines = [line for plot in charts_of(page) for line in plot.get("lines", ())]
    return {
        line["trace"]["name"]: (line["trace"]["line"]["color"], line["trace"]["line"]["dash"], line["step"])
        for line in lines
    }


def test_a_split_has_one_colour_and_dash_and_nothing_is_drawn_twice_or_empty(tmp_path):
    run = make_run(tmp_path / "run", finished=False, rows=0)
    names = ("train/acc", "val/acc", "train/ce", "val/loss", "train/loss", "train/loss_step")
    row = {"step": 9, "epoch": 0, **dict.fromkeys(names, 0.5), "optim/grad_norm": "nan", "time": 1}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["board", str(run)]) == 0
    drawn = lines_of(run / "board.html")
    assert "train/loss_step" not in drawn  # of one epoch: it repeats the loss
    assert "optim/grad_norm" not in drawn
    assert {name: drawn[name] for name in names[:-1]} == {
        name: ("--c0", "solid", [10]) if name.startswith("train") else ("--c1", "dash", [10]) for name in names[:-1]
    }
    for plot in charts_of(run / "board.html"):
        assert all(line["trace"]["mode"] == "lines+markers" for line in plot.get("lines", ()))  # a point is seen


def damaged_rows(rows: str) -> bytes:
    return "".join(f'{{"step": {n}, "epoch": 0, "val/acc": 0.5, {rows}}}\n' for n in range(3)).encode()


DAMAGED = {
    "metrics.jsonl": {
        "endless time": damaged_rows('"time": 1e999'),
        "late time": damaged_rows('"time": 1e18'),
        "list": damaged_rows('"x": [1.0]'),
        "long number": damaged_rows(f'"x": {"9" * 400}'),
        "step": damaged_rows(f'"step": {"9" * 400}'),
        "nested": damaged_rows(f'"x": {"[" * 100_000}'),
    },
    "results.json": {"nested": b"[" * 100_000, "no seal": b'{"val/acc": 1}'},
    "environment.json": {"list": b"[]", "nested": b'{"git": ' * 2000, "other": b'{"git": 3, "gpus": 1}'},
    "config.yaml": {
        "date": b"experiment: 2020-13-45",
        "nested": b"a: " + b"[" * 3000,
        "aliases": b"a0: &a0 [x]\n"
        + b"".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n".encode() for n in range(1, 12)),
        "itself": b"&a {tags: [*a]}",
        "keys": b"? [a]\n: 1\n1: 2",
    },
    "test_predictions.npz": {"empty": b"", "cut": 0.5, "flipped": 0.9},
    "validation/epoch-0001.json": {
        "shape": b'{"confusion": 3}',
        "cells": b'{"classes": ["a"], "confusion": [[0, 7, 1]]}',
    },
    "validation/epoch-0001.png": {"large": "bomb"},
    "validation/epoch-x.png": {"name": b"png"},
    "errors.csv": {"field": b"a\n" + b"x" * 200_000},
    "classes.csv": {"empty line": b"class,images\ncat,2\n\ndog,2\n"},
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in DAMAGED.items() for kind in kinds])
def test_a_damaged_file_is_left_out_and_named(tmp_path, capsys, name, kind):
    run = make_run(tmp_path / "run")
    path, content = run / name, DAMAGED[name][kind]
    if content == "bomb":
        Image.new("1", (30_000, 30_000)).save(path)
    elif isinstance(content, float):
        whole = bytearray(path.read_bytes())
        place = int(content * len(whole))
        path.write_bytes(whole[:place] if kind == "cut" else bytes([*whole[:place], *(255 - b for b in whole[place:])]))
    else:
        path.write_bytes(content)
    assert main(["board", str(run), str(make_run(tmp_path / "other")), f"--out={tmp_path}/board.html"]) == 0
    said = capsys.readouterr().out
    named = f"run: 1 file cannot be read: {name}: " in said
    assert named == ((name, kind) not in {("classes.csv", "empty line"), ("metrics.jsonl", "nested")})
    assert (f"cannot be read</dt><dd>{name}" in (tmp_path / "board.html").read_text()) == named
    charts_of(tmp_path / "board.html")


def test_files_that_a_link_takes_from_elsewhere_are_not_shown(tmp_path):
    (tmp_path / "secret").write_text("a,b\nwhat is secret,1\n")
    run = make_run(tmp_path / "run")
    for name in ("errors.csv", "warnings.log", "config.yaml"):
        (run / name).unlink()
        (run / name).symlink_to(tmp_path / "secret")
    assert main(["board", str(run)]) == 0
    page = (run / "board.html").read_text()
    assert "what is secret" not in page
    assert "errors.csv: a link to another place" in page


def test_pictures_are_png_files_of_the_run_itself(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    Image.new("RGB", (3, 3), (1, 2, 3)).save(tmp_path / "secret.png")
    (run / "test_images.png").symlink_to(tmp_path / "secret.png")
    (run / "worst_errors.png").write_bytes(POSTSCRIPT + b"\n" * 50_000)  # what is larger is drawn anew
    monkeypatch.setattr("subprocess.Popen", None)  # Pillow asks Ghostscript to draw PostScript
    assert main(["board", str(run)]) == 0
    page = (run / "board.html").read_text()
    assert "test_images.png: a link to another place" in page
    assert "worst_errors.png: cannot identify image file" in page
    for content in ((tmp_path / "secret.png").read_bytes(), POSTSCRIPT):
        assert base64.b64encode(content)[:40].decode() not in page


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_lock_that_is_no_file_holds_no_run(tmp_path, kind):
    run = make_run(tmp_path / "run")
    (run / "results.json").unlink()
    os.mkfifo(run / ".lock") if kind == "pipe" else (run / ".lock").symlink_to("/dev/zero")
    assert main(["board", str(run)]) == 0
    assert "running" not in read_board([run])["runs"][0]["state"]


def test_folders_without_a_run_are_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["board", str(tmp_path / "missing"), str(tmp_path / "empty"), "--out=x.html"]) == 2
    said = capsys.readouterr().err
    assert "missing is not there" in said
    assert "empty is empty (a run folder has" in said
    assert main(["board", str(tmp_path), "--out=x.txt"]) == 2
    assert "out=x.txt must end with .html" in capsys.readouterr().err


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\nshowpage\n"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


TICK = """<script type="module">
const tick = (selector) => document.querySelector(selector)?.click();
const names = () => [...new Set(document.querySelector("[data-plot]").data.map((one) => one.name))].join("; ");
while (!document.querySelector("[data-plot]").data) await new Promise((wait) => setTimeout(wait, 50));
tick("input[name=mean]");
const both = names();
tick("input[name=run]");
document.title = `${both}, then ${names()}`;
</script></body>"""


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_draws_the_page_without_errors_and_asks_for_nothing(tmp_path, width):
    for name, seed, depth in (("a", 0, 2), ("b", 1, 2), ("c", 0, 3)):
        make_run(tmp_path / "runs" / name, seed=seed, depth=depth)
    for folder in (tmp_path / "runs", tmp_path / "runs" / "a"):
        assert main(["board", str(folder)]) == 0
        page = (folder / "board.html").read_text()
        (folder / "board.html").write_text(page.replace("</body>", TICK))
        command = [
            *(
                CHROMIUM,
                "--headless",
                "--virtual-time-budget=20000",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
            ),
            *("--disable-component-update", "--disable-sync", "--no-first-run", "--enable-logging=stderr"),
            *(f"--user-data-dir={tmp_path}/profile", f"--log-net-log={tmp_path}/net.json", "--dump-dom"),
            *(f"--window-size={width},900", (folder / "board.html").as_uri()),
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        assert "CONSOLE" not in result.stderr
        drawn = result.stdout.partition('<script type="text/plain"')[0]
        assert 'class="scatterlayer' in drawn
        assert "loss of a batch" in drawn or "train/loss_step" in drawn
        if folder.name == "runs":  # means of the runs that are ticked
            assert re.search("<title>(.*)</title>", drawn)[1] == "2 seeds of a; c, then b; c"
        assert "<b>dog" not in drawn
        assert "Confusion matrix" in drawn
        asked = set(re.findall(r'"url":"([a-z]+:[^"]*)"', (tmp_path / "net.json").read_text()))
        own = [place for place in asked if "google" not in place and "gvt1" not in place]
        assert all(place.startswith(("file:///", "data:")) for place in own), own
