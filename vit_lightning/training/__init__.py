"""Training: the LightningModule, its optimizer, and callbacks.

Offers ``ViTClassifier``, losses, optimizers, schedules, EMA, distillation and checkpoints.
Imports models, storage and inspect.
"""
