"""The table of mistakes: what the command answers to each, before anything is trained or written.

A row is a command line and its answer: one string for each line of it, in which ``...`` stands for any words between,
and ``$`` for its end.
All mistakes of a command line are named at once, so that a row may hold several. The files that the rows name are made
by ``place``; mistakes in other files are in the tests of what reads those.
"""

import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  # else a command says that it loads it
import pytest
import torch
from runs import REPOSITORY
from tensors import write_images

from vit_lightning.cli import main

COMMANDS = {
    "fit": "give a config: lightning fit --config digits (lightning configs lists",
    "fit --confg p.yaml": [
        "confg=p.yaml: there is no such option (did you mean config?)",
        "give a config: lightning fit",
    ],
    "check-data": "give a config: lightning check-data --config digits",
    "summary": "give a config, as lightning summary --config digits, or a model, as --ckpt RUN_FOLDER",
    "trian": "there is no command trian (choose fit, validate, test, ",
    "FIT": "did you mean fit?",
    "show_batch": "did you mean show-batch?",
    "--config=digits.yaml fit": "the command comes first: lightning fit --config=digits.yaml",
    "digits.yaml": "the command comes first: lightning fit digits.yaml",
    "fit -config digits.yaml": "-config: an option has two dashes and its full name: --config",
    "fit digits.yaml --model.depth= 3": "there must be no space after the equals sign: --model.depth=3",
    "fit digits.yaml model.depth=3": "did you mean --model.depth=3? (options are given as --key=value)",
    "fit digits.yaml folder": "folder: unexpected argument, a folder",
    "fit digits_short": "digits_short: unexpected argument, did you mean --config digits_short?",
    "fit --config": "--config needs a value (--config=...)",
    f"fit digits.yaml --optimizer.lr=1{'0' * 400}": "optimizer.lr=10 ... 0 must be a finite float",
    "fit digits.yaml --trust=yes": "trust=yes must be true or false",
    "fit digits.yaml --help.lost": "help.lost: there is no such group",
    "fit digits.yaml --out=run": "out=run is there already and not empty",
    "fit digits.yaml --out=digits.yaml/run": "out=digits.yaml/run cannot be made",
    "fit digits.yaml --trainer.limit_val_batches=1.5": "limit_val_batches",
    "fit digits.yaml --trainer.max_time=soon": "max_time",
    "fit digits.yaml --trainer.enable_checkpointing=false": "a run keeps checkpoints, from which it is resumed (leave",
    "fit digits.yaml --ckpt_path=run": (
        "ckpt=run: there is no such option (--init_from=SOURCE starts ... lightning fit --resume=RUN resumes a run)"
    ),
    "fit --resume=folder": "resume=folder is not a run folder with a config.yaml",
    "fit --resume=run/checkpoints/last.ckpt": "is not a run folder with a config.yaml (did you mean run?)",
    "fit --resume=runs/digits/nothing": (
        "is not a run folder with a config.yaml (did you mean runs/digits/b? the newest of 2 runs in runs/digits)"
    ),
    "fit --resume=runs/digits": "(did you mean runs/digits/b? the newest of 2 runs in runs/digits)",
    "test --ckpt=runs/digits": "holds neither checkpoints/best.ckpt nor ... (did you mean runs/digits/b? the newest of",
    "predict --ckpt=runs/digits flat": (
        "ckpt=runs/digits holds runs and is none itself (did you mean runs/digits/b? the newest of 2 runs in"
    ),
    "predict --ckpt=runs/digits/nothing flat": "is neither a run folder nor a file (did you mean runs/digits/b?",
    "predict --ckpt=good/nothing.pth flat": "ckpt=good/nothing.pth is neither a run folder nor a file$",
    "predict --ckpt=good/weigths.pth flat": "(did you mean good/weights.safetensors?)$",
    "test --ckpt=x --allow-config-change=model.depth": "is for a run that is resumed, with fit",
    "fit digits.yaml --allow-config-change=model.depth": "is for a run that is resumed: give --resume",
    "fit --resume=run --config=digits.yaml": "config=digits.yaml beside --resume",
    "test": "ckpt is missing",
    "test --ckpt=folder --config=digit.yaml --trainer.max_epochs=x": [
        "holds neither checkpoints/best.ckpt nor",
        "did you mean digits.yaml?",
        "trainer.max_epochs=x must be an int",
    ],
    "test --ckpt=digits.yaml": "no zip file of torch.save",
    "test --ckpt=damaged.ckpt": "damaged.ckpt cannot be read",
    "test --ckpt=other.ckpt digits.yaml": "other.ckpt holds weights of none of the families",
    "test --ckpt=run no.jpg": "no.jpg: unexpected argument",
    "test --ckpt=run --top_k=2": "top_k=2: there is no such option",
    "test --ckpt=run --data.split_seed=1 --trainer.max_epochs=x": [
        "data.split_seed=1: the model learned from the split of split_seed=0",
        "trainer.max_epochs=x must be an int",
    ],
    "predict --ckpt=nowhere digits.yaml": "digits.yaml is no image and no checkpoint (a config is given as",
    "predict --ckpt=nowhere --top_k=3 digits.yaml": "digits.yaml is no image and no checkpoint (a config is given as",
    "predict --ckpt=run no.jpg hollow/train/b nor.png": [
        "no.jpg: there is no such file",
        "hollow/train/b: the folder holds no images",
        "nor.png: there is no such file",
    ],
    "predict --ckpt=run no.jpg --top_k=0 ": "top_k=0 must be at least 1",
    "embed": "--ckpt is missing",
    "embed --ckpt=run none.jpg": "none.jpg: there is no such file",
    "embed --ckpt=run flat --out=other.ckpt --split=val": [
        "out=other.ckpt is there already",
        "must end in .npz",
        "split=val is for the run's own images",
    ],
    "export": ["--ckpt is missing", "--out is missing"],
    "export --ckpt=nowhere --out=new --to=tflite": ["to=tflite must be one of safetensors, onnx", "ckpt=nowhere is"],
    "export --ckpt=run --out=flat": "out=flat is there already",
    "inspect": "--ckpt is missing",
    "inspect --ckpt=run --count=0": "count=0 must be at least 1",
    "inspect --ckpt=run no.jpg": "no.jpg: there is no such file or folder",
    "configs digit": "digit: there is no such config (did you mean digits?",
    "configs digits digits_short": "digits_short: unexpected argument",
    "ablate": "PLAN is missing (lightning ablate --help)",
    "ablate cifar10_cpu": "is a config, not a plan",
    "ablate nowhere.yaml": "No such file",
    "ablate plan.yaml --patience=0": "patience=0 must be above 0",
    "ablate --dryrun --workers=x --compare.max_seeds=9 --model.depth=2": [
        "PLAN is missing",
        "did you mean dry_run?",
        "workers=x must be",
        "compare.max_seeds=9: write it into the plan",
        "model.depth=2: write it into the plan",
    ],
    "report folder": "folder is no ablation: it holds no ledger.json",
    "sync": "FOLDER is missing (lightning sync --help)",
    "sync run": "sync=run holds no offline run of W&B, ",
}
FILES = {
    "fit --config=digit.yaml": "No such file or directory (did you mean digits.yaml?)",
    "fit --config=digit.yaml --data.root=photos --model.width=3 --trainer.max_epoch=3 --data.batch_size=x": [
        "did you mean digits.yaml?",
        "trainer.max_epoch=3",
        "data.batch_size=x",
    ],
    "fit --config=families/tim": "(did you mean families/timm? lightning configs lists those of the package)",
    "fit --config=pooling": "config=pooling is the plan of an ablation, not a config: lightning ablate pooling",
    "fit --config=plan.yaml": "config=plan.yaml is the plan of an ablation, not a config: lightning ablate plan.yaml",
    "fit --config=sweep.yaml": "config=sweep.yaml is a sweep of W&B, not a config: wandb sweep sweep.yaml",
    "fit --config=trusting.yaml": [
        "config=trusting.yaml: out is no option of a config (give --out, for one call)",
        "config=trusting.yaml: trust is no option of a config (give --trust, for one call)",
    ],
    "fit --config=args.yaml": (
        "config=args.yaml holds arguments of timm's train.py, it is no config: the guide's page coming_from.md has"
    ),
    "fit --config=folder": "config=folder cannot be read: Is a directory (did you mean folder/one.yaml?)",
    "fit --config=empty.yaml": "config=empty.yaml is empty: it holds no keys",
    "fit --config=text.yaml": "config=text.yaml is no mapping",
    "fit --config=binary.yaml": "config=binary.yaml cannot be read: it is no text",
    "fit --config=broken.yaml": "config=broken.yaml is not valid YAML: line 2",
    "fit --config=tabs.yaml": "line 2, column 1: found character '\\t' that cannot start any token (indent with spaces",
    "fit --config=twice.yaml": "config=twice.yaml: depth comes twice (line 4)",
    "fit --config=typo.yaml": "optimzier: there is no such option (did you mean optimizer?)",
    "fit --config=sections.yaml": "fit: there is no such option (its keys belong at the top of the config)",
    "fit --config=shift.yaml": "RandomCrop.padding=-1 must be at least 0",
    "fit --config=augment.yaml": "data.augment.1.paddding=3 ... did you mean data.augment.1.padding?",
    "fit --config=callback.yaml": (
        "callbacks.0.class_path=lightning.pytorch.callbacks.EarlyStoping ... did you mean lightning.pytorch.callbacks."
    ),
    "fit --config=patience.yaml": "trainer.callbacks.0.patience=long must be an int",
    "fit --config=mode.yaml": "trainer ... `mode` can be min, max, got up",
    "fit --config=monitor.yaml": "EarlyStopping.monitor=val/los is not logged (choose val/loss, ",
    "fit --config=nowhere.yaml --config=binary.yaml --trainer.max_epoch=2 --data=ImageFolder": [
        "config=nowhere.yaml",
        "config=binary.yaml",
        "trainer.max_epoch=2",
    ],
    "fit images.yaml": "data.root is missing",
    "fit images.yaml --data.rot=good": "data.rot=good: there is no such option (did you mean data.root?)",
    "fit images.yaml --data.root=nowhere": "data.root=nowhere is not a folder",
    "fit images.yaml --data.root=flat": "data.root=flat ... two folders, one for each class, found 0",
    "fit images.yaml --data.root=hollow": "no images in hollow/train/b: remove such folders",
    "fit images.yaml --data.root=extra": "extra/val/z is a class that is not in training (move it away; images without",
}
KEYS = {
    "fit digits.yaml --epochs=3 --lr=1 --model-depth=3 --sede_everything=3": [
        "epochs=3: there is no such option (did you mean trainer.max_epochs?)",
        "lr=1: there is no such option (did you mean optimizer.lr?)",
        "model-depth=3: there is no such option (did you mean model.depth?)",
        "sede_everything=3: there is no such option (did you mean seed_everything?)",
    ],
    "fit digits.yaml --model.attention.qkvbias=true": "(did you mean model.attention.qkv_bias?)",
    "fit digits.yaml --optimizer.learning_rate=1": "optimizer.learning_rate=1 ... did you mean optimizer.lr?",
    "fit digits.yaml --optimizer=adam": "optimizer=adam: give its options ... did you mean optimizer.name=adam?",
    "fit digits.yaml --loss=3": "loss=3: give its options (name, label_smoothing, target_threshold)",
    "fit digits.yaml --ema.class_path=NAdam": "ema.class_path=NAdam: ema takes no class",
    "fit digits.yaml --model=resnet18": "resnet18 is not there (did you mean torchvision.models.resnet18?)",
    "fit digits.yaml --model=ViTT": "model.class_path=ViTT is not there (did you mean ViT?)",
    "fit folder/one.yaml --model.class_path=no.Net": (
        "no.Net is not there (give module.Class; searched: installed packages, folder, the working folder)"
    ),
    "fit digits.yaml --model.attention.class_path=torch.nn.Nothing": "class_path=torch.nn.Nothing is not there",
    "fit digits.yaml --data=cifar10": "data.class_path=cifar10 is not there (did you mean CIFAR10?)",
    "fit digits.yaml --data.augment='[{class_path: RandomInvert, pp: 1}]'": "pp=1 ... did you mean data.augment.0.p?",
    "fit digits.yaml --data.augment='[{class_path: RandomInvert, p: x}]'": "data.augment.0.p=x must be a finite float",
    "fit digits.yaml --data.augment.0.degrees=nine": "augment.0: items of a list are not given alone: --data.augment=[",
    "fit digits.yaml --trainer.callbacks='[{class_path: GradientAccumulationScheduler, scheduling: {\"a\": 4}}]'": (
        "trainer.callbacks.0.scheduling.a=a must be an int",
    ),
    "fit digits.yaml --data.augment='[{padding: 3}]'": "data.augment.0: a class_path is missing",
    "fit digits.yaml --model=foreign.Module --trainer.callbacks=[foreign.Watch,pytorch_lightning.callbacks.Timer]": [
        "model.class_path=foreign.Module: pytorch_lightning is another package than lightning: write `import",
        "trainer.callbacks.0.class_path=foreign.Watch: pytorch_lightning is another package than lightning",
        "trainer.callbacks.1.class_path=pytorch_lightning.callbacks.Timer: pytorch_lightning is another package than",
    ],
    "fit digits.yaml --module=foreign.Module --data=foreign.Data --trainer.logger=foreign.Log": [
        "module.class_path=foreign.Module: pytorch_lightning is another package than lightning",
        "data.class_path=foreign.Data: pytorch_lightning is another package than lightning",
        "trainer.logger.class_path=foreign.Log: pytorch_lightning is another package than lightning",
    ],
    "fit digits.yaml --trainer.callbacks=[{class_path:EarlyStopping}]": "with a space",
    "fit digits.yaml --trainer.logger=CometLogger": "trainer: ModuleNotFoundError: Requirement 'comet-ml",
    "fit digits.yaml --trainer.callbacks=[EarlyStopping] --trainer.logger=CSVLoger": [
        "trainer.callbacks.0.monitor is missing (an argument of lightning.pytorch.callbacks.EarlyStopping)",
        "trainer.logger.class_path=CSVLoger is not there (did you mean CSVLogger?)",
    ],
    "fit digits.yaml --optimizer.class_path=torch.optim.Nadam": "is not there (did you mean torch.optim.NAdam?)",
    "fit digits.yaml --optimizer.class_path=NAdam --optimizer.nesterov=true": (
        "optimizer.nesterov=true: torch.optim.NAdam takes no nesterov (choose "
    ),
    "fit digits.yaml --metrics='[{class_path: torchmetrics.Accuracy, task: binary}]'": (
        "metrics.task=binary: an image has one of 10 classes (leave it out)"
    ),
    "fit --model='{model_name: vit, lr: 0.1}' --data='{dataset: x, root: y}' --early_stopping='{monitor: x}'": [
        "data: vit_lightning.Digits has no dataset, root (options of another class need its name: class_path: my.Class",
        "model: vit_lightning.ViT has no model_name, lr (options of another class need its name: class_path: my.Class)",
        "early_stopping: there is no such option (in trainer.callbacks: [{class_path: EarlyStopping, ...}])",
        "model.patch_size=16 is larger than image_size=8",
    ],
    "fit --model='{width: 24, lr: 0.1, patch_size: 4}' --data='{root: y, n_test: 0, batch_size: 16}'": [
        "data: vit_lightning.Digits has no root, n_test (options of another class need its name: class_path: my.Class",
        "model: vit_lightning.ViT has no width, lr (options of another class need its name: class_path: my.Class)",
    ],
    "fit --model.patch_size=4 --data='{split_sed: 1, foo: 2, qux: 3, batch_size: abc}'": [
        "data: vit_lightning.Digits has no foo, qux (options of another class need its name: class_path: my.Class)",
        "data.split_sed=1: there is no such option (did you mean data.split_seed?)",
        "data.batch_size=abc must be an int",
    ],
    "fit digits.yaml --callback=1": "callback=1: there is no such option (did you mean trainer.callbacks?)",
    "fit digits.yaml --metrics='[{class_path: Recall, average: none}]'": (
        "Recall: it gives (10,) where one number is expected (average: macro gives their mean; classes.csv of a run has"
    ),
    "fit digits.yaml --metrics=[F1]": "metrics.class_path=F1 is not there (did you mean F1Score?)",
    "fit digits.yaml --metrics='[{class_path: F1Score, averge: micro}]'": "did you mean metrics.average?",
    "fit --model=timm.create_model --model.model_name=vit_tiny --model.num_classes=10": (
        "model.model_name=vit_tiny: timm has no such model (did you mean vit_tiny_patch16_224, "
    ),
    "summary --model=timm.create_model --model.model_name=vit_tiny_patch16_224 --model.dpth=1": (
        "model.dpth=1: VisionTransformer takes no such argument (did you mean model.depth?)"
    ),
}
VALUES = {
    "fit digits.yaml --model.depth=big --data.batch_size=abc --optimizer.lr=fast --optimizer.schedule=step"
    " --optimizer.betas=0.9 --optimizer.weight_decay=inf --model.positions=rotary --model.pool=max --loss.name=mse"
    " --optimizer.name=adagrad --trainer.precision=8-bit --trainer.gradient_clip_algorithm=nrom --freeze=head": [
        "model.depth=big must be an int",
        "data.batch_size=abc must be an int",
        "optimizer.lr=fast must be a finite float",
        "optimizer.schedule=step must be one of cosine, linear, wsd, constant",
        "optimizer.betas=0.9 must be a list of 2",
        "optimizer.weight_decay=inf must be a finite float",
        "model.positions=rotary must be one of learned, sincos2d, none",
        "model.pool=max must be one of cls, mean",
        "loss.name=mse must be one of ce, bce",
        "optimizer.name=adagrad must be one of adamw, adam, sgd, lamb, lion, muon",
        "trainer.precision=8-bit ... bf16-mixed",
        "trainer.gradient_clip_algorithm=nrom must be one of norm, value",
        "freeze=head must be one of backbone",
    ],
    "fit digits.yaml --model.depth=0 --model.emb_dropout=1 --model.attention.dropout=1.5 --model.num_heads=5"
    " --model.drop_path=-0.1 --data.batch_size=0 --data.split_seed=-1 --optimizer.lr=-1 --seed_everything=-1": [
        "model.depth=0 must be at least 1",
        "model.emb_dropout=1.0 must be at least 0 and below 1",
        "model.attention.dropout=1.5 must be at least 0 and below 1",
        "model.num_heads=5 does not divide emb_size=64 (choose one of 1, 2, 4, 8, ",
        "model.drop_path=-0.1 must be at least 0",
        "data.batch_size=0 must be at least 1",
        "data.split_seed=-1 must be at least 0",
        "optimizer.lr=-1.0 must be a finite number, at least 0",
        "seed_everything=-1 must be at least 0",
    ],
    "fit digits.yaml --ema.decay=1 --loss.label_smoothing=1.5 --lora.dropout=1 --lora.rank=-1 --trainer.devices=0"
    " --distillation.teacher=nowhere": [
        "ema.decay=1.0 must be at least 0 and below 1",
        "loss.label_smoothing=1.5 must be at least 0 and below 1",
        "lora.dropout=1.0 must be at least 0 and below 1",
        "lora.rank=-1 must be at least 0",
        "trainer.devices=0 must be at least 1",
        "distillation.teacher=nowhere is neither a run folder nor a file",
    ],
    "fit digits.yaml --trainer.limit_train_batches=0 --seed_everything=4294967296 --data.split_seed=4294967296"
    " --checkpoint.every_n_steps=0 --experiment=../x --trainer.max_epochs=0 --watchdog_minutes=-1"
    " --trainer.gradient_clip_val=-1 --distillation.temperature=2": [
        "watchdog_minutes=-1.0 must be at least 0",
        "distillation.temperature=2.0 does nothing for kind=hard",
        "trainer.limit_train_batches=0 must be above 0",
        "seed_everything=4294967296 must be at least 0 and below 2**32",
        "data.split_seed=4294967296 must be below 2**32",
        "checkpoint.every_n_steps=0 must be at least 1",
        "experiment=../x must be a plain name",
        "trainer.max_epochs=0 must be at least 1",
        "trainer.gradient_clip_val=-1 must be at least 0",
    ],
    "fit digits.yaml --model.dept=3 --optimizer.lr=fast --data.batch_size=0 --model.patch_size=3"
    " --seed_everything=-1": [
        "model.dept=3",
        "optimizer.lr=fast",
        "data.batch_size=0",
        "model.patch_size=3 does not divide image_size=8 (squares that do: 1, 2, 4, 8)",
        "seed_everything=-1",
    ],
    "fit digits.yaml --wandb.tags='[good, key 0123456789abcdef0123]'": "wandb.tags.1 holds the value of WANDB_API_KEY",
    "fit digits.yaml --wandb.notes='by a-horse-of-the-battery'": "wandb.notes holds the value of DATABASE_URL",
}
TOGETHER = {
    "fit digits.yaml --model.patch_size=16": "model.patch_size=16 is larger than image_size=8",
    "fit digits.yaml --model.class_token=false --model.pool=cls": "model.pool=cls needs class_token=true",
    "fit digits.yaml --model.num_classes=7 --model.image_size=16": [
        "model.image_size=16 does not fit the data, which has 8",
        "model.num_classes=7 does not fit the data, which has 10",
    ],
    "fit digits.yaml --model.preset=CRATE-T/4 --model.emb_size=null --model.depth=1 --model.num_heads=null": (
        "model.preset=CRATE-T/4 needs block=CrateBlock, attention=MSSA and feed_forward=ISTA beside it"
    ),
    "fit --config=families/crate --model.block=TransformerEncoderBlock": "feed_forward=ISTA needs block=CrateBlock",
    "fit digits.yaml --model.attention=odd.Half": "ViT does not take the images of the data, 1x8x8: ... 32",
    "fit digits.yaml --model.preset=S/4 --model.num_heads=2": (
        "model.preset=S/4: model.emb_size=64, model.depth=1 of an earlier config win over it (give null for"
    ),
    "fit digits.yaml --checkpoint.monitor=val/auc": "checkpoint.monitor=val/auc is not logged (choose ",
    "fit digits.yaml --checkpoint.mode=max": "checkpoint.mode=max: lower values of val/loss are better (give mode=min)",
    "fit digits.yaml --metrics=[F1Score] --checkpoint.monitor=val/f1": "val/acc5, val/f1_score, ",
    "fit digits.yaml --trainer.callbacks='[{class_path: KNNProbe}]' --checkpoint.monitor=val/acc9": (
        "checkpoint.monitor=val/acc9 is not logged ... val/knn_acc"
    ),
    "fit digits.yaml --metrics=[HammingDistance] --checkpoint.monitor=val/hamming_distance --checkpoint.mode=max": (
        "checkpoint.mode=max: lower values of val/hamming_distance are better (give mode=min)"
    ),
    "fit digits.yaml --metrics='[{class_path: F1Score, goal: minimize}]' --checkpoint.monitor=val/f1_score "
    "--checkpoint.mode=max": "checkpoint.mode=max: lower values of val/f1_score are better (give mode=min)",
    "fit digits.yaml --metrics=[F1Score] --trainer.callbacks='[{class_path: EarlyStopping, monitor: val/f1_score}]'": (
        "trainer.callbacks.EarlyStopping.mode=min: higher values of val/f1_score are better (give mode=max)"
    ),
    "fit digits.yaml --metrics=[ConfusionMatrix] --model.depth=0": [
        "MulticlassConfusionMatrix: it gives (10, 10)",
        "model.depth=0",
    ],
    "fit digits.yaml --metrics='[{class_path: Accuracy, name: acc}]'": "metrics.name=acc",
    "fit digits.yaml --metrics='[{class_path: F1Score, name: [1]}]'": "metrics.name=[1] must be",
    "fit digits.yaml --loss=null --loss.label_smoothing=0.1": "loss=null before options of it: give one of them",
    "fit digits.yaml --trainer.logger=null --trainer.logger.save_dir=x": "trainer.logger=null before options of it",
    "fit digits.yaml --optimizer.lr=null --lr=None": ["optimizer.lr=null must be", "lr=null: there is no such option"],
    "fit digits.yaml --optimizer.class_path=NAdam --optimizer.lr=abc": "optimizer.lr=abc must be",
    "fit digits.yaml --ema.decay=0.9 --trainer.callbacks='[{class_path: EMAWeightAveraging}]'": (
        "ema.decay=0.9 beside trainer.callbacks.EMAWeightAveraging"
    ),
    "fit digits.yaml --compile=reduce-overheads": "compile=reduce-overheads must be",
    "fit digits.yaml --compile=reduce-overhead --trainer.accumulate_grad_batches=2 --trainer.devices=2": (
        "compile=reduce-overhead beside trainer.accumulate_grad_batches=2, trainer.devices=2: CUDA graphs need one GPU"
    ),
    "fit digits.yaml --compile=reduce-overhead --trainer.accelerator=cpu --trainer.strategy=ddp": (
        "compile=reduce-overhead beside trainer.accelerator=cpu, trainer.strategy=ddp: ... (give compile=true)"
    ),
    "fit digits.yaml --compile=reduce-overhead --trainer.callbacks='[{class_path: "
    'StochasticWeightAveraging, swa_lrs: 0.1}, {class_path: GradientAccumulationScheduler, scheduling: {"1": 2}}]\'': (
        "beside trainer.callbacks.StochasticWeightAveraging, trainer.callbacks.GradientAccumulationScheduler: CUDA"
    ),
    "fit digits.yaml --compile=reduce-overhead --module=lightning.pytorch.demos.BoringModel": [
        "module.class_path=lightning.pytorch.demos.BoringModel takes no optimizer",
        "beside lightning.pytorch.demos.BoringModel.training_step, lightning.pytorch.demos.BoringModel.step: CUDA",
    ],
    "fit digits.yaml --compile=reduce-overhead --trainer.devices=2 --module=frozen.Frozen": "trainer.devices=2: CUDA",
    "fit digits.yaml --ema.warmup=false --lora.alpha=3 --distillation.kind=soft --distillation.alpha=1.5"
    " --distillation.temperature=0": [
        "ema.warmup=False does nothing without decay",
        "lora.alpha=3.0 does nothing for rank=0 (give a rank",
        "distillation.teacher is missing",
        "distillation.alpha=1.5 must be between 0 and 1",
        "distillation.temperature=0.0 must be a finite number above 0",
    ],
    "fit digits.yaml --trainer.max_time=00:00:00:00": (
        "trainer.max_time=00:00:00:00 must be a time above 0 (days:hours:minutes:seconds)"
    ),
    "fit digits.yaml --trainer.gradient_clip_algorithm=value --trainer.max_epochs=-5": [
        "trainer.gradient_clip_algorithm=value does nothing without trainer.gradient_clip_val",
        "trainer.max_epochs=-5 must be at least 1 (or -1 for no end)",
    ],
    "fit --config finetune --data.root=good": "init_from=SOURCE is neither a run folder nor a file",
    "fit digits.yaml --optimizer.class_path=NAdam --optimizer.name=sgd": "name=sgd beside optimizer.class_path",
    "fit digits.yaml --optimizer.class_path=LBFGS": "LBFGS doesn't support per-parameter options",
    "fit digits.yaml --optimizer.class_path=SparseAdam": "SparseAdam does not support dense gradients",
    "fit digits.yaml --optimizer.class_path=Rprop": "Rprop has no weight decay (give optimizer.weight_decay=0)",
    "fit digits.yaml --optimizer.schedule.class_path=ReduceLROnPlateau": (
        "ReduceLROnPlateau follows a metric, but learning rates are known before the training here"
    ),
    "fit digits.yaml --lr_scheduler=ExponentialLR --optimizer.schedule=cosine": (
        "lr_scheduler and optimizer.schedule are the same option (leave one of them out)"
    ),
    "fit digits.yaml --loss.weight=[1,2]": "loss.weight=[1, 2]: give loss.class_path=CrossEntropyLoss beside it",
    f"fit digits.yaml --loss.class_path=CrossEntropyLoss --loss.weight=[1{'0' * 400}]": "loss.weight=[10 ... must be",
    "fit digits.yaml --loss.class_path=CrossEntropyLoss --loss.reduction=none": (
        "shape (4,), torch.float32 where a tensor of one"
    ),
    "fit digits.yaml --loss.class_path=MultiMarginLoss --data.mixing=[MixUp]": (
        "MultiMarginLoss: with class probabilities, which data.mixing makes: "
    ),
    "fit digits.yaml --data.augment='[{class_path: Normalize, mean: [0.5], std: [0.5]}]'": (
        "data.augment.Normalize gets a uint8 tensor (c, H, W), normalised after it: TypeError: Input tensor"
    ),
    "fit digits.yaml --data.augment='[{class_path: Resize, size: 4}]'": "gives torch.uint8 (1, 4, 4) for ... (1, 8, 8)",
    "fit digits.yaml --data.augment='[{class_path: ConvertImageDtype}]'": "gives torch.float32 ... data.mean",
    "fit digits.yaml --freeze=backbone --optimizer.name=muon": (
        "optimizer.name=muon: ViT has no trained matrices before its classifier (choose"
    ),
    "fit digits.yaml --freeze=backbone --optimizer.layer_decay=0.7": (
        "optimizer.layer_decay=0.7 does nothing: all parameters but those of one ... give --optimizer.layer_decay=1; "
        "--config linear_probe"
    ),
    "fit digits.yaml --freeze=backbone --lora.rank=2": (
        "freeze=backbone beside lora.rank=2: adapters freeze the backbone already"
    ),
    "fit digits.yaml --lora.rank=2 --lora.targets=[query]": (
        "lora.targets: ViT has no linear layer query before its head (choose qkv, "
    ),
    "fit --model=timm.create_model --model.model_name=beit_base_patch16_224 --model.img_size=8 --model.patch_size=4"
    " --model.depth=1 --model.embed_dim=24 --lora.rank=2 --lora.targets='[qkv, proj]'": (
        "lora.targets: Beit reads the weights of blocks.0.attn.qkv itself"
    ),
    "fit --model=torchvision.models.resnet18": (
        "model: ResNet does not take the images of the data, 1x8x8: it takes images of 3 channels"
    ),
    "fit images.yaml --data.root=good --model=torchvision.models.resnet18 --model.num_classes=7": (
        "model.num_classes=7 does not fit the data, which has 2 (leave it out)"
    ),
    "fit digits.yaml --module=MAE --loss=null --optimizer.layer_decay=0.7 --data.mixing=[CutMix]": [
        "optimizer.layer_decay=0.7 needs a ViT: MAE does not say how deep a parameter lies",
        "data.mixing: MAE would learn to reconstruct mixed images (give data.mixing=null)",
    ],
    "fit images.yaml --data.root=good --model=torchvision.models.resnet18 --optimizer.layer_decay=0.7": (
        "optimizer.layer_decay=0.7 needs a ViT: ResNet does not say"
    ),
    "fit images.yaml --data.root=good --model=torchvision.models.googlenet --data.image_size=32": (
        "model: GoogLeNet gives GoogLeNetOutputs where logits alone are expected (aux_logits: false, or a class of your"
    ),
    "fit digits.yaml --model=odd.Auxiliary": "model: Auxiliary gives (Tensor, Tensor) where logits alone are expected",
    "fit digits.yaml --model=odd.Auxiliary --model.late=true": "model: Auxiliary gives (Tensor, NoneType) where",
    "fit images.yaml --data.root=good --model=torchvision.models.inception_v3": (
        "model: Inception3 does not take the images of the data, 3x8x8"
    ),
    "fit images.yaml --data.root=good --model=torchvision.models.vit_b_16 --data.image_size=24": (
        "model: AssertionError: Input shape indivisible by patch size!"
    ),
    "fit digits.yaml --init_from=nowhere --data.batch_size=0 --optimizer.lr=-1 --model.deph=3": [
        "init_from=nowhere is neither a run folder nor a file",
        "data.batch_size=0 must be at least 1",
        "optimizer.lr=-1.0 must be",
        "model.deph=3: there is no such option (did you mean model.depth?)",
    ],
    "fit images.yaml --trainer.logger=x --model.preset=Ti/4": [
        "model.preset=Ti/4: model.emb_size=16, model.depth=1, model.num_heads=2 of an earlier config win over it",
        "data.root is missing",
        "trainer.logger=x must be",
    ],
    "fit digits.yaml --init_from=other.ckpt": "init_from=other.ckpt is of another architecture",
    "fit digits.yaml --init_from=damaged.ckpt": "init_from=damaged.ckpt cannot be read",
    "fit digits.yaml --trainer.accelerator=tpu --out=new": "trainer ... accelerator=tpu",
    "fit digits.yaml --trainer=true": "trainer=true: give its options (max_epochs, ",
    "fit --config=number.yaml": ["1=2: there is no such option", "model.3=4: there is no such option"],
}
TABLE: dict[str, Any] = {**COMMANDS, **FILES, **KEYS, **VALUES, **TOGETHER}

PARSER_S_OWN = {"fit --config=mode.yaml"}
"""Rows whose answer holds the parser's own words, as long as they are."""

ODD = """from torch import nn
class Half(nn.Linear):
    def __init__(self, emb_size, num_heads=1):
        super().__init__(emb_size, emb_size // 2)
class Auxiliary(nn.Linear):
    def __init__(self, late=False):
        super().__init__(64, 10)
        self.late = late
    def forward(self, images):
        logits = super().forward(images.flatten(1))
        return (logits, logits) if not self.late else logits if self.training else (logits, None)
"""
FOREIGN = """import pytorch_lightning as pl
class Module(pl.LightningModule): ...
class Data(pl.LightningDataModule): ...
class Watch(pl.Callback): ...
class Log(pl.loggers.Logger): ...
"""
FROZEN = """from torch.optim import SGD
from vit_lightning import ViTClassifier
class Frozen(ViTClassifier):
    def __init__(self, network, optimizer, loss):
        super().__init__(network.requires_grad_(False))
    def configure_optimizers(self):
        return SGD([self.scale], 0.1)
"""
CALLBACK = "model: {patch_size: 4}\ntrainer:\n  callbacks: [{class_path: lightning.pytorch.callbacks.%s}]\n"
AUGMENT = "model: {patch_size: 4}\ndata: {augment: [{class_path: HorizontalFlip}, {class_path: RandomCrop, %s}]}\n"
DIGITS = (REPOSITORY / "experiments" / "digits.yaml").read_text().replace("depth: 6", "depth: 1")  # less to check
TEXTS = {
    "digits": DIGITS,
    "folder/one": DIGITS,
    "experiments/digits": DIGITS,
    "typo": DIGITS.replace("optimizer:", "optimzier:", 1),
    "sections": DIGITS + "fit: {trainer: {max_epochs: 1}}\n",
    "plan": (REPOSITORY / "experiments" / "ablations" / "pooling.yaml").read_text(),
    "images": "data: {class_path: ImageFolder, image_size: 8, num_workers: 0}\n"
    "model: {patch_size: 4, emb_size: 16, depth: 1, num_heads: 2}\ntrainer: {accelerator: cpu, max_epochs: 1}\n",
    "trusting": "trust: true\nout: run\n",
    "empty": "# nothing\n",
    "sweep": "method: bayes\nparameters: {optimizer.lr: {min: 0.1, max: 1}}\n",
    "args": "aa: rand-m9\nepochs: 300\nmodel: vit_small_patch16_224\nopt: adamw\nsched: cosine\n",
    "text": "just text\n",
    "tabs": "model:\n\tdepth: 3\n",
    "twice": "model:\n  patch_size: 4\n  depth: 3\n  depth: 4\n",
    "number": "1: 2\nmodel: {patch_size: 4, 3: 4}\n",
    "broken": "model: [1, 2\noptimizer: {\n",
    "callback": CALLBACK % "EarlyStoping",
    "monitor": CALLBACK % "EarlyStopping, init_args: {monitor: val/los}",
    "patience": CALLBACK % "EarlyStopping, init_args: {monitor: val/loss, patience: long}",
    "mode": CALLBACK % "EarlyStopping, init_args: {monitor: val/loss, mode: up}",
    "shift": AUGMENT % "init_args: {padding: -1}",
    "augment": AUGMENT % "init_args: {paddding: 3}",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, trained: tuple[Path, Any]) -> Path:
    """A working folder with everything that the rows name."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in TEXTS.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (folder / "binary.yaml").write_bytes(bytes(range(128, 256)))
    shutil.copytree(trained[0], folder / "run")
    for name in ("a", "b"):
        shutil.copytree(trained[0], folder / "runs" / "digits" / name)
        os.utime(folder / "runs" / "digits" / name, ns=(ord(name), ord(name)))
    write_images(folder / "flat", 3)
    for root in ("good", "hollow", "extra"):
        for name in ("a", "b"):
            write_images(folder / root / "train" / name, 10)
    for image in (folder / "hollow" / "train" / "b").iterdir():
        image.unlink()
    for name in ("a", "b", "z"):
        write_images(folder / "extra" / "val" / name, 2)
    for name in ("tiny.pth", "weights.safetensors"):
        (folder / "good" / name).touch()
    (folder / "odd.py").write_text(ODD)
    (folder / "frozen.py").write_text(FROZEN)
    (folder / "foreign.py").write_text(FOREIGN)
    torch.save({"state_dict": {"network.head.linear.weight": torch.zeros(10, 3)}}, folder / "other.ckpt")
    (folder / "damaged.ckpt").write_bytes((folder / "other.ckpt").read_bytes()[:500])
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, which the test must leave as it is."""
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    yield place
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("words", TABLE)
def test_a_mistake_is_named_with_its_remedy(words, here, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:a-horse-of-the-battery@host/base")
    assert main(shlex.split(words)) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert "0123456789abcdef0123" not in err
    answer, lines = TABLE[words], err.splitlines()
    expected = [answer] if isinstance(answer, str) else answer
    assert len(lines) == len(expected) <= 15, err
    for text in expected:
        pattern = re.compile(
            ".*".join(map(re.escape, text.removesuffix("$").split(" ... "))) + "$" * text.endswith("$")
        )
        assert any(map(pattern.search, lines)), f"{text!r} is not in\n{err}"
    assert words in PARSER_S_OWN or max(map(len, lines)) < 500


def test_more_problems_than_fit_on_a_screen_are_counted(here, capsys):
    assert main(["fit", "digits.yaml", *(f"--trainer.unknown{number}=1" for number in range(30))]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 15
    assert "and 18 more" in lines[-1]


def test_missing_packages_are_named_beside_all_other_mistakes(here, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setitem(sys.modules, "timm", None)
    mistakes = ["--trainer.max_epochs=ten", "--modle.depth=3"]
    assert main(["fit", "--config", "digits", "--lora.rank=2", *mistakes]) == 2
    error = capsys.readouterr().err
    assert "lora.rank=2 needs peft: pip install 'vit-lightning[lora]'" in error
    assert "trainer.max_epochs=ten must be" in error
    assert "modle: there is no such option (did you mean model?)" in error
    assert main(["fit", "--config", "digits", "--model=timm.create_model", *mistakes]) == 2
    assert (
        "model.class_path=timm.create_model is not there (pip install 'vit-lightning[timm]')" in capsys.readouterr().err
    )
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else find_spec(name))
    assert main(["export", "--ckpt=nowhere", "--out=new", "--to=onnx"]) == 2
    error = capsys.readouterr().err
    assert "to=onnx needs onnxscript: pip install 'vit-lightning[export]'" in error
    assert "ckpt=nowhere is neither a run folder nor a file" in error
