"""What comes before an engine's parts are made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sidestream.config import EngineConfig
from sidestream.engine import build
from sidestream.testing.tokenizer import ToyTokenizer
from sidestream.testing.toy import ToyModel


class OpensNoDevice(Exception):
    pass


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("home", [True, False])
def test_kernels_have_their_place_before_a_gpu_is_opened_which_compiles_the_first_of_them(
    eager: bool, home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Path] = []

    def place() -> Path:
        if home:
            return tmp_path
        raise RuntimeError("Could not determine home directory.")

    def opened(*_: object) -> None:
        raise OpensNoDevice

    monkeypatch.setattr(build, "torch_device", lambda kind: torch.device("cuda"))
    monkeypatch.setattr(build, "cache_root", place)
    monkeypatch.setattr(build, "keep_compiled", kept.append)
    monkeypatch.setattr(build, "_open_device", opened)
    with pytest.raises(OpensNoDevice):
        build.build_engine(ToyModel(), ToyTokenizer(), EngineConfig(device="cuda", kv_memory="1MiB", eager=eager))
    assert kept == ([tmp_path / "compiled"] if home else [])
