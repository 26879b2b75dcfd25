"""A stranger's files: whatever is in them, a command ends in words, runs no code, and writes to its folder alone.

Cases are drawn from a seed, VITL_FUZZ_SEED, so that each can be repeated; VITL_FUZZ is their number of each kind.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
import yaml
from runs import SMALL
from safetensors.torch import load_file
from tensors import Payload

CASES, SEED = int(os.environ.get("VITL_FUZZ", 50)), int(os.environ.get("VITL_FUZZ_SEED", 0))
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


def rewrite(path: Path, draw: random.Random) -> None:
    """Changes a file by what it holds, plain data or bytes; or puts a folder in its place."""
    content, action = path.read_bytes(), draw.random()
    if action < 0.15:
        path.unlink()
        makes: tuple[Callable[[], Any], ...] = (path.touch, path.mkdir, lambda: None)
        draw.choice(makes)()
        return
    try:
        data = {".json": json.loads, ".yaml": yaml.safe_load}[path.suffix if action < 0.7 else ""](content)
        text = json.dumps(bend(data, draw))  # which is YAML, too
        path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    except (KeyError, TypeError, ValueError):
        path.write_bytes(harm(content, draw))


def checkpoint_case(made: Path, draw: random.Random) -> list[str]:
    from vit_lightning.storage.checkpoint_files import read_checkpoint, seal

    contents = dict(read_checkpoint(made / "run/checkpoints/best.ckpt", mmap=False))
    place = draw.choice(("config", "config", "state_dict", "test_view", "callbacks", "pickle"))
    contents["extra" if place == "pickle" else place] = HARM if place == "pickle" else bend(contents[place], draw)
    with Path("x.ckpt").open("w+b") as file:
        torch.save(contents, file)
        seal(file)
    return read_by(draw, "x.ckpt")


def weights_case(made: Path, draw: random.Random) -> list[str]:
    source = draw.choice(sorted(path for path in (made / "weights").iterdir() if path.suffix != ".json"))
    if source.is_dir():
        shutil.copytree(source, "hf")
        rewrite(draw.choice(sorted(Path("hf").iterdir())), draw)
        return read_by(draw, "hf")
    for path in (source, source.with_suffix(".json")):
        shutil.copy(path, ".")
    if source.suffix == ".pth" and draw.random() < 0.5:
        state = {**torch.load(source), "x": HARM} if draw.random() < 0.2 else bend(torch.load(source), draw)
        wrapped = draw.choice((state, {"state_dict": state}, {"model": state, "args": {"a": 1}}, [state]))
        torch.save(wrapped, source.name)
    else:
        rewrite(Path(draw.choice((source.name, Path(source.name).with_suffix(".json")))), draw)
    return read_by(draw, source.name)


def read_by(draw: random.Random, source: str) -> list[str]:
    """Returns a command that reads a trained model."""
    fit = ["fit", *SMALL, "--trainer.fast_dev_run=true", f"--init_from={source}"]
    commands = ["summary", f"--ckpt={source}"], ["export", f"--ckpt={source}", "--out=out", "--to=vit_pytorch"], fit
    return draw.choice((*commands, ["test", f"--ckpt={source}", "--out=test"]))


CASES_OF = {"checkpoint": checkpoint_case, "weights": weights_case}
"""What makes a case in the working folder: the words of a command."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What cases change: a run, weights of several kinds."""
    from vit_lightning.cli import main

    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WANDB_MODE", "disabled")
        assert main(["fit", *SMALL, "--out=run"]) == 0
        Path("weights").mkdir()
        for family in ("timm", "hf"):
            assert main(["export", "--ckpt=run", f"--to={family}", f"--out=weights/{family}"]) == 0
        tensors = load_file("weights/timm/model.safetensors")
        torch.save(tensors, "weights/b.pth")
        np.savez("weights/c.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
        for name in ("b", "c"):
            shutil.copy("weights/timm/config.json", f"weights/{name}.json")
    return folder


def run_cases(kind: str, made: Path) -> None:
    """Runs all cases of a kind in this process; prints those that do what they may not."""
    from vit_lightning.cli import main

    os.environ |= {"WANDB_MODE": "disabled", "TORCH_HOME": "downloads"}
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outside, said = Path.cwd(), sys.stdout
    (outside / "secret").write_text(f"a,b\n{SECRET},1\n")
    signal.signal(signal.SIGPROF, lambda *_: (_ for _ in ()).throw(TimeoutError("it takes too long")))
    for number in range(CASES):
        draw, case, fault = random.Random(f"{SEED} {kind} {number}"), outside / "case", ""
        case.mkdir()
        os.chdir(case)
        Path("evil.py").write_text(CODE)
        words = CASES_OF[kind](made, draw)
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
            print(f"{kind} {number}: {words}: {fault}", file=said, flush=True)
            (outside / "marker").unlink(missing_ok=True)
        os.chdir(outside)
        shutil.rmtree(case)


@pytest.mark.full
@pytest.mark.parametrize("kind", CASES_OF)
def test_a_strangers_file_ends_in_words(kind, made, tmp_path):
    done = processes.Running(run_cases, kind, made, folder=tmp_path).finish(3000)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
