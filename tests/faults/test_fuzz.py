"""A stranger's files: whatever is in them, a command ends in words, runs no code, and keeps to its folder.

Cases are drawn from a seed, VITL_FUZZ_SEED, so that each can be repeated: VITL_FUZZ is their number in all (20,000 is
the whole plan), VITL_FUZZ_CASE=KIND:NUMBER runs one of them and shows its traceback. With VITL_FUZZ_OUT=FOLDER the
faults are kept there, with the number of the last case and the seconds of processor time, and a second call goes on.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_runs
import numpy as np
import processes
import pytest
import torch
import yaml
from PIL import Image
from runs import REPOSITORY, SMALL

CASES, SEED = int(os.environ.get("VITL_FUZZ", 1000)), int(os.environ.get("VITL_FUZZ_SEED", 0))
SECONDS = 10
SECRET = "the-secret-of-the-user"
MARK = "import pathlib; pathlib.Path({!r}).write_text('ran')\nclass Thing:\n    def __init__(self, *a, **k): pass\n"
DEEP = "x"
for _ in range(300):
    DEEP = [DEEP]
WORDS = (
    "",
    "x",
    "auto",
    "null",
    "a" * 5000,
    "$a^$_{\\x}$",
    "line\nline",
    "\x00",
    "\x1b[31m",
    "\ud83d",
    "ﷺ" * 9,
    "1e999",
)
PLACES = ("../secret", "/etc/passwd", "/proc/self/environ", "file:///etc/passwd", "..", ".", "/", "~", "s3://a/b", "-")
NUMBERS = (
    0,
    -1,
    1,
    3,
    7,
    2**31,
    2**63,
    10**400,
    10**4,
    10**6,
    -0.5,
    0.5,
    1.5,
    1e-30,
    1e30,
    math.inf,
    -math.inf,
    math.nan,
    True,
    False,
)
SHAPES = (None, [], {}, [[]], [None], [1, 2, 3, 4, 5], ["a", "b"], {"a": 1}, {"class_path": "x"}, {1: 2}, [{}], DEEP)
CLASSES = (
    "ViT",
    "Digits",
    "vit_lightning.CRATE",
    "torch.nn.LayerNorm",
    "torch.nn.Linear",
    "torch.optim.AdamW",
    "timm.create_model",
)
CLASSES += (
    "torchvision.models.vit_b_16",
    "lightning.pytorch.callbacks.Timer",
    "RandomCrop",
    "vit_lightning.ViTClassifier",
)
HOSTILE = ("os.system", "evil.Thing", "builtins.eval", "torch.load", "torch.hub.load", "subprocess.Popen")
HOSTILE += ("torchvision.datasets.LSUN", "lightning.pytorch.LightningModule.load_from_checkpoint", "numpy.load")


NO_FILES = ("folder", "pipe", "socket", "link", "loop", "environ", "way out", "new")
"""What may stand in the place of a file; links come last."""
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\nshowpage\n" + b"\n" * 50_000
ADDED = (".lock", ".lock", "wandb", "wandb/cache", "wandb/latest-run", "wandb/run-1/logs", "wandb/run-1/logs/x.log")
ADDED += ("diverged.json", "validation/epoch-0009.png", "validation/images", "curves.png", "blocks.py", "test", "embed")
"""What a run folder may have besides, or in place of what it has."""

PROFILER = {"class_path": "SimpleProfiler", "init_args": {"dirpath": "..", "filename": "bashrc"}}
DATASET = {"class_path": "torchvision.datasets.MNIST", "init_args": {"root": "../sets", "download": True}}
ELSEWHERE: tuple[tuple[str, Any], ...] = (
    ("out", "../out"),
    ("trust", True),
    ("resume", "auto"),
    ("init_from", "../secret"),
    ("trainer.profiler", PROFILER),
    ("trainer.callbacks", [{"class_path": "ModelCheckpoint", "init_args": {"dirpath": "../kept"}}]),
    ("trainer.logger", {"class_path": "CSVLogger", "init_args": {"save_dir": "../logs"}}),
    ("trainer.default_root_dir", ".."),
    ("distillation.teacher", "../secret"),
    ("data", DATASET),
    ("data", {"class_path": "CIFAR10", "init_args": {"root": "../sets"}}),
    ("data", {"class_path": "HuggingFaceSet", "init_args": {"path": "a/b", "cache": "../sets"}}),
    ("data", {"class_path": "ImageFolder", "init_args": {"root": "/etc"}}),
    ("checkpoint.monitor", "../secret"),
)
"""What a config may say of places, by option."""

ENCODER = {
    "class_path": "torch.nn.TransformerEncoderLayer",
    "init_args": {"d_model": 16, "nhead": 2, "activation": "relu"},
}
NETWORKS: tuple[dict[str, Any], ...] = (
    {"class_path": "torch.nn.TransformerEncoder", "init_args": {"encoder_layer": ENCODER, "num_layers": 2}},
    {"class_path": "torch.nn.Transformer", "init_args": {"d_model": 16, "nhead": 2, "num_encoder_layers": 2}},
    {
        "class_path": "timm.create_model",
        "init_args": {"model_name": "vit_tiny_patch16_224", "depth": 1, "embed_dim": 6},
    },
    {"class_path": "torchvision.models.swin_t", "init_args": {"window_size": [7, 7], "depths": [1, 1], "embed_dim": 6}},
    {"class_path": "torch.nn.Linear", "init_args": {"in_features": 3, "out_features": 3}},
)
"""Networks of other packages, whose sizes nothing of ours limits."""

TIMER = {"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:01:00:00"}}
MONITOR = {
    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
    "init_args": {"monitor": "val/acc", "mode": "max"},
}
LIGHTNING_CLI = {
    "seed_everything": True,
    "ckpt_path": None,
    "trainer": {"accelerator": "cpu", "max_epochs": 1, "barebones": False, "callbacks": [TIMER, MONITOR]},
    "model": {"class_path": "ViT", "init_args": {"patch_size": 2, "emb_size": 16, "depth": 1, "num_heads": 2}},
    "data": {"class_path": "vit_lightning.Digits", "init_args": {"batch_size": 8}},
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01, "momentum": 0.9}},
    "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 2, "gamma": 0.5}},
}
SHORT_NAMES = {
    "model": {"patch_size": 4, "attention": "RotaryAttention", "emb_size": 16, "depth": 1, "num_heads": 2},
    "data": "vit_lightning.Digits",
    "optimizer": "torch.optim.AdamW",
    "lr_scheduler": {"class_path": "ExponentialLR", "gamma": 0.9},
    "loss": {"class_path": "torch.nn.CrossEntropyLoss", "weight": [1.0] * 10},
    "metrics": ["Accuracy", {"class_path": "F1Score", "average": "macro"}],
    "ema": {"decay": 0.9},
    "lora": {"rank": 2},
    "checkpoint": {"monitor": "val/acc", "every_n_steps": 1},
    "wandb": {"mode": "disabled", "tags": ["a"]},
    "trainer": {
        "callbacks": "LearningRateMonitor",
        "logger": {"class_path": "CSVLogger", "save_dir": "logs"},
        "profiler": "simple",
        "max_epochs": 1,
    },
}
"""Configs of another program and with short names, beside those of the repository."""


# ---- what is changed


def nodes(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each node but the root."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield (*path, key)
            yield from nodes(value, (*path, key))


def bend(tree: Any, draw: random.Random, hostile: bool = False) -> Any:
    """Replaces, removes, renames, doubles or swaps one to three nodes of plain data; each level is as likely."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        found = list(nodes(tree))
        if not found:
            return draw.choice(SHAPES)
        depth = draw.choice(sorted({len(path) for path in found}))
        *parents, last = draw.choice([path for path in found if len(path) == depth])
        node = tree
        for key in parents:
            node = node[key]
        action = draw.random()
        if action < 0.7:
            node[last] = nasty(node[last], draw, hostile)
        elif action < 0.8:
            del node[last]
        elif isinstance(node, list):
            node.append(copy.deepcopy(node[last]))
        elif action < 0.9:
            node[draw.choice((*WORDS, *node, 3))] = node.pop(last)
        else:
            other = draw.choice(list(node))
            node[last], node[other] = node[other], node[last]
    return tree


def nasty(value: Any, draw: random.Random, hostile: bool = False) -> Any:
    """Returns another value: of the same kind as often as of another."""
    kinds: dict[str, Callable[[], Any]] = {
        "word": lambda: draw.choice(WORDS),
        "number": lambda: draw.choice(NUMBERS),
        "shape": lambda: copy.deepcopy(draw.choice(SHAPES)),
        "class": lambda: draw.choice(CLASSES),
        "made": lambda: {"class_path": draw.choice(CLASSES), "init_args": draw.choice(({}, {"x": 1}, [], None))},
        "list": lambda: [copy.deepcopy(value)] * draw.choice((1, 2, 50)),
    }
    if hostile:
        kinds["place"] = lambda: draw.choice(PLACES)
        kinds["code"] = lambda: draw.choice(
            (name := draw.choice(HOSTILE), {"class_path": name}, [{"class_path": name}])
        )
    if isinstance(value, torch.Tensor) and value.numel() < 1 << 30:
        flat, one = value.flatten(), torch.zeros(())
        others = (flat, flat[:0], flat[None], one, one.expand(1 << 20, 1 << 20), value * math.nan, value.to("meta"))
        others += (value.double(), value.to(torch.int8), value.to(torch.complex64))
        kinds["tensor"] = lambda: draw.choice(others)
    if type(value) in (int, float) and abs(value) < 1e300 and draw.random() < 0.5:
        return draw.choice((-value, value + 1, value * 3, float(value), str(value), [value]))
    return kinds[draw.choice(list(kinds))]()


def harm(content: bytes, draw: random.Random) -> bytes:
    """Returns bytes of which some are flipped, cut out, doubled, moved, or replaced by others."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        place = draw.choice((draw.randrange(len(data) + 1), draw.randrange(min(len(data), 400) + 1)))
        size = draw.choice((1, 1, 2, 4, 8, 100, 5000))
        action = draw.randrange(7)
        if action == 0:
            data[place : place + 1] = bytes(byte ^ (1 << draw.randrange(8)) for byte in data[place : place + 1])
        elif action == 1:
            data = data[:place] if draw.random() < 0.3 else data
        elif action == 2:
            del data[place : place + size]
        elif action == 3:
            data[place:place] = data[place : place + size]
        elif action == 4:
            data[place : place + size] = bytes([draw.choice((0, 255, 0x80, 10, 34, 91, 123))]) * size
        elif action == 5:
            data[place : place + size] = draw.randbytes(min(size, len(data) - place))
        elif place + 8 <= len(data):
            data[place : place + 4] = struct.pack(draw.choice("<>") + "I", draw.choice((0, 1, 2**31, 2**32 - 1, 65535)))
    return bytes(data)


def put(path: Path, kind: str, draw: random.Random) -> None:
    """Puts something else in the place of a file: what is no file, or what nobody expects in one."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    elif kind in NO_FILES:
        outside = Path.cwd().parent
        targets = {"link": outside / "secret", "loop": path.absolute(), "way out": outside, "new": outside / "new"}
        path.symlink_to(targets.get(kind, Path("/proc/self/environ")))
    elif kind != "gone":
        path.write_bytes({"empty": b"", "script": POSTSCRIPT}.get(kind) or draw.randbytes(300))


def rewrite(path: Path, draw: random.Random, hostile: bool = True, *, links: bool = True) -> None:
    """Changes a file by what it holds: plain data, lines, bytes; or puts a folder, a link or a pipe in its place.

    No links in folders of weights, which may be of a cache that is made of them.
    """
    action, content = draw.random(), path.read_bytes()
    if action < 0.12:
        path.unlink()
        put(path, draw.choice(("gone", "empty", "random", "script", *NO_FILES[: None if links else 3])), draw)
        return
    try:
        if action < 0.3:
            raise ValueError
        if path.suffix in (".json", ".end", ".claim"):
            new = json.dumps(bend(json.loads(content), draw, hostile))
        elif path.suffix == ".yaml":
            new = yaml.safe_dump(bend(yaml.safe_load(content), draw, hostile), sort_keys=False)
        elif path.suffix == ".jsonl":
            lines = content.decode().splitlines()
            for _ in range(draw.choice((1, 3))):
                place = draw.randrange(len(lines))
                lines[place] = json.dumps(bend(json.loads(lines[place]), draw, hostile))
            new = "\n".join(lines)
        else:
            raise ValueError
        path.write_bytes(new.encode("utf-8", errors="surrogatepass"))
    except (ValueError, TypeError, RecursionError, OverflowError, IndexError, yaml.YAMLError):
        path.write_bytes(harm(content, draw))


# ---- the kinds of cases: what is made once, what one case is


class Payload:
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return open, ("../marker", "w")


def configs() -> list[Any]:
    files = [*REPOSITORY.glob("experiments/*.yaml"), *REPOSITORY.glob("experiments/families/*.yaml")]
    texts = [re.sub(r"depth: \d+", "depth: 1", path.read_text()) for path in sorted(files)]  # for time
    texts = [text for text in texts if "vit_lightning.Digits" in text]
    return [*texts, *map(yaml.safe_dump, (LIGHTNING_CLI, SHORT_NAMES))]


def config_case(made: Any, draw: random.Random) -> list[str]:
    text = draw.choice(made["texts"])
    if draw.random() < 0.25:
        Path("c.yaml").write_bytes(harm(text.encode(), draw))
    else:
        tree = bend(yaml.safe_load(text), draw)
        with contextlib.suppress(RecursionError, UnicodeEncodeError):
            Path("c.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    shutil.copy(made["folder"] / "digits.yaml", "c.yaml") if not Path("c.yaml").exists() else None
    return ["fit", "--config=c.yaml", "--print_config"]


def state_of(run: Path) -> dict[str, Any]:
    from vit_lightning.storage.checkpoint_files import read_checkpoint

    return read_checkpoint(run / "checkpoints/best.ckpt", mmap=False)


def sealed_case(made: Any, draw: random.Random) -> list[str]:
    from vit_lightning.storage.checkpoint_files import seal

    contents = dict(made["checkpoint"])
    place = draw.choice(
        (
            "config",
            "config",
            "config",
            "state_dict",
            "test_view",
            "loops",
            "callbacks",
            "",
            "",
            "pickle",
            "network",
            "elsewhere",
        )
    )
    if place == "elsewhere":
        contents["config"] = config = copy.deepcopy(contents["config"])
        key, value = draw.choice(ELSEWHERE)
        *parents, last = key.split(".")
        for parent in parents:
            config = config.setdefault(parent, {})
        config[last] = copy.deepcopy(value)
        contents["config"] = contents["config"] if draw.random() < 0.5 else bend(contents["config"], draw, hostile=True)
    elif place == "network":
        contents["config"] = {**contents["config"], "model": bend(draw.choice(NETWORKS), draw, hostile=True)}
    elif place == "pickle":
        contents[draw.choice(("extra", "config", "test_view"))] = Payload()
    elif place and isinstance(contents[place], dict):
        contents[place] = bend(contents[place], draw, hostile=True)
    else:
        contents = bend(contents, draw, hostile=True)
    with Path("x.ckpt").open("w+b") as file:
        torch.save(contents, file)
        seal(file)
    if draw.random() < 0.1:
        shutil.copytree(made["run"], "run")
        for name in ("last", "previous", "best"):
            shutil.copy("x.ckpt", f"run/checkpoints/{name}.ckpt")
        if draw.random() < 0.5:
            Path("run/results.json").unlink()
            return ["fit", "--resume=run"]
        return ["load", "run"]
    if place == "elsewhere" or draw.random() < 0.15:
        return draw.choice(measures(made, "x.ckpt"))
    return [*draw.choice((["load"], ["load"], ["summary", "--ckpt"], ["init_from"], ["convert"])), "x.ckpt"]


def measures(made: Any, ckpt: str) -> list[list[str]]:
    """Returns the commands that use a trained model on images, of its run or given."""
    image = str(made["images"][0])
    given = [["test"], ["validate"], ["predict"], ["predict", image], ["embed"], ["embed", image], ["inspect", image]]
    return [[*words, f"--ckpt={ckpt}"] for words in given]


def weights_case(made: Any, draw: random.Random) -> list[str]:
    name = draw.choice(sorted(path.name for path in made["weights"].iterdir() if path.suffix != ".json"))
    source = made["weights"] / name
    if not source.is_dir():  # the description beside it
        shutil.copy(source.with_suffix(".json"), ".")
        if draw.random() < 0.3:
            shutil.copy(source, name)
            rewrite(Path(name).with_suffix(".json"), draw, links=False)
            return ["load", name]
    if source.is_dir():
        shutil.copytree(source, name)
        rewrite(
            draw.choice(
                sorted(path for path in Path(name).iterdir() if path.suffix == ".json") * 2
                + sorted(Path(name).iterdir())
            ),
            draw,
            links=False,
        )
    elif name.endswith(".pth") and draw.random() < 0.6:
        state = torch.load(source)
        state = {"pickle": {**state, "extra": Payload()}}.get(draw.choice(("", "", "", "", "pickle"))) or bend(
            state, draw, True
        )
        wrapped = draw.choice(
            (
                state,
                {"state_dict": state},
                {"model": state, "args": {"a": 1}},
                [state],
                {"state_dict": {"model": state}},
            )
        )
        torch.save(wrapped, name, _use_new_zipfile_serialization=draw.random() < 0.8)
    elif name.endswith(".safetensors") and draw.random() < 0.6:
        content = source.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        head = bend(json.loads(content[8 : 8 + size]), draw, hostile=True)
        text = json.dumps(head).encode("utf-8", errors="surrogatepass")
        Path(name).write_bytes(
            struct.pack("<Q", len(text) if draw.random() < 0.9 else 2**40) + text + content[8 + size :]
        )
    elif name.endswith(".npz") and draw.random() < 0.6:
        arrays = dict(np.load(source))
        key = draw.choice(list(arrays))
        arrays[key] = draw.choice(
            (arrays[key][:0], arrays[key].astype("U5"), np.array([Payload()], object), arrays[key] > 0, np.float64(3))
        )
        np.savez(name, **arrays)
    else:
        Path(name).write_bytes(harm(source.read_bytes(), draw))
    return [*draw.choice((["load"], ["load"], ["summary", "--ckpt"], ["init_from"], ["convert"])), name]


def image_case(made: Any, draw: random.Random) -> list[str]:
    source = draw.choice(made["images"])
    name = f"x{draw.choice((source.suffix, source.suffix, '.png', '.jpg'))}"
    Path(name).write_bytes(harm(source.read_bytes(), draw))
    return ["image", name]


AUTO = ["fit", *SMALL, "--out=run", "--wandb.mode=disabled", "--pictures_every_n_epochs=1", "--resume=auto"]
"""The command that made the run, resumed."""


def run_case(made: Any, draw: random.Random) -> list[str]:
    shutil.copytree(made["run"], "run")
    small = sorted(path for path in Path("run").rglob("*") if path.is_file() and path.suffix != ".ckpt")
    command = draw.choice(
        (
            ["fit", "--resume=run"],
            ["fit", "--resume=run"],
            ["load", "run"],
            ["again", "run"],
            ["sync", "run"],
            ["sync", "run"],
            AUTO,
            draw.choice(measures(made, "run")),
        )
    )
    if command[0] == "again" or (command == AUTO and draw.random() < 0.7):
        Path("run/results.json").unlink()
        small = [path for path in small if path.name != "results.json"]
        command = AUTO if command == AUTO else ["fit", "--resume=run"]
    hostile = command[0] != "fit"  # the config of a run that is resumed is the user's own word
    for path in draw.sample(small, draw.choice((0, 1, 1, 2))):
        rewrite(path, draw, hostile)
    if draw.random() < 0.3:
        path = Path("run", draw.choice(ADDED))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            put(path, draw.choice(("empty", "random", *NO_FILES)), draw)
    if draw.random() < 0.1:
        rewrite(draw.choice(sorted(Path("run/checkpoints").iterdir())), draw, hostile)
    return command


def ledger_case(made: Any, draw: random.Random) -> list[str]:
    shutil.copytree(made["ledger"], "study")
    files = sorted(path for path in Path("study").rglob("*") if path.is_file())
    chosen = [Path("study/ledger.json")] if draw.random() < 0.4 else draw.sample(files, draw.choice((1, 1, 3)))
    for path in chosen:
        rewrite(path, draw)
    return draw.choice(
        (
            ["report", "study"],
            ["report", "study"],
            ["ablate", str(made["plan"]), "--out=study", "--dry_run"],
        )
    )


SHARES: dict[str, tuple[float, Callable[[Any, random.Random], list[str]]]] = {
    "config": (0.13, config_case),
    "sealed": (0.2, sealed_case),
    "weights": (0.25, weights_case),
    "image": (0.28, image_case),
    "run": (0.1, run_case),
    "ledger": (0.04, ledger_case),
}
"""Share of all cases, and what makes one in the working folder: the words of a command."""


PLAN = """
name: small
question: which?
config: c.yaml
baseline: a
arms: {a: {}, b: {model.depth: 2}}
seeds: {first: 0}
compare: {metric: test/acc, smallest_effect: 0.05, max_seeds: 8}
"""


def make(folder: Path) -> None:
    """Makes what all cases change: a run, weights of several kinds, images, an ablation."""
    from vit_lightning.cli import main

    os.chdir(folder)
    (folder / "digits.yaml").write_text((REPOSITORY / "experiments/digits.yaml").read_text())
    assert main(["fit", *SMALL, "--out=run", "--wandb.mode=disabled", "--pictures_every_n_epochs=1"]) == 0
    (folder / "weights").mkdir()
    for name in ("a.safetensors", "b.pth", "c.npz"):
        assert main(["convert", "run", f"weights/{name}", "--to=timm"]) == 0
    assert main(["export", "--ckpt=run", "--to=hf", "--out=weights/hf"]) == 0
    (folder / "images").mkdir()
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 255, (24, 20, 3), dtype=np.uint8)
    for mode, ending in (
        ("RGB", "png"),
        ("RGB", "jpg"),
        ("RGB", "webp"),
        ("RGB", "bmp"),
        ("RGB", "tiff"),
        ("RGB", "ppm"),
        ("P", "png"),
        ("L", "png"),
        ("1", "png"),
        ("CMYK", "jpg"),
        ("L", "pgm"),
        ("RGBA", "png"),
        ("I;16", "png"),
    ):
        image = (
            Image.fromarray(pixels).convert("L").convert("I").convert("I;16")
            if mode == "I;16"
            else Image.fromarray(pixels).convert(mode)
        )
        with contextlib.suppress(OSError):
            image.save(folder / f"images/{mode.replace(';', '')}.{ending}")
    (folder / "c.yaml").write_text(
        "model: {class_path: ViT, patch_size: 4, emb_size: 16, depth: 1, num_heads: 2}\ndata: Digits\n"
    )
    (folder / "plan.yaml").write_text(PLAN)
    fake_runs.pretend("plan.yaml", "study")
    for results in folder.glob("study/runs/*/results.json"):
        for name in ("config.yaml", "environment.json", "metrics.jsonl", "test_predictions.npz"):
            shutil.copy(folder / "run" / name, results.parent / name)


# ---- one case, watched


class Watch:
    """What a case may not do, through Python's audit hook: read a secret, write outside, start a program."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.home: Path | None = None
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.home is None:
            return
        if event in ("os.system", "os.exec", "os.posix_spawn", "pty.spawn"):
            self.found.append(f"{event} {arguments}")
        elif event == "subprocess.Popen" and str(arguments[0]) not in ("git", "uname"):
            self.found.append(f"a program is started: {arguments[:2]}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path, mode, flags = os.fsdecode(arguments[0]), arguments[1] or "", arguments[2] or 0
            writes = any(letter in str(mode) for letter in "wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            self.note(path, "written" if writes else "read", follows=not flags & os.O_NOFOLLOW)
        elif event in (
            "os.rename",
            "os.remove",
            "os.rmdir",
            "os.mkdir",
            "os.link",
            "os.symlink",
            "os.truncate",
            "shutil.rmtree",
        ):
            for path in arguments[: 2 if event == "os.rename" else 1]:
                if isinstance(path, str | bytes):
                    self.note(os.fsdecode(path), "written", follows=event == "os.truncate")

    def note(self, path: str, what: str, *, follows: bool = True) -> None:
        """Keeps a deed outside; one that does not follow links is done to the link."""
        home, self.home = self.home, None  # realpath is no deed of the case
        folder, name = os.path.split(path)
        real = os.path.realpath(path) if follows else os.path.join(os.path.realpath(folder), name)
        self.home = home
        if what == "read" and (real.endswith("/secret") or real in ("/etc/passwd",) or real.endswith("/environ")):
            self.found.append(f"{path} is read")
        if (
            what == "written"
            and real != tempfile.gettempdir()  # of a file without a name
            and not real.startswith((str(home), "/dev/null", "/dev/tty", "/proc/self", tempfile.gettempdir() + "/tmp"))
            and "__pycache__" not in real
        ):
            self.found.append(f"{path} is written")


class Hang(BaseException):
    """A case that takes too long."""


def too_long(number: int, frame: Any) -> None:
    raise Hang


def call(words: list[str], draw: random.Random) -> None:
    """Runs a command, or what Python offers of it."""
    from vit_lightning import UserError, load
    from vit_lightning.cli import main

    if words[0] in ("load", "image"):
        with contextlib.suppress(UserError):
            if words[0] == "image":
                IMAGES.predict(words[1])
            else:
                model = load(words[1])
                shape = (2, model.in_channels, *(model.image_size or (8, 8)))
                if math.prod(shape) < 1e6:
                    model.predict(torch.zeros(shape))
        return
    if words[0] == "convert":
        words = ["convert", words[1], "out.pth", "--to=vit_pytorch"]
    if words[0] == "init_from":
        words = [
            "fit",
            *SMALL,
            f"--init_from={words[1]}",
            "--trainer.max_steps=1",
            "--trainer.max_epochs=-1",
            "--out=new",
            "--test=false",
            "--wandb.mode=disabled",
            *([] if draw.random() < 0.2 else ["--print_config"]),  # which reads and fits the weights, too
        ]
    with contextlib.suppress(SystemExit):
        main(words)


IMAGES: Any = None


def one(kind: str, number: int, made: Any, home: Path, watch: Watch, *, shows: bool = False) -> str:
    """Runs a case in a folder of its own; returns what it may not do, an empty text if it kept to its bounds."""
    folder = home / "outside" / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    Path("../secret").write_text(f"a,b\n{SECRET},1\n")
    Path("evil.py").write_text(MARK.format(str(folder.parent / "marker")))
    draw = random.Random(f"{SEED} {kind} {number}")
    words = SHARES[kind][1](made, draw)
    before = sorted(path.name for path in folder.parent.iterdir())
    output, fault = io.StringIO(), ""
    signal.signal(signal.SIGPROF, too_long)
    signal.signal(signal.SIGALRM, too_long)
    watch.found, watch.home = [], folder
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)  # a wait without end takes no time of the processor
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            call(words, draw)
    except Hang:
        fault = f"hangs {where(sys.exc_info()[1])}"
    except BaseException as error:
        fault = f"{type(error).__name__}: {str(error)[:150]!r} {where(error)}"
        if shows:
            traceback.print_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        watch.home = None
    if shows:
        print(words, output.getvalue())
    if "Traceback (most recent call last)" in output.getvalue() and not fault:
        fault = f"prints a traceback: {output.getvalue().strip().splitlines()[-1]}"
    fault = "; ".join(filter(None, [fault, *watch.found[:2]]))
    if Path("../marker").exists():
        Path("../marker").unlink()
        fault += "; code ran"
    if SECRET in output.getvalue():
        fault += "; it prints a secret"
    if sorted(path.name for path in folder.parent.iterdir()) != before:
        fault += "; something is made outside"
    return f"{kind}:{number} {words[0]} {fault}" if fault else ""


def where(error: BaseException | None) -> str:
    frames = (
        [frame for frame in traceback.extract_tb(error.__traceback__) if "vit_lightning" in frame.filename]
        if error
        else []
    )
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[::-1][:3])


def run_cases(kind: str, first: int, last: int, made: str, home: str) -> None:
    """Runs cases in this process; writes a line to ``done`` before each, and one to ``faults`` for each that fails."""
    global IMAGES
    import warnings

    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from vit_lightning import load
    from vit_lightning.storage.wandb_mirror import WandbMirror

    os.environ["WANDB_MODE"] = "disabled"
    if kind == "config":  # which may name a function that downloads, as an optimizer too: it is the user's own
        os.environ["TORCH_HOME"] = "downloads"
    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    WandbMirror.start = fake_runs.start_as_if_online
    ConstrainedLayoutEngine.execute = lambda self, figure: None  # draws each figure once more
    folder = Path(made)
    things = {
        "folder": folder,
        "texts": configs(),
        "run": folder / "run",
        "checkpoint": state_of(folder / "run"),
        "weights": folder / "weights",
        "images": sorted((folder / "images").iterdir()),
        "ledger": folder / "study",
        "plan": folder / "plan.yaml",
    }
    IMAGES = load(folder / "run")
    watch, place = Watch(), Path(home)
    with (place / "done").open("a") as done, (place / "faults").open("a") as faults:
        for number in range(first, last):
            print(number, f"{time.process_time():.1f}", file=done, flush=True)
            if text := one(kind, number, things, place, watch, shows=last == first + 1):
                print(text.replace("\n", " "), file=faults, flush=True)
            sys.stdout.flush()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    process = processes.Running(make, folder, folder=folder)
    result = process.finish()
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.full
@pytest.mark.parametrize("kind", SHARES)
def test_a_strangers_file_ends_in_words(kind, made, tmp_path):
    only = os.environ.get("VITL_FUZZ_CASE", "")
    if only and not only.startswith(f"{kind}:"):
        pytest.skip(f"only {only}")
    home = Path(os.environ.get("VITL_FUZZ_OUT", tmp_path), kind).absolute()
    home.mkdir(parents=True, exist_ok=True)
    done = home / "done"
    number, last = done.exists() and int(done.read_text().split()[-2]) + 1, round(CASES * SHARES[kind][0])
    if only:
        number = int(only.partition(":")[2])
        last = number + 1
    while number < last:  # a process that a case ends is followed by another one
        end = min(last, number + 500)
        result = processes.Running(run_cases, kind, number, end, str(made), str(home), folder=home).finish(3000)
        reached = int(done.read_text().split()[-2]) + 1
        if result.returncode:
            with (home / "faults").open("a") as file:
                text = f"{kind}:{reached - 1} ended its process with {result.returncode}: {result.stderr[-800:]}"
                print(text.replace("\n", " "), file=file)
        if only:
            print(result.stdout, result.stderr)
        number = reached if result.returncode else end
    faults = (home / "faults").read_text().splitlines()
    assert not faults, f"{len(faults)} of {last}:\n" + "\n".join(faults)
