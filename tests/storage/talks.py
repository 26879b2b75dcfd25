"""A logger and modules of a user's own that call their logger."""

from lightning.pytorch.loggers import CSVLogger

from vit_lightning import ViTClassifier


class Own(CSVLogger):
    pass


class Talks(ViTClassifier):
    def on_train_start(self):
        assert self.logger is self.trainer.logger
        print("log_dir", self.trainer.log_dir)
        self.logger.experiment.log_metrics({"own": 7.0}, 0)


class Watches(ViTClassifier):
    def on_train_start(self):
        self.logger.watch(self)
