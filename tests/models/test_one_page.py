"""The ViT of the guide's page of code is the default ViT of the package."""

import importlib.util

import torch
from runs import REPOSITORY

from vit_lightning import ViT


def test_the_vit_on_one_page_is_the_vit_of_the_package():
    path = REPOSITORY / "notebooks/vit_on_one_page.py"
    assert sum(bool(line.strip()) for line in path.read_text().splitlines()) <= 90
    page = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("page", path))
    spec.loader.exec_module(page)
    sizes = {"image_size": 16, "patch_size": 4, "emb_size": 24, "depth": 3, "num_heads": 4, "num_classes": 5}
    ours, theirs = ViT(**sizes).double(), page.ViT(**sizes).double()
    with torch.no_grad():  # a new classifier is zero
        ours.head.linear.weight.normal_()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    gradients = []
    for network in (ours, theirs):
        network(images).square().sum().backward()
        gradients.append({name: weight.grad for name, weight in network.named_parameters()})
    torch.testing.assert_close(theirs(images), ours(images), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-11)
