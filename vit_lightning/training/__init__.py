"""Everything that is optimized, and the callbacks that watch it.

Offers ``ViTClassifier``, losses, optimizers, schedules, EMA, distillation and checkpoints.
Imports models and storage.
"""
