"""Names in a config: the class or function of each, and what a wrong one may have meant."""

import importlib
import inspect
from importlib.util import find_spec
from typing import Any

import vit_lightning
from vit_lightning.config.own_files import imported, searched, searched_modules
from vit_lightning.errors import UserError, near

HOMES = {
    "Callback": "lightning.pytorch.callbacks",
    "Logger": "lightning.pytorch.loggers",
    "Profiler": "lightning.pytorch.profilers",
    "Strategy": "lightning.pytorch.strategies",
    "Precision": "lightning.pytorch.plugins",
    "Metric": "torchmetrics.classification",
    "Optimizer": "torch.optim",
    "OptimizerConfig": "torch.optim",
    "LRScheduler": "torch.optim.lr_scheduler",
    "LossConfig": "torch.nn",
    "Augmentation": "torchvision.transforms.v2",
}
"""Modules of classes that a config names without one, by a class from which they derive, or that they replace."""

NOT_CHOSEN = ("ImageData", "ImageFiles", "WrappedDataset", "WrappedDataModule", "PerImage")
"""Public classes that no config chooses: a base, images given to ``predict``, what is put around the code of others."""


def can_be_class(text: str) -> bool:
    """Whether a text can name a class; words such as adam cannot."""
    return "." in text or text[:1].isupper()


def full_name(name: str, home: str = "") -> str:
    """Returns the name of a class with its module, which may be left out for our own and for those of a home."""
    if name in vit_lightning.__all__:
        return f"vit_lightning.{name}"
    return f"{home}.{name}" if home and "." not in name else name


def is_same_class(one: str, other: str) -> bool:
    """Whether two names in a config are of the same class; one may leave out the module, if it is ours or a home."""
    short, long = sorted((full_name(one), full_name(other)), key=len)
    module, _, last = long.rpartition(".")
    return short == long or (short == last and module in HOMES.values())


def public_name(target: Any) -> str:
    """Returns the name by which a config names a class or function; ours by their public names."""
    if target.__module__.startswith("vit_lightning.") and target.__qualname__ in vit_lightning.__all__:
        return f"vit_lightning.{target.__qualname__}"
    return f"{target.__module__}.{target.__qualname__}"


def find_class(name: str) -> Any:
    """Returns the class or function of a full name; None if there is none.

    Raises:
        UserError: a file of the user's raises an error when it is imported.
    """
    module, _, attribute = name.rpartition(".")
    if not module or not all(part.isidentifier() for part in name.split(".")):
        return None
    return getattr(imported(name) or class_of(module), attribute, None)  # it may be a method of a class


def class_of(name: Any, home: str = "") -> type:
    """Returns the class that a config names, object where it is none: it is refused where it is read."""
    try:
        found = find_class(full_name(name, home)) if isinstance(name, str) else None
    except UserError:  # of a file of the user's
        return object
    return found if inspect.isclass(found) else object


def hint_of_class(name: str, base: Any, home: str) -> str:
    """Returns a hint on a class that is not there: a similar one of its module, of its kind or of its home.

    Args:
        name: the class path.
        base: class from which it must derive.
        home: module of classes that are named without one.
    """
    module, _, last = name.rpartition(".")
    if module.partition(".")[0] == "timm" and find_spec("timm") is None:
        return " (pip install 'vit-lightning[timm]')"
    ours = [] if module else own_classes(base)
    names = ours + _names_of(module or home)
    lower = last.lower()
    found = near(last, names) or sorted((one for one in names if lower in one.lower()), key=len)
    likely = [f"{module}{'.' if module else ''}{one}" for one in found]
    if not module and find_class(f"torchvision.models.{last}") is not None:
        likely.append(f"torchvision.models.{last}")
    likely += [f"{one}.{last}" for one in near(module, searched_modules())]
    if likely:
        return f" (did you mean {likely[0]}?)"
    folders = f"; searched: installed packages, {searched()}" if module and searched() else ""
    choices = f"choose {', '.join(ours)} or " if ours else ""
    return f" ({choices}give module.Class{folders})"


def own_classes(base: Any) -> list[str]:
    """Returns the names of our own classes of a kind that a config may choose."""
    public = {name: getattr(vit_lightning, name) for name in vit_lightning.__all__ if name not in NOT_CHOSEN}
    classes = {name: kind for name, kind in public.items() if inspect.isclass(kind) and not inspect.isabstract(kind)}
    return [name for name, kind in classes.items() if not inspect.isclass(base) or issubclass(kind, base)]


def _names_of(module: str) -> list[str]:
    """Returns the public classes and functions of a module; none if it cannot be imported."""
    try:
        members = vars(importlib.import_module(module)) if module else {}
    except Exception:  # whatever it raises is named elsewhere
        return []
    return [name for name, item in members.items() if callable(item) and name[0] != "_"]
