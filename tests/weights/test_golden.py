"""Every reference file of ``shared/golden``, both ways."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import SHARED
from torch import nn

from vit_lightning.weights import from_reference

GOLDEN = SHARED / "golden"
FAMILY_OF_FOLDER = {
    **{"torchvision_vit": "torchvision", "hf_vit": "hf", "google_vit": "google", "doc000_004_vit": "timm_legacy"},
    **{"doc001_einops_vit": "einops_tutorial", "doc002_vit": "vit_pytorch", "doc003_encoder_vit": "torch_encoder"},
}
"""Where the folder has not the family's own name."""
MODELS = [
    path for path in sorted(GOLDEN.glob("*/*.json")) if "config" in path.read_text() and "posemb" not in str(path)
]
MODELS = [path for path in MODELS if not path.stem.endswith("param_counts")]

pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="the reference files are not here")


def family_of(path: Path) -> str:
    return (
        "simple_vit" if path.stem.startswith("simplevit") else FAMILY_OF_FOLDER.get(path.parent.name, path.parent.name)
    )


def splitmix(seed: int, index: int, count: int) -> np.ndarray:
    """Uniform numbers in [0, 1) of the recipe of crate_tiny_224."""
    golden = 0x9E3779B97F4A7C15
    base = (seed * golden + index * 0xD1B54A32D192ED03) % 2**64
    with np.errstate(over="ignore"):
        z = np.uint64(base) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(golden)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(np.float64) / 2**24


def drawn(seed: int, entry: dict) -> torch.Tensor:
    shape = entry["shape"]
    uniform = splitmix(seed, entry["tensor_index"], int(np.prod(shape)))
    values = entry["center"] + entry["halfwidth"] * (2 * uniform - 1)
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def load(path: Path) -> tuple[dict, dict, dict]:
    """Sidecar, weights and all other tensors of a file."""
    from safetensors.torch import load_file

    about = json.loads(path.read_text())
    archive = path.with_suffix(".npz")
    if archive.exists():
        tensors = load_file(path.with_suffix(".io.safetensors"))
        tensors["input/x"] = tensors["input/x_nhwc"].permute(0, 3, 1, 2).contiguous()
        return about, dict(np.load(archive)), tensors
    tensors = load_file(path.with_suffix(".safetensors"))
    state = {name.removeprefix("state_dict/"): t for name, t in tensors.items() if name.startswith("state_dict/")}
    recipe = about["parameters"].get("drawn", {})
    if "table" in recipe:
        state = {name: drawn(recipe["seed"], entry) for name, entry in recipe["table"].items()}
    if "input/x" not in tensors:
        tensors["input/x"] = drawn(recipe["seed"], about["input"])
    return about, state, tensors


@pytest.fixture(scope="module", params=MODELS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def model(request):
    path = request.param
    about, state, tensors = load(path)
    vit = from_reference(state, family=family_of(path), config=about["config"]).eval()
    return path, about, state, tensors, vit


def float64_atol(path: Path) -> float:
    return 1e-6 if path.stem.startswith("simplevit") else 1e-10


def test_logits_and_loss_in_float64_and_float32(model):
    path, _, _, tensors, vit = model
    labels = tensors["input/labels"]
    with torch.no_grad():
        exact = copy.deepcopy(vit).double()(tensors["input/x"].double())
        logits = vit(tensors["input/x"])
    atol = float64_atol(path)
    torch.testing.assert_close(exact, tensors["output_f64/logits"], rtol=0, atol=atol)
    torch.testing.assert_close(logits, tensors["output/logits"], rtol=0, atol=1e-5)
    loss = nn.functional.cross_entropy(exact, labels)
    torch.testing.assert_close(loss, tensors["output_f64/loss"], rtol=0, atol=atol)


DISTILLED = [path for path in MODELS if "distilled" in path.stem]


@pytest.mark.parametrize("model", DISTILLED, ids=lambda path: path.parent.name, indirect=True)
def test_distilled_files_have_both_heads(model):
    _, _, _, tensors, vit = model
    exact = copy.deepcopy(vit).double()
    exact.head.training = True  # the head as in training, and dropout as in evaluation
    of_class, of_teacher = exact(tensors["input/x"].double())
    torch.testing.assert_close(of_class, tensors["output_f64/logits_cls"], rtol=0, atol=1e-10)
    torch.testing.assert_close(of_teacher, tensors["output_f64/logits_dist"], rtol=0, atol=1e-10)
