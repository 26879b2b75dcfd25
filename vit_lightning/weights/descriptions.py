"""Fields of what lies beside weights about images and classes: each becomes a fact, says nothing, or is refused."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vit_lightning.sizes import pair

KERNELS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Interpolation by its number in Pillow and in ``preprocessor_config.json``."""
INTERPOLATIONS = (*KERNELS.values(), *(f"fast_{kernel}" for kernel in KERNELS.values()))
PREPROCESSING = ("mean", "std", "centre_share", "class_names", "interpolation", "resize", "multi_label")
"""Facts of images and classes whatever the family of the weights, arguments of ``ImageFiles``."""
BY_TIMM = {"mean": "mean", "std": "std", "crop_pct": "centre_share", "interpolation": "interpolation"}
_IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_CROPPED = {"size": {"shortest_edge": 224}, "resample": 3, "do_center_crop": True, "crop_size": 224, **_CLIP}
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {"size": 224, "resample": 2, **_HALF},
    "DeiT": {"size": 256, "resample": 3, "do_center_crop": True, "crop_size": 224, **_HALF},
    "Bit": _CROPPED,
    "CLIP": _CROPPED,
    "DINOv3ViT": {"size": 224, "resample": 2, **{f"image_{name}": value for name, value in _IMAGENET.items()}},
}
"""Defaults of transformers' image processors that prepare images for a ViT, by the beginning of their names."""
FIELDS: dict[str, set[str]] = {
    "preprocessor_config.json": {
        *("size", "do_resize", "crop_size", "do_center_crop", "resample", "do_rescale", "rescale_factor"),
        *("do_normalize", "image_mean", "image_std", "image_processor_type", "feature_extractor_type"),
        *("processor_class", "_processor_class", "do_convert_rgb", "default_to_square", "return_tensors", "use_fast"),
        *("input_data_format", "data_format", "device", "disable_grouping", "_valid_processor_keys", "pad_size"),
        "backend",
    },
    "pretrained_cfg": {
        *("input_size", "crop_pct", "interpolation", "mean", "std", "num_classes", "label_names", "architecture"),
        # of the places of the weights, of other uses of them, or for people
        *("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "tag", "custom_load", "label_offset"),
        *("test_input_size", "min_input_size", "fixed_input_size", "test_crop_pct", "pool_size", "test_pool_size"),
        *("first_conv", "classifier", "label_descriptions", "license", "description", "origin_url", "paper_name"),
        *("paper_ids", "notes", "num_features"),
        *("global_pool", "model_args", "pretrained_cfg"),  # where these lie beside the others
    },
    "preprocessing": {"image_size", "in_channels", *PREPROCESSING},
}
"""Fields of what people keep beside weights: transformers' processor and config, timm's config, our own exports.

Those of a model's architecture are in the table of its family, where another name is refused too.
"""
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("do_pad", "offset", "do_flip_channel_order", "do_reduce_labels"), (False,)),
    "crop_mode": ("center", "squash"),
    "problem_type": ("single_label_classification", "multi_label_classification"),
}
"""Fields of which these values alone are right."""


ARGS: dict[str, dict[str, tuple[str, Any]]] = {
    "val_crop_size": {  # of torchvision's references/classification/train.py
        "resize": ("val_resize_size", 256),
        "image_size": ("val_crop_size", 224),
        "interpolation": ("interpolation", "bilinear"),
    },
    "teacher_temp": {"resize": ("", 256), "image_size": ("", 224), "interpolation": ("", "bicubic")},  # of DINO's
}
"""Facts in the ``args`` of a training, with their names there and defaults, by a name that this writer alone has.

The other ``args`` tell how it was trained; its images are normalised with ImageNet's numbers.
"""


class Described(NamedTuple):
    """Facts of images and classes, and for each fact that could not be read, why."""

    view: dict[str, Any]
    unread: dict[str, str]


def described(
    config: Mapping[str, Any] | None, images: Mapping[str, Any] | None = None, *, whole: bool = True
) -> Described:
    """Returns what descriptions say about images and classes.

    Args:
        config: transformers' ``config.json``, timm's, or that of an export of ours.
        images: ``preprocessor_config.json``.
        whole: whether timm's has all that differs from the defaults.
    """
    config = config or {}
    view: dict[str, Any] = {}
    unread: dict[str, str] = {}
    of_timm, ours = isinstance(config.get("architecture"), str), config.get("preprocessing")
    if isinstance(ours, Mapping):
        view, unread = dict(ours), _wrong("preprocessing", ours)
        view |= {"image_size": pair(view["image_size"])} if "image_size" in view else {}
    elif of_timm and not images:
        given = config.get("pretrained_cfg")
        found = given if isinstance(given, Mapping) else config
        view, unread = _of_timm(found), _wrong("pretrained_cfg", found)
        for name in () if whole else [name for name in BY_TIMM if not found.get(name)]:
            by = f"is not in args, and timm has no {config['architecture']} here (pip install timm)"
            unread[BY_TIMM[name]] = f"{name} of its images {by}"
        view = {name: value for name, value in view.items() if name not in unread}
        view |= {"resize": None} if "centre_share" in unread else {}  # which follows from it
    elif images:
        view, unread = _of_processor(images)
    if not of_timm:
        unread |= _wrong("config.json", {"problem_type": config.get("problem_type")})
        view |= {"multi_label": True} if config.get("problem_type") == "multi_label_classification" else {}
    return Described({name: value for name, value in view.items() if value is not None}, unread)


def with_args(args: Mapping[str, Any], cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json of timm for a checkpoint of its train.py; the other ``args`` tell how it was trained.

    Args:
        args: the command line of the training.
        cfg: ``pretrained_cfg`` of the architecture.
    """
    size, channels = args.get("input_size"), args.get("in_chans") or 3
    size = size or (args.get("img_size") and [channels, *pair(args["img_size"])])
    given = {name: args.get(name) for name in ("mean", "std", "crop_pct", "crop_mode", "interpolation")}
    given |= {name: [*(given[name] or ())] * channels for name in ("mean", "std") if len(given[name] or ()) == 1}
    given |= {"input_size": size} if isinstance(size, list | tuple) else {}
    found = {**cfg, **{name: value for name, value in given.items() if value}}
    pool = {"global_pool": args["gp"]} if args.get("gp") else {}
    model = {"architecture": args["model"], "model_args": args.get("model_kwargs") or {}}
    return {**model, "pretrained_cfg": found, **pool}


def of_args(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a description by the ``args`` of a writer in ``ARGS``; None for others."""
    fields = next((fields for name, fields in ARGS.items() if name in args), None)
    if fields is None:
        return None
    found = {fact: args.get(name, usual) for fact, (name, usual) in fields.items()}
    return centre_cropped(**found, fast=args.get("backend") == "tensor")


def centre_cropped(resize: int, image_size: int, interpolation: str, *, fast: bool = False) -> dict[str, Any]:
    """Returns a description of images whose shorter side is resized and whose middle is cut out, as by torchvision."""
    facts = {"image_size": [image_size] * 2, "resize": resize, "centre_share": min(1.0, image_size / resize)}
    return {"preprocessing": {**facts, "interpolation": "fast_" * fast + interpolation, "in_channels": 3, **_IMAGENET}}


def _of_timm(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns facts by ``pretrained_cfg``, as timm's ``resolve_data_config`` and ``transforms_imagenet_eval``."""
    usual = {"crop_pct": 0.875, "interpolation": "bicubic", "crop_mode": "center", **_IMAGENET}
    found = {**usual, **{name: value for name, value in given.items() if value}}
    shape = found.get("input_size") or (3, 224, 224)
    size, share = (shape[1], shape[2]), float(found["crop_pct"])
    edges = [math.floor(side / share) for side in size]
    cropped = edges[0] if edges[0] == edges[1] else "cover"
    sizes = {"image_size": size, "resize": edges if found["crop_mode"] == "squash" else cropped}
    return {
        **({"in_channels": shape[0], **sizes} if "input_size" in found else {}),
        **{name: [float(value) for value in found[name]] for name in ("mean", "std")},
        "centre_share": share,
        "interpolation": found["interpolation"],
    }


def _of_processor(given: Mapping[str, Any]) -> Described:
    """Returns facts by ``preprocessor_config.json``, as transformers' image processors."""
    name = str(given.get("image_processor_type") or given.get("feature_extractor_type") or "ViTImageProcessor")
    kind = name.removesuffix("Fast").removesuffix("FeatureExtractor").removesuffix("ImageProcessor")
    problems = _wrong("preprocessor_config.json", given)
    if kind not in PROCESSORS:
        names = (f"{known}ImageProcessor" for known in PROCESSORS)
        problems["resize"] = _text("preprocessor_config.json", "image_processor_type", name, names)
    named = "image_processor_type" in given or "feature_extractor_type" in given
    usual = {"do_center_crop": "crop_size" in given and not named, **PROCESSORS.get(kind, PROCESSORS["ViT"])}
    found = {**usual, **{name: value for name, value in given.items() if value is not None}}
    view: dict[str, Any] = {}
    factor = 255.0 * float(found.get("rescale_factor", 1 / 255) if found.get("do_rescale", True) else 1.0)
    mean, std = (found["image_mean"], found["image_std"]) if found.get("do_normalize", True) else ([0.0] * 3, [1.0] * 3)
    view |= {"mean": [value / factor for value in mean], "std": [value / factor for value in std]}
    edges = _edges(found["size"], squash=kind not in ("Bit", "CLIP"))
    size = _edges(found["crop_size"], squash=True) if found["do_center_crop"] else edges
    if not found.get("do_resize", True):
        problems["resize"] = _text("preprocessor_config.json", "do_resize", False, (True,))
    elif edges is None or not isinstance(size, tuple):
        problems["resize"] = _text("preprocessor_config.json", "size", found["size"], ("one size for all images",))
    else:
        share = min(1.0, size[0] / pair(edges)[0])
        view |= {"image_size": size, "resize": edges if isinstance(edges, int) else list(edges), "centre_share": share}
    view["interpolation"] = f"fast_{KERNELS.get(found['resample'], found['resample'])}"
    return Described(view, problems)


def _edges(size: Any, *, squash: bool) -> int | tuple[int, int] | None:
    """Returns a number for the shorter side of images, or height and width of all; None of another rule."""
    if isinstance(size, Mapping):
        shortest = size.get("shortest_edge")
        if isinstance(shortest, int) and not size.keys() - {"shortest_edge"}:
            return shortest
        size = [size.get("height"), size.get("width")] if not size.keys() - {"height", "width"} else None
    elif isinstance(size, int):
        return (size, size) if squash else size
    known = isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) for side in size)
    return (size[0], size[1]) if known else None


def _wrong(kind: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Returns for each field that is unknown, or has another value than those that are right, a sentence."""

    def problems() -> Iterator[tuple[str, str]]:
        for name, value in given.items():
            right = VALUES.get(name, ())
            if name not in FIELDS.get(kind, ()) and value not in (None, *right):
                yield "resize" if name == "crop_mode" else name, _text(kind, name, value, right)

    return dict(problems())


def _text(kind: str, name: str, value: Any, right: Any = ()) -> str:
    known = f" (only {', '.join(map(str, right))})" if right else ""
    return f"{name}={value} of {kind} is not read{known}"
