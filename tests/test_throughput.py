"""The table of ``experiments/benchmarks/throughput.py``, from a few rounds of a tiny network."""

import throughput
import torch

from vit_lightning.training.fast_paths import FastViT

OTHER = "nn.TransformerEncoder"


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
