"""Names of device kinds are spelled by devices and config.py only; others use `sidestream_kv.device.kinds`."""

from __future__ import annotations

import ast
from pathlib import Path

import sidestream
import sidestream_kv
from sidestream_kv.device.kinds import CPU, CUDA

PACKAGES = (Path(sidestream.__file__).parent, Path(sidestream_kv.__file__).parent)
_OTHER_MEANINGS = {"cli/probes.py": 3}  # findings of `doctor`


def _spelled(source: str) -> list[int]:
    """Lines with a string that is the name of a device kind, or that begins with one and an index."""
    strings = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return sorted(
        node.lineno
        for node in strings
        if isinstance(node.value, str) and node.value.partition(":")[0] in (CPU, CUDA) and " " not in node.value
    )


def test_only_devices_and_config_spell_the_kinds_of_devices() -> None:
    found = {}
    paths = {path.relative_to(root).as_posix(): path for root in PACKAGES for path in sorted(root.rglob("*.py"))}
    for name, path in paths.items():
        if name != "config.py" and not name.startswith("device/"):
            lines = _spelled(path.read_text(encoding="utf-8"))
            if len(lines) > _OTHER_MEANINGS.get(name, 0):
                found[name] = lines
    assert not found, f"use CPU, CUDA, on_host or on_gpu of sidestream_kv.device.kinds: {found}"


def test_device_names_with_index_and_in_comparisons_are_found() -> None:
    assert _spelled('torch.device("cuda:0")\nx.device.type == "cpu"\n"cpu time"\n') == [1, 2]
