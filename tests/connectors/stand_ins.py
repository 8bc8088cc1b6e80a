"""Puts a stand-in in place of another engine's package, for adapters, which are then imported anew."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from sidestream_kv import connectors


def modules_of(contents: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """Modules with these contents, and the packages around them, by name."""
    made: dict[str, ModuleType] = {}
    for name, content in contents.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            made.setdefault(path, ModuleType(path))
            if depth > 1:
                setattr(made[".".join(parts[: depth - 1])], parts[depth - 1], made[path])
        vars(made[name]).update(content)
    return made


@contextlib.contextmanager
def in_place_of(package: str, modules: Mapping[str, ModuleType], adapters: Sequence[str]) -> Iterator[None]:
    """These modules instead of a package's. Adapters are names below `sidestream_kv.connectors`."""
    own = [f"sidestream_kv.connectors.{name}" for name in adapters]
    real = _modules_below(package)
    _forget([*real, *own])
    sys.modules.update(modules)
    try:
        yield
    finally:
        _forget([*_modules_below(package), *own])
        sys.modules.update(real)


def _modules_below(package: str) -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}


def _forget(names: Sequence[str]) -> None:
    for name in names:
        sys.modules.pop(name, None)
        vars(connectors).pop(name.rpartition(".")[2], None)
