"""Augmentation policies that draw operations for each image: AutoAugment, RandAugment, 3-Augment."""

from collections.abc import Collection
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vit_lightning.constants import constant
from vit_lightning.data import operations
from vit_lightning.data.augment import Augmentation
from vit_lightning.errors import at_least, choice, problems_of, refuse
from vit_lightning.random_keys import mix, uniform

OPERATIONS: dict[str, operations.Change] = {
    "Identity": lambda images, _: images,
    "ShearX": operations.shear_x,
    "ShearY": operations.shear_y,
    "TranslateX": operations.translate_x,
    "TranslateY": operations.translate_y,
    "Rotate": operations.rotate,
    "Brightness": lambda images, magnitude: operations.brightness(images, 1.0 + magnitude),
    "Color": lambda images, magnitude: operations.saturation(images, 1.0 + magnitude),
    "Contrast": lambda images, magnitude: operations.contrast(images, 1.0 + magnitude),
    "Sharpness": lambda images, magnitude: operations.sharpness(images, 1.0 + magnitude),
    "Posterize": operations.posterize,
    "Solarize": lambda images, magnitude: operations.solarize(images, 255.0 * magnitude),
    "AutoContrast": lambda images, _: operations.autocontrast(images),
    "Equalize": lambda images, _: operations.equalize(images),
    "Invert": lambda images, _: images.bitwise_not(),
    "SolarizeAdd": operations.solarize_add,
}
COLOURS = ("Brightness", "Color", "Contrast", "Sharpness")
SIGNED = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", *COLOURS)
"""Operations whose magnitude is negated for half of the images."""
DRAWN = 14
"""The first operations, of which torchvision's RandAugment draws."""
TIMM_BINS = 31
"""Magnitudes that a ``TimmScale`` has."""
MOVES = ("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
"""The first operations, which move pixels at most."""


class Scale(NamedTuple):
    """Magnitudes of torchvision's RandAugment: one of 31."""

    size: torch.Size
    magnitude: int
    fill = 0

    def table(self) -> Tensor:
        """Returns (operations, bins, 2) magnitudes, float64: as they are, and negated where an operation has a sign."""
        largest = {"ShearX": 0.3, "ShearY": 0.3, "Rotate": 30.0, **dict.fromkeys(COLOURS, 0.9)}
        largest |= {f"Translate{axis}": 150 / 331 * side for axis, side in zip("YX", self.size, strict=True)}
        rows = {name: torch.linspace(0.0, end, 31) for name, end in largest.items()}
        rows |= {"Posterize": (8 - torch.arange(31) / 7.5).round(), "Solarize": torch.linspace(1.0, 0.0, 31)}
        return _both_signs(rows)[:, self.magnitude, None]


class PolicyScale(NamedTuple):
    """Magnitudes of AutoAugment: ten."""

    size: torch.Size
    fill: int

    def table(self) -> Tensor:
        """Returns magnitudes as a ``Scale`` does."""
        level = torch.linspace(0.0, 1.0, 10, dtype=torch.float64)
        rows = _moves(level, self.size, 150 / 331) | dict.fromkeys(COLOURS, level * 0.9)
        rows |= {"Posterize": (8 - level * 4).round(), "Solarize": (1.0 - level) * (256 / 255)}
        return _both_signs(rows, {*SIGNED} - {"Rotate"})


class TimmScale(NamedTuple):
    """Magnitudes of timm's operations: equally likely ones of a normal distribution, each in a bin."""

    size: torch.Size
    magnitude: float
    std: float
    fill: int

    def table(self) -> Tensor:
        """Returns (operations, bins, 2) magnitudes as a ``Scale`` does."""
        quantiles = torch.special.ndtri((torch.arange(TIMM_BINS, dtype=torch.float64) + 0.5) / TIMM_BINS)
        level = (self.magnitude + self.std * quantiles).clamp(0.0, 10.0) / 10
        rows = _moves(level, self.size, 0.45) | dict.fromkeys(COLOURS, level * 0.9)
        rows |= {"Posterize": 4 - (level * 4).trunc(), "Solarize": (256 - (level * 256).trunc()) / 255.0}
        return _both_signs(rows | {"SolarizeAdd": (level * 110).trunc()})


def _moves(level: Tensor, size: torch.Size, way: float) -> dict[str, Tensor]:
    rows = {"ShearX": level * 0.3, "ShearY": level * 0.3, "Rotate": level * 30.0}
    return rows | {f"Translate{axis}": (level * way * side).round() for axis, side in zip("YX", size, strict=True)}


def _both_signs(rows: dict[str, Tensor], signed: Collection[str] = SIGNED) -> Tensor:
    none = torch.zeros_like(rows["Posterize"])
    table = torch.stack([rows.get(name, none) for name in OPERATIONS]).double()
    sign = torch.tensor([-1.0 if name in signed else 1.0 for name in OPERATIONS])
    return torch.stack([table, table * sign[:, None]], dim=-1)


AnyScale = Scale | PolicyScale | TimmScale


def apply_operations(images: Tensor, rows: Tensor, scale: AnyScale) -> Tensor:
    """Applies operations, one after the other; ``rows`` (operations, b) numbers those of ``scale.table``, flattened."""
    if operations.host_chooses(images):
        magnitudes = constant(images.device, type(scale).table, scale)
        changes = {n: _filled(name, scale.fill) for n, name in enumerate(OPERATIONS)}
        for row in rows:
            which, magnitude = row // magnitudes[0].numel(), magnitudes.flatten()[row]
            images = operations.change_each(images, which, magnitude, changes)
        return images
    channels, *size = images.shape[1:]
    table = constant(images.device, _sources, scale, *size)
    sources = table[rows.clamp(max=len(table) - 1)].long()
    parameters = constant(images.device, _parameters, scale, channels)[rows]
    for number in range(len(rows)):
        images = operations.apply_at_once(images, sources[number], parameters[number], scale.fill)
    return images


def _filled(name: str, fill: int) -> operations.Change:
    """Returns the operation, which puts ``fill`` and not 0 where a pixel comes from outside."""
    change = OPERATIONS[name]
    return (lambda images, magnitude: change(images ^ fill, magnitude) ^ fill) if fill and name in MOVES else change


def _sources(scale: AnyScale, height: int, width: int) -> Tensor:
    """Returns what ``operations.apply_at_once`` takes for each row of a scale up to Rotate, and last for all others.

    Both forms thus take the same pixels, also where a place is midway between two. (rows + 1, H * W), int32: 3 MB for
    RandAugment at 224 pixels.
    """
    numbers = torch.arange(1, height * width + 1, dtype=torch.float32).view(1, 1, height, width)
    moved = [
        change(numbers.expand(magnitudes.numel(), -1, -1, -1), magnitudes.flatten())
        for (name, change), magnitudes in zip(OPERATIONS.items(), scale.table(), strict=True)
        if name in MOVES
    ]
    return torch.cat([*moved, numbers]).flatten(1).int()


def _parameters(scale: AnyScale, channels: int) -> Tensor:
    """Returns the parameters of ``operations.apply_at_once`` for each row of a scale, (rows, 8 or 9)."""
    made = scale.table().flatten(1)
    none = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 255.0, 256.0, 0.0, 0.0], dtype=torch.float64)
    rows = none.repeat(*made.shape, 1)
    row, m = dict(zip(OPERATIONS, rows, strict=True)), dict(zip(OPERATIONS, made, strict=True))
    row["Brightness"][:, 0] = 1.0 + m["Brightness"]
    if channels == 3:
        row["Color"][:, :2] = torch.stack([1.0 + m["Color"], -m["Color"]], dim=1)
    row["Contrast"][:, 0], row["Contrast"][:, 2] = 1.0 + m["Contrast"], -m["Contrast"]
    row["Sharpness"][:, 3] = -m["Sharpness"]
    row["AutoContrast"][:, 4] = 1.0 / 255.0
    row["Posterize"][:, 5] = 256 - 2 ** (8 - m["Posterize"])
    row["Solarize"][:, 6], row["Invert"][:, 6] = 255.0 * m["Solarize"], 0.0
    row["Equalize"][:, 7] = 1.0
    row["SolarizeAdd"][:, 8] = m["SolarizeAdd"]
    table = rows.flatten(0, 1).float()
    return table if table[:, 8].any() else table[:, :8]


Policy = Literal["cifar10", "imagenet"]
POLICIES: dict[Policy, str] = {
    "cifar10": """
        Invert .1 0 Contrast .2 6, Rotate .7 2 TranslateX .3 9, Sharpness .8 1 Sharpness .9 3,
        ShearY .5 8 TranslateY .7 9, AutoContrast .5 0 Equalize .9 0, ShearY .2 7 Posterize .3 7,
        Color .4 3 Brightness .6 7, Sharpness .3 9 Brightness .7 9, Equalize .6 0 Equalize .5 0,
        Contrast .6 7 Sharpness .6 5, Color .7 7 TranslateX .5 8, Equalize .3 0 AutoContrast .4 0,
        TranslateY .4 3 Sharpness .2 6, Brightness .9 6 Color .2 8, Solarize .5 2 Invert .0 0,
        Equalize .2 0 AutoContrast .6 0, Equalize .2 0 Equalize .6 0, Color .9 9 Equalize .6 0,
        AutoContrast .8 0 Solarize .2 8, Brightness .1 3 Color .7 0, Solarize .4 5 AutoContrast .9 0,
        TranslateY .9 9 TranslateY .7 9, AutoContrast .9 0 Solarize .8 3, Equalize .8 0 Invert .1 0,
        TranslateY .7 9 AutoContrast .9 0""",
    "imagenet": """
        Posterize .4 8 Rotate .6 9, Solarize .6 5 AutoContrast .6 0, Equalize .8 0 Equalize .6 0,
        Posterize .6 7 Posterize .6 6, Equalize .4 0 Solarize .2 4, Equalize .4 0 Rotate .8 8,
        Solarize .6 3 Equalize .6 0, Posterize .8 5 Equalize 1 0, Rotate .2 3 Solarize .6 8,
        Equalize .6 0 Posterize .4 6, Rotate .8 8 Color .4 0, Rotate .4 9 Equalize .6 0,
        Equalize .0 0 Equalize .8 0, Invert .6 0 Equalize 1 0, Color .6 4 Contrast 1 8,
        Rotate .8 8 Color 1 2, Color .8 8 Solarize .8 7, Sharpness .4 7 Invert .6 0,
        ShearX .6 5 Equalize 1 0, Color .4 0 Equalize .6 0, Equalize .4 0 Solarize .2 4,
        Solarize .6 5 AutoContrast .6 0, Invert .6 0 Equalize 1 0, Color .6 4 Contrast 1 8,
        Equalize .8 0 Equalize .6 0""",
}
"""Sub-policies, of two operations each: name, probability and bin of ten of the magnitude."""


def sub_policies(policy: Policy) -> Tensor:
    """Returns (2, 2, sub-policies), float64: of each operation its row in a ``PolicyScale``, and probability."""
    words, names = POLICIES[policy].replace(",", "").split(), list(OPERATIONS)
    rows = [20 * names.index(name) + 2 * int(bin_) for name, bin_ in zip(words[::3], words[2::3], strict=True)]
    return torch.tensor([rows, [*map(float, words[1::3])]], dtype=torch.float64).view(2, -1, 2).transpose(1, 2)


class AutoAugment(Augmentation):
    """One of 25 sub-policies for each image, two operations with a probability each (Cubuk et al. 2019).

    As in DeepVoltaire's code, which papers on small ViTs use, but for colours, which are rounded as torchvision does.
    torchvision's own, ``torchvision.transforms.v2.AutoAugment``, rotates both ways, shears by the nearest pixel, cuts
    translations off to whole pixels, inverts from 255 and not 256 down, and fills with 0.

    Args:
        policy: the data that it was found on.
        fill: value of the pixels that come from outside.
    """

    def __init__(self, policy: Policy = "cifar10", fill: int = 128) -> None:
        refuse(choice("policy", policy, get_args(Policy)), prefix="augment.AutoAugment.")
        self.policy, self.fill = policy, fill

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        table = constant(images.device, sub_policies, self.policy)
        number, *draws = uniform(keys, range(1, 6))
        (rows, p), chance, sign = table[..., (number * table.shape[-1]).long()], torch.stack(draws[:2]), draws[2:]
        rows = torch.where(chance < p, rows.long() + (torch.stack(sign) < 0.5), 0)
        scale = PolicyScale(images.shape[-2:], self.fill)
        # a policy shears along one axis, by the first operation
        shears = rows[0] // 20 == list(OPERATIONS).index("ShearY" if self.policy == "cifar10" else "ShearX")
        by = torch.where(shears, constant(images.device, PolicyScale.table, scale).flatten()[rows[0]], 0.0)
        shear = partial(operations.shear_bicubic, down=self.policy == "cifar10", fill=self.fill)
        images = operations.change_each(images, shears, by, {True: shear})
        return apply_operations(images, torch.stack([rows[0] * ~shears, rows[1]]), scale)


class RandAugment(Augmentation):
    """A number of operations of one magnitude, drawn from 14 for each image (Cubuk et al. 2020, section 3).

    Args:
        num_ops: operations on each image, one after the other.
        magnitude: their strength, 0 to 30.
    """

    def __init__(self, num_ops: int = 2, magnitude: int = 9) -> None:
        within = problems_of(("magnitude", magnitude, 0 <= magnitude <= 30, "between 0 and 30"))
        refuse(at_least(1, num_ops=num_ops), within, prefix="augment.RandAugment.")
        self.num_ops, self.magnitude = num_ops, magnitude

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        draw, sign = uniform(mix(keys, range(self.num_ops)), range(1, 3))
        rows = torch.add(sign < 0.5, (draw * DRAWN).long(), alpha=2)
        return apply_operations(images, rows, Scale(images.shape[-2:], self.magnitude))


class TimmRandAugment(Augmentation):
    """RandAugment as timm has it: 15 operations, each with a probability of one half, of a magnitude with noise.

    The defaults are ``rand-m9-mstd0.5-inc1``. The noise has 31 equally likely values, and pixels come from the nearest
    place in place of bilinear or bicubic means. All operations change more with more strength (``inc1``).

    Args:
        num_ops: operations that are drawn for each image, one after the other.
        magnitude: mean of their strength, 0 to 10.
        std: standard deviation of the strength.
        fill: value of the pixels that come from outside.
    """

    def __init__(self, num_ops: int = 2, magnitude: float = 9.0, std: float = 0.5, fill: int = 128) -> None:
        within = problems_of(("magnitude", magnitude, 0 <= magnitude <= 10, "between 0 and 10"))
        refuse(at_least(1, num_ops=num_ops), at_least(0, std=std), within, prefix="augment.TimmRandAugment.")
        self.num_ops, self.magnitude, self.std, self.fill = num_ops, magnitude, std, fill

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        scale = TimmScale(images.shape[-2:], self.magnitude, self.std, self.fill)
        draw, sign, bin_, chance = uniform(mix(keys, range(self.num_ops)), range(1, 5))
        place = ((draw * (len(OPERATIONS) - 1)).long() + 1) * TIMM_BINS + (bin_ * TIMM_BINS).long()
        rows = torch.where(chance < 0.5, 2 * place + (sign < 0.5), 0)
        return apply_operations(images, rows, scale)


JITTER = (operations.brightness, operations.contrast, operations.saturation)


class ThreeAugment(Augmentation):
    """Gray, solarized or blurred, each for a third of the images, then colour jitter (DeiT III: Touvron et al. 2022).

    Args:
        jitter: strength of the jitter of brightness, contrast and saturation.
    """

    def __init__(self, jitter: float = 0.3) -> None:
        self.jitter = jitter

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        kind, strength = uniform(keys, range(1, 3))
        which = (kind * 3).long()
        sigma = 0.1 + strength * 1.9  # pixels
        changes: dict[int, operations.Change] = {
            0: lambda images, _: operations.grayscale(images),
            1: lambda images, sigma: operations.solarize(images, torch.full_like(sigma, 128.0)),
            2: lambda images, sigma: operations.gaussian_blur(images, sigma, 2.0),
        }
        return _jittered(operations.change_each(images, which, sigma, changes), mix(keys, 1), self.jitter)


def _jittered(images: Tensor, keys: Tensor, strength: float) -> Tensor:
    """Returns images changed as by ``JITTER``, in an order drawn for each, by factors of 1 less and more strength."""
    if strength == 0.0:
        return images
    draws = uniform(keys, range(10, 23))  # first for the order, and from the eleventh on for the factors
    count = 2 if images.shape[1] == 1 else 3  # gray images have no saturation
    order = draws[:count].argsort(dim=0, stable=True)  # the change with the smallest number comes first
    low = max(0.0, 1.0 - strength)
    factor = (low + draws[10 : 10 + count] * (1.0 + strength - low)).gather(0, order)
    if operations.host_chooses(images):
        for which, factors in zip(order, factor, strict=True):
            images = operations.change_each(images, which, factors, dict(enumerate(JITTER)))
        return images
    # what JITTER does, by one calculation for all kinds
    order, factor = order[..., None, None, None], factor[..., None, None, None]
    rest = (1.0 - factor.double()).float()
    by_mean, by_gray = (torch.where(order == number, rest, 0.0) for number in (1, 2))
    for place in range(count):
        images = operations.blended(images.float(), factor[place], by_gray[place], by_mean[place])
        images = images.clamp(0.0, 255.0).to(torch.uint8)
    return images
