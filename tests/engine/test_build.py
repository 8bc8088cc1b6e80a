"""Steps before an engine's parts are built."""

from __future__ import annotations

import pytest
import torch

from proof.toy import ToyModel
from sidestream.config import EngineConfig
from sidestream.engine import build


class OpensNoDevice(Exception):
    pass


@pytest.mark.parametrize("eager", [True, False])
def test_kernel_cache_is_set_before_a_gpu_is_opened(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def opened(*_: object) -> None:
        order.append("opened")
        raise OpensNoDevice

    monkeypatch.setattr(build, "torch_device", lambda kind: torch.device("cuda"))
    monkeypatch.setattr(build, "use_compile_cache", lambda: order.append("kept"))
    monkeypatch.setattr(build, "_open_device", opened)
    with pytest.raises(OpensNoDevice):
        build.build_engine(ToyModel(), EngineConfig(device="cuda", kv_memory="1MiB", eager=eager))
    assert order == ["kept", "opened"]
