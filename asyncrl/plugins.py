"""The folder is the registry: `load("losses", "clipped")` imports `asyncrl.losses.clipped`.

A name with a dot is a module of the user's own. Every plug-in module offers `Config` (a pydantic
model whose `type` field names the module) and the class or function its family documents.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from types import ModuleType

FAMILIES = (
    "datasets",
    "devices",
    "engines",
    "environments",
    "losses",
    "rewards",
    "trackers",
    "weights",
)


def names(family: str) -> list[str]:
    """Plug-ins that asyncrl ships for a family."""
    package = importlib.import_module(f"asyncrl.{family}")
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in found if not name.startswith("_"))


def load(family: str, name: str) -> ModuleType:
    """The plug-in module; ValueError with the nearest legal name when there is none."""
    if "." in name:
        return importlib.import_module(name)
    known = names(family)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (nearest: {near[0]!r})" if near else ""
        raise ValueError(
            f"unknown {family} type {name!r}{hint}; legal: {', '.join(known)}, "
            "or the dotted name of a module of your own"
        )
    return importlib.import_module(f"asyncrl.{family}.{name}")
