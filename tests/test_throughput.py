"""The table of ``experiments/benchmarks/throughput.py``, from a few rounds of a tiny network."""

from __future__ import annotations

import json

import pytest
import torch
from runs import REPOSITORY

OTHER = "nn.TransformerEncoder"


@pytest.fixture
def throughput(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "experiments" / "benchmarks")
    import throughput

    return throughput


def test_rows_are_merged_and_drawn(throughput, tmp_path):
    path = tmp_path / "throughput.json"
    for precision, mode in (("bf16", "training"), ("fp32", "inference")):
        rows = throughput.measure("tiny", precision=precision, mode=mode, rounds=3, names=[OTHER])
        ours, other, square, own = rows
        assert [ours["name"], other["name"], square["kind"], own["kind"]] == ["ours", OTHER, *["matrix product"] * 2]
        assert ours["ours_over_this"] == {"median": 1.0, "low": 1.0, "high": 1.0}
        assert own["name"] == "20 x 16 x 64", "4 images of 4 patches and a class token"
        throughput.merge(rows, path)
    throughput.merge(rows, path)
    rows = json.loads(path.read_text())
    assert len(rows) == 8, "a measurement replaces an earlier one of the same setting"
    assert ours["peak_mb"] < rows[0]["peak_mb"], "inference keeps nothing for a backward pass"
    other = next(row for row in rows if row["name"] == OTHER)
    assert throughput.fastest_peer(rows[:4], "tiny") == other
    text = throughput.tables(rows)
    assert f"**{throughput.interval(other)}**, {OTHER} |" in text
    throughput.draw(rows, tmp_path / "throughput.png")
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_has_the_operations_that_torch_counts(throughput):
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


def explicit(attention: torch.nn.MultiheadAttention, tokens: torch.Tensor) -> torch.Tensor:
    projected = torch.nn.functional.linear(tokens, attention.in_proj_weight, attention.in_proj_bias)
    queries, keys, values = projected.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    weights = (queries @ keys.transpose(-1, -2)).softmax(dim=-1)
    return attention.out_proj((weights @ values).transpose(1, 2).flatten(2))
