import torch

from vit_lightning import ViT
from vit_lightning.models.heads import ClassificationHead, ClassTokenAndMeanPool, MeanAllPool

SMALL = {"image_size": 8, "patch_size": 4, "emb_size": 16, "depth": 1, "num_heads": 2, "num_classes": 5}


def test_a_pool_of_another_width_widens_what_is_behind_it():
    vit = ViT(**SMALL, pool=ClassTokenAndMeanPool, final_norm="after_pool")
    assert vit.head.linear.in_features == vit.head.norm.weight.shape[0] == 32


def test_head_dropout_drops_pooled_channels_in_training():
    head = ClassificationHead(pool=MeanAllPool(400, 1, 0), emb_size=400, num_classes=0, dropout=0.25)
    torch.manual_seed(0)
    out = head(torch.ones(8, 3, 400))
    assert abs((out == 0).float().mean().item() - 0.25) < 0.05
    assert torch.equal(head.eval()(torch.ones(8, 3, 400)), torch.ones(8, 400))
