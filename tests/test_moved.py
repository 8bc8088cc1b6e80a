"""Old import paths work, with a warning that names the new one."""

from __future__ import annotations

import importlib
import sys

import pytest

import sidestream_kv


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sidestream.offload.tiers.base", "sidestream_kv.offload.tiers.base"),
        ("sidestream.device.sim.device", "sidestream_order.sim.device"),
        ("sidestream.testing.explore", "sidestream_order.explore"),
        ("sidestream.testing.fake_backend", "proof.fake_backend"),
        ("sidestream.kv.accesses", "sidestream.runner.accesses"),
        ("sidestream.progress", "sidestream.processes.progress"),
        ("sidestream.text_bound", "sidestream.tokenizer"),
    ],
)
def test_a_module_under_its_old_name_is_the_same_module(old: str, new: str) -> None:
    rooms = ("sidestream.device", "sidestream.kv", "sidestream.offload", "sidestream.testing", old)
    try:
        with pytest.warns(DeprecationWarning) as caught:
            found = importlib.import_module(old)
    finally:
        for name in [name for name in sys.modules if name.startswith(rooms)]:
            del sys.modules[name]
    assert f"{old} is {new} now: import it from there" in [str(warning.message) for warning in caught]
    assert found is importlib.import_module(new) and found.__spec__.name == new


def test_types_under_their_old_name_are_the_same_objects() -> None:
    import sidestream.types

    with pytest.warns(DeprecationWarning, match=r"sidestream\.types\.StorePlan is sidestream_kv\.StorePlan now"):
        assert sidestream.types.StorePlan is sidestream_kv.StorePlan
    with pytest.raises(AttributeError, match="StroePlan"):
        sidestream.types.StroePlan  # noqa: B018


def test_an_old_path_of_no_module_raises_module_not_found() -> None:
    with pytest.warns(DeprecationWarning), pytest.raises(ModuleNotFoundError, match=r"sidestream_kv\.kv\.nothing"):
        importlib.import_module("sidestream.kv.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"sidestream\.nothing"):
        importlib.import_module("sidestream.nothing")
