"""Compiled networks, precision of products and of training: options of any config."""

import copy
import json
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from runs import SMALL
from torch._dynamo.utils import counters

from vit_lightning import (
    LossConfig,
    MultiHeadAttention,
    RMSNorm,
    RotaryAttention,
    SwiGLU,
    ViT,
    ViTClassifier,
    accelerate,
)
from vit_lightning.cli import main
from vit_lightning.commands.session import chosen_matmul
from vit_lightning.config.resolve import resolve
from vit_lightning.errors import UserError
from vit_lightning.training.compiled import compile_module
from vit_lightning.training.losses import Distillation, DistillationConfig, Teacher
from vit_lightning.training.resources import auto_precision, has_fast_bfloat16

CPU, GPU = torch.device("cpu"), torch.device("cuda")
"""GPU: what is compiled for one, which a CPU runs as well."""
SIZES = {"image_size": 8, "patch_size": 4, "emb_size": 8, "depth": 1, "num_heads": 2, "num_classes": 3}


def test_one_graph_for_training_and_one_for_evaluation():
    torch.manual_seed(0)
    settings = {"drop_path": 0.2, "layer_scale": 0.1, "patch_dropout": 0.25}
    sizes = {"image_size": 8, "patch_size": 4, "in_channels": 1, "emb_size": 8, "depth": 2, "num_heads": 2}
    network = ViT(**sizes, num_classes=3, **settings)
    plain, module = copy.deepcopy(network), ViTClassifier(network, loss=LossConfig())
    keys, images = list(module.state_dict()), torch.randn(7, 1, 8, 8)
    assert len(compile_module(module, 7, CPU, backend="eager")) == 2
    assert list(module.state_dict()) == keys
    counters.clear()
    logits = {}
    for training in (False, True, False, True):
        network.train(training)
        for count in (3, 7, 1, 2, 5) if training else (7, 2, 1):
            with torch.inference_mode(not training), torch.autocast("cpu", torch.bfloat16):
                logits[training, count] = network(images[:count]).float()
            if training:
                logits[training, count].sum().backward()
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for count in (7, 1):
            torch.testing.assert_close(logits[False, count], plain.eval()(images[:count]).float(), rtol=0, atol=0)
        assert copy.deepcopy(network).encoder[0]._compiled_call_impl is None


def step_of(module, batch, stage="train"):
    with torch.inference_mode(stage != "train"), torch.autocast("cpu", torch.bfloat16):
        output = module.train(stage == "train").step(batch, stage)
    if stage == "train":
        output.loss.backward()
    return output


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"register_tokens": 2, "drop_path": 0.2, "layer_scale": 0.1, "patch_dropout": 0.25, "norm": RMSNorm}
            | {"attention": partial(MultiHeadAttention, qk_norm=RMSNorm), "feed_forward": SwiGLU}
            | {"activation_checkpointing": True},
            id="drawn",
        ),
        pytest.param(
            {"attention": RotaryAttention, "distillation_token": True}, id="distilled", marks=pytest.mark.full
        ),
    ],
)
def test_for_a_gpu_network_and_loss_are_one_graph_for_each_shape(options):
    torch.manual_seed(0)
    network, graphs = ViT(**SIZES, **options), []
    accelerate(network)
    teacher = Teacher(ViT(**SIZES), normalised=((0.4,) * 3, (0.2,) * 3), images=((0.5,) * 3, (0.2,) * 3))
    distillation = (
        Distillation(DistillationConfig(teacher="teacher"), teacher) if "distillation_token" in options else None
    )
    module = ViTClassifier(network, loss=LossConfig(label_smoothing=0.1), distillation=distillation)
    keys, images, labels = list(module.state_dict()), torch.randn(4, 3, 8, 8), torch.arange(4) % 3
    plain = step_of(copy.deepcopy(module), (images, labels), "val")

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    assert compile_module(module, 4, GPU, backend=backend) == [module]
    counters.clear()
    for count in (4, 3, 4):
        step_of(module, (images[:count], labels[:count]))
    compiled = step_of(module, (images, labels), "val")
    assert len(graphs) == 3
    assert not counters["graph_break"]
    assert torch.equal(compiled.logits, plain.logits)
    assert list(module.state_dict()) == keys
    for graph in graphs:  # neither a number of the host, which a CUDA graph would keep, nor a read of one
        inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        assert all(value.ndim > 0 for value in inputs)
        assert ".item(" not in graph.code


@pytest.fixture
def replayed(monkeypatch):
    """A module whose compiled step writes the results of all batches to the same memory, as CUDA graphs do."""
    torch.manual_seed(0)
    module, calls = ViTClassifier(ViT(**SIZES)), []
    memory = torch.zeros(4, 3)

    def compiled(step, *, options, **others):
        def call(batch, stage):
            calls.append("step")
            output = step(batch, stage)
            memory.copy_(output.logits.detach())
            return output._replace(logits=memory, heads=(memory,))

        calls.append(options)
        return call

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: calls.append("mark"))
    compile_module(module, 4, GPU, replays=True)
    return module, calls


def test_cuda_graphs_are_marked_before_each_step_and_give_copies(replayed):
    module, (options, *calls) = replayed
    assert options == {"triton.cudagraphs": True}
    assert not calls
    batches = [(torch.randn(4, 3, 8, 8), torch.arange(4) % 3) for _ in range(2)]
    kept = []
    for stage in ("train", "val", "train"):
        module.zero_grad()
        kept += [step_of(module, batch, stage) for batch in batches[:1]]
        first = [kept[0].loss.clone(), kept[0].logits.clone(), kept[0].heads[0].clone()]
    module.zero_grad()
    step_of(module, batches[1])
    assert replayed[1][1:] == ["mark", "step"] * 4
    assert all(map(torch.equal, first, [kept[0].loss, kept[0].logits, kept[0].heads[0]]))
    assert all(weight.grad is not None for weight in module.network.parameters())


def test_cuda_graphs_refuse_a_batch_whose_gradients_would_be_added(replayed):
    module, batch = replayed[0], (torch.randn(4, 3, 8, 8), torch.arange(4) % 3)
    step_of(module, batch)
    before = [weight.grad.clone() for weight in module.parameters()]
    output = module.step(batch, "train")
    with pytest.raises(UserError, match="gradients of an earlier batch are still there"):
        output.loss.backward()
    assert all(torch.equal(weight.grad, old) for weight, old in zip(module.parameters(), before, strict=True))
    module.zero_grad()  # as Lightning does, between the forward and the backward pass
    output = module.step(batch, "train")
    output.loss.backward()
    module.zero_grad(set_to_none=False)
    with pytest.raises(UserError, match="compile=reduce-overhead"):
        module.step(batch, "train").loss.backward()


class OwnStep(ViTClassifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "device", "ranks", "here"),
    [
        (ViTClassifier, CPU, 1, "not ViTClassifier on 1 CPU"),
        (ViTClassifier, torch.device("mps"), 1, "not ViTClassifier on 1 MPS"),
        (ViTClassifier, GPU, 2, "not ViTClassifier on 2 CUDA"),
        (OwnStep, GPU, 1, "not OwnStep on 1 CUDA"),
    ],
)
def test_cuda_graphs_are_for_one_gpu_and_our_step(kind, device, ranks, here):
    with pytest.raises(UserError, match=here):
        compile_module(kind(ViT(**SIZES)), 4, device, ranks=ranks, replays=True)


def test_a_process_that_has_met_nothing_compiles_a_step_once(monkeypatch):
    monkeypatch.setattr("einops._backends._type2backend", {})
    network = ViT(**SIZES)
    accelerate(network)
    module = ViTClassifier(network)
    compile_module(module, 4, GPU, backend="eager")
    counters.clear()
    for _ in range(3):
        step_of(module, (torch.randn(4, 3, 8, 8), torch.arange(4) % 3))
    assert counters["stats"]["unique_graphs"] == 1


def test_drop_path_of_a_compiled_block_drops_as_often():
    torch.manual_seed(0)
    network = ViT(image_size=8, patch_size=4, emb_size=8, depth=3, num_heads=2, num_classes=3, drop_path=0.5)
    compile_module(ViTClassifier(network), 7, CPU, backend="eager")
    first, *_, last = [block.attention.fn.drop_path for block in network.encoder]
    branch = torch.ones(1000, 1, 1)
    assert torch.equal(first(branch), branch)
    kept = last(branch)
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert 400 < int(kept.count_nonzero()) < 600


def test_no_compiler(in_folder, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    assert main(["fit", *SMALL, "--compile=true", "--optimizer.lr=-1"]) == 2
    told = capsys.readouterr().err
    assert "compile=true needs a C++ compiler (no-such-compiler is not there; CXX can name another)" in told
    assert "optimizer.lr=-1" in told
    assert not Path("runs").exists()


def test_products_are_as_precise_as_the_config_says():
    before = torch.get_float32_matmul_precision()
    with chosen_matmul(resolve([*SMALL, "--matmul_precision=medium"])):
        assert torch.get_float32_matmul_precision() == "medium"
        with chosen_matmul(resolve(SMALL)):
            assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("maker", "amx", "avx512_bf16", "is_fast"),
    [
        ("AuthenticAMD", False, True, True),
        ("AuthenticAMD", False, False, False),
        ("GenuineIntel", True, True, True),
        ("GenuineIntel", False, True, False),
    ],
)
def test_which_processors_are_fast_in_bfloat16(maker, amx, avx512_bf16, is_fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(Path, "read_text", lambda path, **_: f"vendor_id : {maker}")
    assert has_fast_bfloat16("cpu") == is_fast


def test_a_run_keeps_the_precision_that_auto_chose(in_folder, capsys):
    given = ["--trainer.precision=auto", "--out=out", "--test=false", "--trainer.limit_train_batches=2"]
    assert main(["fit", *SMALL, *given]) == 0
    chosen = auto_precision("cpu")
    assert chosen == ("bf16-mixed" if has_fast_bfloat16("cpu") else "32-true")
    assert f"precision {chosen} (auto)" in capsys.readouterr().out
    environment = Path("out/environment.json")
    assert json.loads(environment.read_text())["precision"] == chosen
    other = {"bf16-mixed": "32-true", "32-true": "bf16-mixed"}[chosen]
    environment.write_text(environment.read_text().replace(f'"precision": "{chosen}"', f'"precision": "{other}"'))
    Path("out/results.json").unlink()
    assert main(["fit", "--resume", "out"]) == 0
    assert f"precision {other} (auto)" in capsys.readouterr().out


def test_deterministic_training_compiles_without_timings():
    module = ViTClassifier(ViT(image_size=8, patch_size=4, emb_size=8, depth=1, num_heads=1))
    for chosen in (True, False):
        with mock.patch("torch.are_deterministic_algorithms_enabled", return_value=chosen):
            compile_module(module, 2, CPU)
        assert torch._inductor.config.deterministic is chosen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"float32_residual": True},
        {"layer_scale": 0.1, "register_tokens": 2, "positions": "sincos2d"},
        {"attention": RotaryAttention},
    ],
)
def test_the_residual_stream_has_the_type_of_autocast_or_float32(options):
    network = ViT(image_size=8, patch_size=4, emb_size=8, depth=2, num_heads=1, num_classes=3, **options)
    found = []
    for block in network.encoder:
        block.register_forward_hook(lambda block, inputs, output: found.extend([inputs[0].dtype, output.dtype]))
    with torch.autocast("cpu", torch.bfloat16):
        network(torch.zeros(2, 3, 8, 8))
    assert found == [torch.float32 if options.get("float32_residual") else torch.bfloat16] * 4


@pytest.mark.full
def test_a_second_fit_takes_its_code_from_the_cache(in_folder, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(in_folder))
    few = ("--compile=true", "--test=false", "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=0")
    found = []
    for _ in range(2):
        counters.clear()
        assert main(["fit", *SMALL, *few]) == 0
        found.append(counters["inductor"]["fxgraph_cache_hit"])
    assert found[0] == 0 < found[1]
