"""Image files to batches; order and augmentation are functions of (seed, step, index), so that any run can resume.

Offers the data modules (``Digits``, ``CIFAR10``, ``ImageFolder``, ...) and augmentations on whole batches.
Imports no other room.
"""
