"""A stranger's files: whatever is in them, a command ends in words, runs no code, and writes to its folder alone.

Cases are drawn from a seed, VITL_FUZZ_SEED, so that each can be repeated; VITL_FUZZ is their number.
"""

import contextlib
import copy
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from runs import SMALL
from safetensors.torch import load_file
from tensors import Payload

CASES, SEED = int(os.environ.get("VITL_FUZZ", 100)), int(os.environ.get("VITL_FUZZ_SEED", 0))
SECONDS = 10
"""Of the processor, that a case may take."""
SECRET = "the-secret-of-the-user"
HARM = Payload("../marker")
CODE = "import pathlib; pathlib.Path('../marker').write_text('ran')\nclass Thing:\n    pass\n"
WORDS = ("x", "auto", "1e999", "ViT", "torch.nn.Linear", "torch.optim.AdamW", "timm.create_model")
VALUES: tuple[Any, ...] = (*WORDS, "", "a" * 5000, "line\nline", "\x00", "\ud83d", None, [], {}, [[]], {1: 2}, [1, 2])
VALUES += ("../secret", "/etc/passwd", "/proc/self/environ", "..", "~", "os.system", "evil.Thing", "builtins.eval")
VALUES += ("torch.hub.load", {"class_path": "subprocess.Popen"}, [{"class_path": "evil.Thing"}])
VALUES += (0, -1, 7, 2**31, 2**63, 10**400, -0.5, 1e-30, 1e30, math.inf, math.nan, True, {"class_path": "Digits"})


def nodes(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each node but the root."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield (*path, key)
            yield from nodes(value, (*path, key))


def bend(tree: Any, draw: random.Random) -> Any:
    """Returns plain data of which one to three nodes are replaced, removed or renamed; each level is as likely."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 2, 3))):
        found = list(nodes(tree))
        depth = draw.choice(sorted({len(path) for path in found}) or [0])
        *parents, last = draw.choice([path for path in found if len(path) == depth] or [(None,)])
        if last is None:
            return draw.choice(VALUES)
        node = tree
        for key in parents:
            node = node[key]
        action, value = draw.random(), node[last]
        if action > 0.9 and isinstance(node, dict):
            node[draw.choice((*node, "x", 3))] = node.pop(last)
        elif action > 0.8:
            del node[last]
        elif isinstance(value, torch.Tensor) and action < 0.6:
            others = value.flatten(), value.flatten()[:0], value * math.nan, value.to("meta"), value.to(torch.int8)
            node[last] = draw.choice((*others, torch.zeros(()).expand(1 << 20, 1 << 20)))
        else:
            node[last] = copy.deepcopy(draw.choice((*VALUES, [value], str(value)[:99])))
    return tree


def harm(content: bytes, draw: random.Random) -> bytes:
    """Returns bytes of which some are flipped, cut out, doubled, or replaced; most often near the beginning."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        place, size = draw.randrange(draw.choice((400, len(data) + 1))), draw.choice((1, 1, 4, 100, 5000))
        part = data[place : place + size]
        flipped = bytes(byte ^ (1 << draw.randrange(8)) for byte in part)
        others = flipped, b"", part * 2, draw.randbytes(len(part)), b"\xff" * 4
        data[place : place + size] = draw.choice(others)
    return bytes(data if draw.random() < 0.9 else data[: len(data) // 2])


def change(path: Path, draw: random.Random) -> None:
    """Changes a file by what it holds, plain data with tensors in it or not, or by its bytes."""
    from vit_lightning.storage.checkpoint_files import read_checkpoint

    if draw.random() < 0.3 or path.suffix not in (".ckpt", ".pth", ".json"):
        path.write_bytes(harm(path.read_bytes(), draw))
    elif path.suffix == ".json":
        path.write_text(json.dumps(bend(json.loads(path.read_text()), draw)))
    else:
        contents = dict(read_checkpoint(path, mmap=False)) if path.suffix == ".ckpt" else torch.load(path)
        place = draw.choice(("config", "state_dict", "test_view", "callbacks") if "config" in contents else [*contents])
        contents |= {"x": HARM} if draw.random() < 0.2 else {place: bend(contents[place], draw)}
        torch.save(draw.choice((contents, contents, {"model": contents, "args": {"a": 1}}, [contents])), path)


def make_case(made: Path, draw: random.Random) -> list[str]:
    """Changes a file of a copy of what there is; returns the words of a command that reads it."""
    shutil.copytree(made, "x")
    source = Path("x", draw.choice(("best.ckpt", "timm", "hf", "b.pth", "c.npz")))
    change(draw.choice(sorted(source.iterdir()) if source.is_dir() else [*Path("x").glob(f"{source.stem}.*")]), draw)
    fit = ["fit", *SMALL, "--trainer.fast_dev_run=true", f"--init_from={source}"]
    commands = ["summary", f"--ckpt={source}"], ["export", f"--ckpt={source}", "--out=out", "--to=vit_pytorch"], fit
    return draw.choice((*commands, ["test", f"--ckpt={source}", "--out=test"]))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, trained: tuple[Path, Any]) -> Path:
    """What cases change: a checkpoint and weights of several kinds."""
    from vit_lightning.cli import main

    folder = tmp_path_factory.mktemp("made")
    shutil.copy(trained[0] / "checkpoints/best.ckpt", folder)
    for family in ("timm", "hf"):
        assert main(["export", f"--ckpt={trained[0]}", f"--to={family}", f"--out={folder / family}"]) == 0
    tensors = load_file(folder / "timm/model.safetensors")
    torch.save(tensors, folder / "b.pth")
    np.savez(folder / "c.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
    for name in ("b", "c"):
        shutil.copy(folder / "timm/config.json", folder / f"{name}.json")
    return folder


def run_cases(made: Path) -> None:
    """Runs all cases in this process; prints those that do what they may not."""
    from vit_lightning.cli import main

    os.environ |= {"WANDB_MODE": "disabled", "TORCH_HOME": "downloads"}
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outside, said = Path.cwd(), sys.stdout
    (outside / "secret").write_text(f"a,b\n{SECRET},1\n")
    signal.signal(signal.SIGPROF, lambda *_: (_ for _ in ()).throw(TimeoutError("it takes too long")))
    for number in range(CASES):
        draw, case, fault = random.Random(f"{SEED} {number}"), outside / "case", ""
        case.mkdir()
        os.chdir(case)
        Path("evil.py").write_text(CODE)
        words = make_case(made, draw)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            try:
                main(words)
            except SystemExit:
                pass
            except BaseException:
                fault = traceback.format_exc()
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        text, there = out.getvalue(), {path.name for path in outside.iterdir()}
        fault += "prints a traceback" * ("Traceback (most" in text) + "prints a secret" * (SECRET in text)
        fault += f"made {there}" * (there != {"secret", "case"})
        if fault:
            print(f"{number}: {words}: {fault}", file=said, flush=True)
            (outside / "marker").unlink(missing_ok=True)
        os.chdir(outside)
        shutil.rmtree(case)


@pytest.mark.full
def test_a_strangers_file_ends_in_words(made, tmp_path):
    done = processes.Running(run_cases, made, folder=tmp_path).finish(3000)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
