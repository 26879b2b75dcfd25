"""The table of ``experiments/benchmarks/throughput.py``, from a few rounds of a tiny network."""

from __future__ import annotations

import throughput
import torch

from vit_lightning.training.fast_paths import FastViT

OTHER = "nn.TransformerEncoder"


def test_the_table_has_geometric_means_and_fewer_rounds():
    def row(shape: str, name: str, ratio: float, rounds: int) -> dict:
        interval = {"median": ratio, "low": ratio * 0.9, "high": ratio * 1.1}
        return {
            **{"shape": shape, "name": name, "kind": "network", "mode": "training", "precision": "fp32"},
            **{"compiled": False, "rounds": rounds, "device_name": "a processor", "threads": 2, "date": "2026-01-01"},
            **{"commit": "0123456789", "versions": {"torch": "2"}, "images_per_s_best": 5.0, "peak_mb": None},
            **{"ours_over_this": interval, "share_of_ceiling": interval},
        }

    names = {"ours": (1.0, 1.0, 12), "timm": (1.0, 1.21, 12), "torchvision": (4.0, 1.0, 5)}
    rows = [
        row(shape, name, found[at], found[2])
        for at, shape in enumerate(("s16", "ti4"))
        for name, found in names.items()
    ]
    table = throughput.tables(rows).splitlines()
    timm = next(line for line in table if line.startswith("| timm |"))
    assert timm.endswith("| 1.100 (1.025 to 1.181) |"), timm
    assert "| 1.000 (0.900 to 1.100); 5 images/s (5 rounds) | 2.000 (" in next(
        line for line in table if "torchvision" in line
    )
    bold = next(line for line in table if "fastest equal" in line)
    assert "1.000 (0.900 to 1.100)**, timm | **1.000 (0.900 to 1.100)**, torchvision | **1.000 (" in bold


def test_a_step_has_the_operations_that_torch_counts(monkeypatch):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    shape = throughput.SHAPES["tiny"]
    peer = throughput.TorchEncoder(shape)
    for layer in peer.encoder.layers:  # its products of queries and keys are counted in no other form
        layer.self_attn.forward = lambda x, *_, attention=layer.self_attn, **__: (explicit(attention, x), None)
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
    step, _ = throughput.make_step(peer, images, labels, mode="training", dtype=torch.float32, compiled=False)
    with FlopCounterMode(display=False) as counter:
        step()
    assert counter.get_total_flops() == throughput.step_flops(shape, "training")
    fewer = throughput.step_flops(shape, "inference") - 4 * throughput.left_out_flops(throughput.ours(shape), images)
    network = throughput.ours(shape).double()  # for which attention is torch's
    monkeypatch.setattr(FastViT, "reads_class_token_alone", lambda *_: True)  # despite the counter's hooks
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.inference_mode():
        network(images.double())
    assert counter.get_total_flops() == fewer


def explicit(attention: torch.nn.MultiheadAttention, tokens: torch.Tensor) -> torch.Tensor:
    projected = torch.nn.functional.linear(tokens, attention.in_proj_weight, attention.in_proj_bias)
    queries, keys, values = projected.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    weights = (queries @ keys.transpose(-1, -2)).softmax(dim=-1)
    return attention.out_proj((weights @ values).transpose(1, 2).flatten(2))
