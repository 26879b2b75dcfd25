"""The loss by hand, a teacher that nothing else sees, and where teachers come from."""

import copy
import os
import shutil

import numpy as np
import pytest
import timm
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from runs import SMALL
from tensors import Payload
from torchvision import models
from torchvision.transforms.functional import normalize

from vit_lightning import Digits, Distillation, DistillationConfig, LossConfig, Teacher, UserError, ViT, ViTClassifier
from vit_lightning.commands.fit import fit
from vit_lightning.commands.trained import evaluate
from vit_lightning.config.networks import make_teacher, network_in_file
from vit_lightning.config.resolve import resolve
from vit_lightning.storage.checkpoint_files import read_checkpoint
from vit_lightning.weights.sources import open_source

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
SIZES = {"image_size": 8, "patch_size": 4, "in_channels": 1, "num_classes": 10, "emb_size": 16, "depth": 1}


def network(seed: int = 0, **arguments: object) -> ViT:
    torch.manual_seed(seed)
    vit = ViT(**SIZES, num_heads=2, **arguments)
    for name, weight in vit.head.named_parameters():
        if name.endswith("weight"):
            torch.nn.init.normal_(weight)
    return vit


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


@pytest.mark.parametrize("token", [False, True], ids=["one head", "two heads"])
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_loss_by_hand(kind, token):
    """Equations 2 and 3 of the DeiT paper, in numpy."""
    student, teacher = network(1, distillation_token=token), network(2)
    config = DistillationConfig("there", kind, 0.3, 2.0 if kind == "soft" else 3.0)
    distillation = Distillation(config, Teacher(copy.deepcopy(teacher)))
    module = ViTClassifier(student, loss=LossConfig(label_smoothing=0.1), distillation=distillation)
    images, labels = torch.randn(6, 1, 8, 8), torch.arange(6)
    loss = module.step((images, labels), "train").loss
    given = student(images) if token else (student(images),)
    heads = [logits.detach().double().numpy() for logits in given]
    wanted = teacher.eval()(images).detach().double().numpy()
    smooth = 0.9 * np.eye(10)[labels.numpy()] + 0.01
    of_labels = -(smooth * log_softmax(heads[0])).sum(1).mean()
    if kind == "hard":
        of_teacher = -log_softmax(heads[-1])[np.arange(6), wanted.argmax(1)].mean()
    else:
        p = log_softmax(wanted / 2.0)
        of_teacher = 4.0 * (np.exp(p) * (p - log_softmax(heads[-1] / 2.0))).sum(1).mean()
    assert float(loss.detach()) == pytest.approx(0.7 * of_labels + 0.3 * of_teacher, rel=1e-5)
    validated = module.eval().step((images, labels), "val").loss
    plain = torch.nn.functional.cross_entropy(student.eval()(images), labels)
    assert torch.equal(validated, plain)


def test_nothing_but_the_loss_sees_the_teacher(tmp_path):
    teacher = network(2, emb_dropout=0.5)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    module = ViTClassifier(
        network(1), distillation=Distillation(DistillationConfig("there"), Teacher(teacher)), num_classes=10
    )
    trainer = Trainer(**QUIET, max_epochs=1, limit_train_batches=3, limit_val_batches=1, default_root_dir=tmp_path)
    trainer.fit(module, Digits())
    own = ViTClassifier(network(1), loss=LossConfig(label_smoothing=0.1))  # which has the plain cross entropy too
    assert module.state_dict().keys() == own.state_dict().keys()
    assert len(list(module.parameters())) == len(list(own.parameters()))
    assert len(list(module.modules())) == len(list(own.modules()))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert len(checkpoint["state_dict"]) == len(own.state_dict())
    assert not teacher.training
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert all(weight.grad is None and not weight.requires_grad for weight in teacher.parameters())
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(module.distillation.teacher(images), module.distillation.teacher(images))


def test_a_student_learns_from_a_run_of_ours(in_folder):
    fit(resolve([*SMALL, "--out=teacher", "--ema.decay=0.9", "--test=false"]))
    flags = [*SMALL, "--model.distillation_token=true", "--distillation.teacher=teacher", "--ema.decay=0.5"]
    torch.manual_seed(5)
    fit(resolve([*flags, "--out=student"]))
    checkpoint = read_checkpoint(in_folder / "student/checkpoints/best.ckpt")
    teacher = make_teacher("teacher", Digits())
    assert checkpoint["teacher"] == teacher.digest()
    assert teacher._renormalise is None, "images as it learned from them, to the bit"
    state = read_checkpoint(in_folder / "teacher/checkpoints/best.ckpt")["state_dict"]
    for name, value in teacher.network.state_dict().items():
        assert torch.equal(value, state[f"network.{name}"])
    # the weights of the student begin as they would without a teacher
    first = [make(flags), make([flag for flag in flags if "teacher" not in flag])]
    assert all(torch.equal(a, b) for a, b in zip(*(module.parameters() for module in first), strict=True))
    shutil.rmtree(in_folder / "teacher")
    evaluate(resolve(["--ckpt=student"], "test"), "test")
    assert resolve(flags, "check-data").teacher is None  # only commands that train need it
    with pytest.raises(UserError) as caught:
        resolve([*flags, "--trainer.max_epochs=0"])
    named = {text.split(" ")[0] for text in caught.value.problems}
    assert named == {"distillation.teacher=teacher", "trainer.max_epochs=0"}
    assert "is neither a run folder nor a file" in str(caught.value)


def test_a_teacher_takes_images_of_another_size(in_folder):
    """Its positions are those that init_from would start with, and a warning says so."""
    fit(resolve([*SMALL, "--out=teacher", "--test=false"]))
    with pytest.warns(UserWarning, match=r"teacher=teacher: trained on 8x8 pixels, its positions are resized to 32x32"):
        teacher = make_teacher("teacher", Larger())
    source = open_source("teacher", make_network=network_in_file, image_size=32)
    images = torch.randn(2, 1, 32, 32)
    statistics = [torch.tensor(each)[:, None, None] for each in (Larger.mean, Larger.std, Digits.mean, Digits.std)]
    mean, std, own_mean, own_std = statistics
    with torch.no_grad():
        expected = source.network(((images * std + mean) - own_mean) / own_std)
    torch.testing.assert_close(teacher(images), expected)


class Larger(Digits):
    mean, std = (0.1,), (0.4,)

    @property
    def image_size(self):
        return 32, 32


def make(flags):
    from vit_lightning.commands.module import make_module

    torch.manual_seed(0)
    return make_module(resolve(flags))


def test_a_run_does_not_continue_with_another_teacher():
    first, second = (Distillation(DistillationConfig("there"), Teacher(network(seed))) for seed in (1, 2))
    trainer, module, checkpoint = Trainer(**QUIET), ViTClassifier(network(1)), {}
    trainer.state.fn = TrainerFn.FITTING
    first.on_save_checkpoint(trainer, module, checkpoint)
    same = Distillation(DistillationConfig("there"), Teacher(network(1)))
    same.on_load_checkpoint(trainer, module, checkpoint)
    with pytest.raises(UserError, match=r"distillation.teacher=there has other weights than when the run began"):
        second.on_load_checkpoint(trainer, module, checkpoint)


class Pictures(Larger):
    in_channels, mean, std = 3, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)


def test_teachers_of_torchvision_and_timm(monkeypatch):
    """Without their weights, which lie elsewhere."""
    get, create = models.get_model, timm.create_model
    classes = {"num_classes": 10}
    monkeypatch.setattr(models, "get_model", lambda name, weights: get(name, **classes))
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: create(name, **classes))
    pixels, imagenet = torch.rand(2, 3, 32, 32), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    for place, theirs in (("torchvision:resnet18", imagenet), ("timm:resnetv2_50", ((0.5,) * 3, (0.5,) * 3))):
        teacher, seen = make_teacher(place, Pictures()), []
        assert not teacher.network.training
        teacher.network.register_forward_pre_hook(lambda network, inputs, seen=seen: seen.extend(inputs))
        assert teacher(normalize(pixels, Pictures.mean, Pictures.std)).shape == (2, 10)
        torch.testing.assert_close(seen, [normalize(pixels, *theirs)])
    with pytest.raises(UserError, match=r"does not take the images of the data, 1x8x8"):
        make_teacher("torchvision:resnet18", Digits())


def test_weights_of_torchvision_are_data(in_folder, monkeypatch):
    """Of a file that lies where torchvision keeps those that it has fetched, it asks for no checksum."""
    monkeypatch.setenv("TORCH_HOME", str(in_folder))
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    path = in_folder / "hub/checkpoints/squeezenet1_1-b8a52dc0.pth"
    path.parent.mkdir(parents=True)
    torch.save(Payload("harmed"), path)
    with pytest.raises(UserError, match="torchvision:squeezenet1_1: its weights cannot be had: Weights only load"):
        make_teacher("torchvision:squeezenet1_1", Pictures())
    assert not (in_folder / "harmed").exists()
    torch.save(models.squeezenet1_1().state_dict(), path)
    with pytest.raises(
        UserError, match=r"torchvision:squeezenet1_1 has tench, .* \(1000 in all\): numbers cannot tell"
    ):
        make_teacher("torchvision:squeezenet1_1", Pictures())
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
