"""A LightningModule of a user's own, which logs in each way that Lightning has."""

import torch
from lightning.pytorch import LightningModule
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy


class Plain(LightningModule):
    def __init__(self, num_classes: int, test_factor: float = 1.0):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))
        self.metric, self.test_factor = MulticlassAccuracy(num_classes, average="micro"), test_factor

    def forward(self, images):
        return self.net(images)

    def step(self, batch, stage):
        logits = self(batch[0])
        loss, right = cross_entropy(logits, batch[1]), logits.argmax(dim=1) == batch[1]
        self.log(f"{stage}/loss", loss, on_epoch=True)
        if stage == "train":
            return loss
        self.metric.update(logits, batch[1])
        self.log_dict({f"{stage}/acc": right.float().mean() * (self.test_factor if stage == "test" else 1.0)})
        self.log(f"{stage}/right", right.sum().float(), reduce_fx="sum")
        self.log(f"{stage}/most", batch.indices.max().float(), reduce_fx="max")
        self.log(f"{stage}/metric", self.metric)
        self.log(f"{stage}/synced", right.float().mean(), sync_dist=True)
        if self.global_rank == 0:
            self.log(f"{stage}/of_first_alone", 3.0)
        return logits

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.step(batch, "val")

    def test_step(self, batch, batch_idx):
        return self.step(batch, "test")

    def on_validation_epoch_end(self):
        self.log("val/rank", float(self.global_rank))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
