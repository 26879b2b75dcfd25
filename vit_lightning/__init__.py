"""Vision Transformers from readable blocks, trained through Lightning from one config.

The public names are listed in ``__init__.pyi``. Each is imported when it is first used, so that
``from vit_lightning import ViT`` loads torch and einops alone.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {alias.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(str(_MODULES[name])), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
