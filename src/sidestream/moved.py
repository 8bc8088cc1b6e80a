"""Lets imports of modules that moved to the package `sidestream_kv` work for one more release, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ROOMS = {"device", "kv", "metrics", "offload"}
_ELSEWHERE = {
    "sidestream.device.sim": "sidestream.testing.sim",
    "sidestream.kv.accesses": "sidestream.runner.accesses",
    "sidestream.metrics.progress": "sidestream.progress",
}


def new_name(name: str) -> str | None:
    """The name of the module that was `name` before; None: it has not moved."""
    for old, new in _ELSEWHERE.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    package, _, rest = name.partition(".")
    return f"sidestream_kv.{rest}" if package == "sidestream" and rest.split(".")[0] in _ROOMS else None


def warn(old: str, new: str) -> None:
    """Say that a name moved."""
    warnings.warn(f"{old} is {new} now: import it from there", DeprecationWarning, stacklevel=3)


class MovedModules(MetaPathFinder, Loader):
    """Finds a module that moved under its old name. Both names are the same module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        return None if new_name(fullname) is None else ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        old = module.__name__
        if (new := new_name(old)) is not None:
            warn(old, new)
            sys.modules[old] = importlib.import_module(new)
