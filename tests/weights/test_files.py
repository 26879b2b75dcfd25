"""Files of weights as people save them, and files that are damaged, foreign or hostile."""

import io
import json
import os
import pickle
import re
import runpy
import shutil
import sys
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tensors import Payload

from vit_lightning import UserError
from vit_lightning.weights.files import read_weights

WEIGHTS = {"norm.weight": torch.arange(3.0), "head.bias": torch.ones(2, dtype=torch.bfloat16)}


def check(file, *notes):
    assert file.tensors.keys() == WEIGHTS.keys()
    assert all(torch.equal(file.tensors[name], value) for name, value in WEIGHTS.items())
    assert len(file.notes) == len(notes)
    assert all(text in note for text, note in zip(notes, file.notes, strict=True))


@pytest.mark.parametrize("name", ["weights.pth", "weights.pt", "pytorch_model.bin", "weights.pth.tar", "legacy.pth"])
def test_files_of_torch(name, tmp_path):
    torch.save(WEIGHTS, tmp_path / name, _use_new_zipfile_serialization="legacy" not in name)
    check(read_weights(tmp_path / name))


def test_tensors_that_no_network_reads_are_left_out_and_named(tmp_path):
    torch.save({**WEIGHTS, "bn.num_batches_tracked": torch.tensor(3), "mask_token": torch.ones(3)}, tmp_path / "a.pth")
    check(read_weights(tmp_path / "a.pth"), "bn.num", "mask_token")


def test_safetensors_shards_and_npz(tmp_path):
    save_file(WEIGHTS, tmp_path / "b.safetensors")
    for text, found in (('{"family": "timm", "config": {}}', {"family": "timm", "config": {}}), ("[1]", {})):
        (tmp_path / "b.json").write_text(text)
        check(file := read_weights(tmp_path / "b.safetensors"))
        assert (file.config or {}) == found

    folder = tmp_path / "sharded"
    folder.mkdir()
    for name, value in WEIGHTS.items():
        save_file({name: value}, folder / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in WEIGHTS}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "vit"}')
    check(file := read_weights(folder))
    assert file.config == {"model_type": "vit"}

    sixteen = WEIGHTS["head.bias"].view(torch.int16).numpy().view("V2")  # as JAX saves bfloat16
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **{"norm.weight": np.arange(3.0, dtype=np.float32), "head.bias": sixteen})
        check(read_weights(tmp_path / "a.npz"))


def test_faults_of_the_disk_under_safetensors_are_one_line(tmp_path, monkeypatch):
    save_file(WEIGHTS, tmp_path / "b.safetensors")
    monkeypatch.setattr("safetensors.torch.load_file", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(UserError, match=r"b.safetensors cannot be read: .*Input/output error"):
        read_weights(tmp_path / "b.safetensors")


class Reduced:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def harm():
    Path("harmed").touch()


def saved(contents):
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()


def objects():
    buffer = io.BytesIO()
    np.savez(buffer, weights=np.array([Payload("harmed")], dtype=object))
    return buffer.getvalue()


def scripted():
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), buffer := io.BytesIO())
    return buffer.getvalue()


HOSTILE = {
    "TorchScript": (scripted, r"TorchScript: save state_dict\(\)"),
    "code": (lambda: saved({"model": WEIGHTS, "args": Payload("harmed")}), "more than tensors and plain data"),
    "a network": (lambda: saved(torch.nn.Linear(1, 1)), r"save its state_dict\(\) instead"),
    "a network in a mapping": (
        lambda: saved({"model": torch.nn.Linear(1, 1)}),
        r"a whole network save its state_dict\(\)",
    ),
    "a pickle": (lambda: pickle.dumps(Payload("harmed")), "no file of torch.save|more than tensors"),
    "objects of numpy": (objects, "Object arrays cannot be loaded"),
    "half a file": (lambda: saved(WEIGHTS)[:400], "was cut short"),
    "text": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "holds no weights"),
    "nothing": (lambda: b"", "holds no weights"),
    "no tensors": (lambda: saved({"epoch": 3}), r"holds no weights \(it has epoch\)"),
}


def test_objects_of_any_class_beside_weights_are_neither_read_nor_run(in_folder, monkeypatch):
    """yolov5#12911, nerfstudio#3702: paths of another system, numbers of numpy, classes that are not installed."""
    ours = type("DictConfig", (), {"__module__": "not_installed"})
    monkeypatch.setitem(sys.modules, "not_installed", SimpleNamespace(DictConfig=ours))
    paths = {"root": Reduced(PureWindowsPath, "C:\\runs"), "out": in_folder, "code": Reduced(harm)}
    torch.save({"model": WEIGHTS, "best": np.float64(91.2), "args": {**paths, "net": ours()}}, "a.pth")
    monkeypatch.delitem(sys.modules, "not_installed")
    check(read_weights("a.pth"))
    assert os.listdir() == ["a.pth"]


@pytest.mark.parametrize(("make", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_and_damaged_files_are_named(make, message, in_folder):
    path = in_folder / ("weights.npz" if b".npy" in (content := make()) else "weights.bin")
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_weights(path, "init_from")
    assert os.listdir() == [path.name]
    (problem,) = caught.value.problems
    assert problem.startswith(f"init_from={path}")
    assert "weights_only" not in problem
    assert "\n" not in problem


FOLDERS = {
    "empty": ({}, "the folder holds neither checkpoints/best.ckpt nor checkpoints/last.ckpt nor model.safetensors, "),
    "of a Trainer": ({"step-8/model.safetensors": "", "step-8/optimizer.pt": ""}, r"\(did you mean .*/step-8\?\)$"),
    "of Lightning": (
        {"version_0/epoch=2.ckpt": "", "hparams.yaml": ""},
        r"\(did you mean .*/version_0/epoch=2.ckpt\?\)$",
    ),
    "of timm": ({"model_best.pth.tar": "", "summary.csv": ""}, r"\(did you mean .*/model_best.pth.tar\?\)$"),
    "adapter": ({"adapter_config.json": "{}"}, "is an adapter of PEFT: give what its merge_and_unload"),
    "outside": ({"model.safetensors.index.json": '{"weight_map": {"a": "../a.safetensors"}}'}, "is no file beside it"),
    "no map": ({"model.safetensors.index.json": '{"weight_map": 3}'}, "has no weight_map"),
    "deep": ({"model.safetensors.index.json": "[" * 10**5}, "is no JSON"),
    "no weights": ({"pytorch_model.bin": "", "config.json": "{}"}, "holds no weights"),
}


@pytest.mark.parametrize(("files", "message"), FOLDERS.values(), ids=FOLDERS)
def test_folders_without_weights_are_named(files, message, tmp_path):
    save_file(WEIGHTS, tmp_path / "a.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_weights(folder)
    assert caught.value.problems[0].startswith(f"source={folder}")


def test_a_sharded_checkpoint_is_read_once_it_is_one_file_as_the_error_says(in_folder, monkeypatch):
    """accelerate#3010, PL PR#18358: as accelerate writes it."""
    writer = dcp.FileSystemWriter("state/pytorch_model_fsdp_0")
    dcp.save({"model": WEIGHTS}, storage_writer=writer, no_dist=True)
    with pytest.raises(UserError, match="sharded") as caught:
        read_weights("state")
    command = re.search(r"python -m (\S+) (.*) makes", caught.value.problems[0])
    monkeypatch.setattr(sys, "argv", [command[1], *command[2].split()])
    runpy.run_module(command[1], run_name="__main__")
    check(read_weights("FILE.pt"))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("pyproject.tolm", r"neither a run folder nor a file .did you mean pyproject.toml"),
        ("tim:vit_tiny_patch16_224", r"tim: is none of timm, torchvision, hf-hub, wandb .did you mean timm"),
        ("https://example.org/weights.pth", "https: is none of timm, torchvision, hf-hub, wandb"),
        ("hf-hub:../secrets", "must be hf-hub:owner/name"),
        ("timm:resnet_none", "timm has no such model with weights .did you mean resnet"),
        ("torchvision:nothing", "torchvision has no such classifier"),
    ],
)
def test_places_that_are_none_are_named(place, message):
    with pytest.raises(UserError, match=message) as caught:
        read_weights(place)
    assert caught.value.problems[0].startswith(f"source={place}")


def test_a_repository_of_the_hub_without_a_network(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match="source=hf-hub:own/vit: its weights cannot be had: offline, or there is no"
    ) as caught:
        read_weights("hf-hub:own/vit")
    assert len(caught.value.problems) == 1
    kept, commit = tmp_path / "models--own--vit", "a" * 40  # as the hub's own cache lies on the disk
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text(commit)
    (kept / "snapshots" / commit).mkdir(parents=True)
    save_file(WEIGHTS, kept / "snapshots" / commit / "model.safetensors")
    check(read_weights("hf-hub:own/vit"))


def test_an_artifact_of_wandb_is_read_from_its_folder(in_folder, trained, monkeypatch):
    """As ``wandb.log_model`` of a run makes it: a checkpoint at its place in a run folder."""
    asked: list[str] = []

    def download(root: str) -> None:
        shutil.copytree(trained[0], root, ignore=shutil.ignore_patterns("last*", "previous*"), dirs_exist_ok=True)

    artifact = SimpleNamespace(digest="a1b2==", download=download)
    api = SimpleNamespace(artifact=lambda name: asked.append(name) or artifact)
    monkeypatch.setattr("wandb.Api", lambda timeout: api)
    found, whole = read_weights("wandb:me/digits/model-1:best").tensors, read_weights(trained[0]).tensors
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert ({*asked}, [*in_folder.rglob("wandb-a1b2")] != []) == ({"me/digits/model-1:best"}, True)


def test_a_weight_that_is_an_array_of_numpy_is_refused_and_not_left_out(tmp_path):
    torch.save({"model": {**WEIGHTS, "pos_embed": np.ones(3)}, "epoch": np.int64(3)}, tmp_path / "weights.pth")
    with pytest.raises(UserError, match=r"model\.pos_embed is an array of numpy beside tensors"):
        read_weights(str(tmp_path / "weights.pth"), "ckpt")
