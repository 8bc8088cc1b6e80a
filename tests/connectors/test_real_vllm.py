"""The secondary tier in vLLM's own manager of tiers, on a CPU: `make test-vllm`. Host memory is vLLM's, a GPU is not
needed: a test writes the chunks that a GPU would.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM: make test-vllm"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of their own code
]

CHUNK_BYTES = 4096


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    from sidestream_kv.connectors import vllm_plugin

    vllm_plugin.register()


def offloading_config(extra: dict[str, Any], **changed: Any) -> Any:
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    values = {
        "groups": (OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
        "worker_kv_bytes_per_block": CHUNK_BYTES,
        "enable_kv_cache_events": False,
        "extra_config": extra,
        "engine_id": uuid.uuid4().hex,
        "model": OffloadingModelConfig(name="model", dtype="bfloat16"),
        "cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False),
        **changed,
    }
    return OffloadingConfig(**values)


class Engine:
    """The scheduler's side of one engine: vLLM's manager with eight chunks of host memory and our tier."""

    def __init__(self, directory: Path, **options: Any) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        tier = {"type": "sidestream", "disk": str(directory), "fingerprint": "weights", **options}
        extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8 * CHUNK_BYTES, "secondary_tiers": [tier]}
        TieringOffloadingSpec.build_metric_definitions(extra)
        self.manager = TieringOffloadingSpec(offloading_config(extra)).get_manager()
        self.request = ReqContext("request")
        self.manager.on_new_request(self.request)

    def step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def settle(self) -> None:
        """Two steps, because vLLM looks for finished jobs once in a step; between them, the copies end."""
        self.step()
        for tier in self.manager.secondary_tiers:
            tier._store.drain()
        self.step()
        assert not self.manager.has_pending_work()

    def row(self, chunk: int) -> memoryview:
        start = int(chunk) * CHUNK_BYTES
        return self.manager.primary_tier.get_kv_memoryview().cast("B")[start : start + CHUNK_BYTES]

    def store(self, *numbers: int) -> None:
        keys = [offload_key(number) for number in numbers]
        prepared = self.manager.prepare_store(keys, self.request)
        assert prepared.keys_to_store == keys
        for number, chunk in zip(numbers, prepared.store_spec.chunk_ids, strict=True):
            self.row(chunk)[:] = content(number)
        self.manager.complete_store(keys, self.request)
        self.settle()

    def load(self, *numbers: int) -> list[bytes | None]:
        """Look the chunks up as the scheduler does, step until none is pending, and read those that were found."""
        keys = [offload_key(number) for number in numbers]
        found = [self.lookup(key) for key in keys]
        assert "HIT" not in found
        self.settle()
        found = [self.lookup(key) for key in keys]
        hits = [key for key, result in zip(keys, found, strict=True) if result == "HIT"]
        chunks = iter(self.manager.prepare_load(hits, self.request).chunk_ids)
        rows = [bytes(self.row(next(chunks))) if result == "HIT" else None for result in found]
        self.manager.complete_load(hits, self.request)
        return rows

    def lookup(self, key: Any) -> str:
        return str(self.manager.lookup(key, self.request).name)


def offload_key(number: int) -> Any:
    from vllm.v1.kv_offload.base import make_offload_key

    return make_offload_key(number.to_bytes(32, "big"), 0)


def content(number: int) -> bytes:
    return bytes([number]) * CHUNK_BYTES


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    engine = Engine(tmp_path / "kv")
    engine.store(1, 2, 3)
    engine.manager.shutdown()
    yield tmp_path / "kv"


def test_chunks_come_back_after_a_restart_and_the_log_says_so(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("sidestream_kv"), "propagate", True)
    caplog.set_level(logging.INFO)
    engine = Engine(directory)
    assert engine.load(3, 1, 4) == [content(3), content(1), None]
    assert any("disk tier: 2 blocks reused" in line for line in caplog.messages)
    engine.manager.shutdown()


def test_a_damaged_chunk_is_computed_again_and_the_others_are_loaded(directory: Path) -> None:
    from sidestream_kv.connectors.chunks import key_of

    (path,) = directory.glob(f"engine-0/??/{key_of(offload_key(2)).hex()}-*")
    path.write_bytes(b"x" * path.stat().st_size)
    engine = Engine(directory)
    assert engine.load(1, 2, 3) == [content(1), None, content(3)]
    engine.store(2)
    engine.manager.shutdown()
    after = Engine(directory)
    assert after.load(2) == [content(2)]
    after.manager.shutdown()


def test_chunks_that_host_memory_has_evicted_come_back(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv")
    engine.store(*range(1, 9))
    engine.store(*range(11, 19))
    assert engine.load(1, 8) == [content(1), content(8)]
    engine.manager.shutdown()


def test_after_a_reset_nothing_is_found_until_the_next_start(directory: Path) -> None:
    engine = Engine(directory)
    engine.manager.reset_cache()
    assert engine.lookup(offload_key(1)) == "MISS"
    engine.manager.shutdown()
    after = Engine(directory)
    assert after.load(1) == [content(1)]
    after.manager.shutdown()


def test_vllm_counts_the_bytes_of_the_tier(directory: Path) -> None:
    engine = Engine(directory)
    engine.load(1, 2)
    counted = engine.manager.get_stats().data["data"]
    assert counted["vllm:kv_offload_tiering_read_bytes"] == {("1:sidestream",): 2 * CHUNK_BYTES}
    assert counted["vllm:kv_offload_tiering_chunk_hits"][("1:sidestream",)] == 2
    engine.manager.shutdown()


def test_a_wrong_option_is_one_clear_error(tmp_path: Path) -> None:
    from sidestream_kv.errors import ConfigError

    with pytest.raises(ConfigError, match="secondary tier sidestream: no option capacity; did you mean disk_capacity"):
        Engine(tmp_path / "kv", capacity="1GiB")


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def connector_of(model: Path, disk: Path, **options: Any) -> Any:
    """Our connector, as vLLM's scheduler makes it for `vllm serve MODEL --kv-transfer-config …`."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    flag = KVTransferConfig(
        kv_connector="SidestreamOffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 20,
            "secondary_tiers": [{"type": "sidestream", "disk": str(disk)}],
        },
    )
    arguments = {"skip_tokenizer_init": True, "kv_transfer_config": flag, "load_format": "auto", **options}
    config = EngineArgs(model=str(model), max_model_len=64, block_size=16, **arguments).create_engine_config()
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)]
    caches = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)


def test_overrides_of_the_model_are_another_model(tmp_path: Path) -> None:
    from sidestream_kv.errors import ConfigError

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    (model / "model.safetensors").write_bytes(b"weights")
    connector_of(model, tmp_path / "kv").shutdown()
    connector_of(model, tmp_path / "kv").shutdown()
    with pytest.raises(ConfigError, match=r"was written by another model or layout: fingerprint '\w+' \(here '\w+'\)"):
        connector_of(model, tmp_path / "kv", hf_overrides={"rope_theta": 77.0})


def test_the_installed_package_is_found_as_a_plugin() -> None:
    found = [point.value for point in metadata.entry_points(group="vllm.general_plugins") if point.name == "sidestream"]
    if not found:
        pytest.skip("sidestream-kv is on the path, but not installed")
    assert found == ["sidestream_kv.connectors.vllm_plugin:register"]
