"""The secondary tier in vLLM's own manager of tiers, and the full connector in whole engines, on a CPU:
`make test-vllm`. Host memory of the tier is vLLM's, a GPU is not needed: a test writes the chunks that a GPU would.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import random
import uuid
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proof.disk_slots import DiskSlots

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

    DiskSlots(directory / "engine-0").flip(key_of(offload_key(2)))
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


# ---------------------------------------------------------------------- the full connector


PIECES = [
    (kind, layout)
    for kind in ("attention", "states", "sizes", "latents")
    for layout in ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
]


# In the last two layouts, a layer of a block is in several pieces, which vLLM allows for attention only.
@pytest.mark.parametrize(("kind", "layout"), [*PIECES, ("attention", "LHBNC"), ("attention", "BHLNC")])
def test_regions_have_all_bytes_of_a_block_and_no_others(kind: str, layout: str) -> None:
    import torch
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from sidestream_kv.connectors.vllm_versions import regions_of

    chosen = KVCacheLayout[layout]
    attention = [
        interface.FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=size, dtype=torch.bfloat16)
        for size in (8, 16 if kind == "sizes" else 8)
    ]
    if kind == "latents":  # and keys of an indexer, as in DeepSeek-V3.2
        attention = [
            interface.MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=size, dtype=dtype)
            for size, dtype in ((36, torch.bfloat16), (33, torch.uint8))
        ]
    state = interface.MambaSpec(
        block_size=4, shapes=((3, 5), (7,)), dtypes=(torch.float32,) * 2, page_size_padded=attention[0].page_size_bytes
    )
    specs = dict(zip("ab", attention, strict=True)) | ({"c": state, "d": state} if kind == "states" else {})
    together = interface.UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs=specs)
    groups = {
        "attention": [interface.KVCacheGroupSpec(["a", "b"], attention[0])],
        "states": [interface.KVCacheGroupSpec(["a", "b"], attention[0]), interface.KVCacheGroupSpec(["c", "d"], state)],
    }.get(kind, [interface.KVCacheGroupSpec(["a", "b"], together)])
    options = {"get_resolved_kv_cache_layout": lambda: chosen, "prefix_cache_retention_interval": None}
    cache = SimpleNamespace(num_gpu_blocks_override=None, **options)
    vllm_config = SimpleNamespace(cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None))
    config = kv_cache_utils.get_kv_cache_config_from_groups(vllm_config, groups, 1 << 13)
    blocks = config.num_blocks
    raw = torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.int8)
    views = {
        name: view
        for tensor in config.kv_cache_tensors
        for name, view in zip(
            tensor.layers,
            interface.create_kv_cache_views(raw, specs[tensor.layers[0]], blocks, chosen, tensor),
            strict=True,
        )
    }
    regions, of_layers = regions_of(views, config)
    assert (len({region.numel() for region in regions}) == 1) is (
        kind in ("attention", "states") or layout.startswith("B")
    )
    for name, view in views.items():
        raw.zero_()
        view[3] = 1
        inside = [region.view(blocks, -1)[3].count_nonzero() for region in regions]
        assert sum(inside) == raw.count_nonzero() > 0
        assert {index for index, count in enumerate(inside) if count} == set(of_layers[name])


TOKENS = 24  # of each answer
LENGTHS = (100, 200, 300, 160, 250, 333)
Answers = list[list[int]]


def prompts(name: str, *, shared: int = 0) -> Answers:
    """Prompts of their own for each test; the first tokens of all may be equal."""
    draw = random.Random(name)
    prefix = [draw.randrange(10, 500) for _ in range(shared)]
    return [prefix + [draw.randrange(10, 500) for _ in range(length - shared)] for length in LENGTHS]


class Llm:
    """vLLM in this process; `connector`: options of SidestreamConnector, None: vLLM alone."""

    def __init__(self, model: Path, connector: dict[str, Any] | None, **options: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        flag = None
        if connector is not None:
            flag = KVTransferConfig(
                kv_connector="SidestreamConnector", kv_role="kv_both", kv_connector_extra_config=connector
            )
        arguments = {"num_gpu_blocks_override": 20, "kv_transfer_config": flag, **options}
        self.llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=32,
            max_model_len=480,
            max_num_seqs=4,
            max_num_batched_tokens=128,  # prompts are computed in chunks
            disable_log_stats=False,
            **arguments,
        )
        self.cached: list[int] = []

    def answers(self, asked: Answers) -> Answers:
        done = self.llm.generate([{"prompt_token_ids": each} for each in asked], self._params(), use_tqdm=False)
        self.cached = [each.num_cached_tokens for each in done]
        return [list(each.outputs[0].token_ids) for each in done]

    def aborted(self, asked: Answers, after_steps: int) -> None:
        """Ask, and give up after some steps."""
        engine = self.llm.llm_engine
        names = [engine.add_request(uuid.uuid4().hex, {"prompt_token_ids": each}, self._params()) for each in asked]
        for _ in range(after_steps):
            engine.step()
        engine.abort_request(names, internal=True)

    @staticmethod
    def _params() -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)

    def metric(self, name: str) -> int:
        return int(next(metric.value for metric in self.llm.get_metrics() if metric.name == f"vllm:{name}"))

    @property
    def planner(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector._planner

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def in_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }.items():
            patch.setenv(name, value)
        yield


def saved(config: Any, directory: Path) -> Path:
    """A model with random weights, so large that a wrong block changes its answers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(6)
    model.float().save_pretrained(directory)
    return directory


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}


@pytest.fixture(scope="module")
def llama(in_process: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=3, tie_word_embeddings=False, **SHAPE)
    return saved(config, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gemma(in_process: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with full attention, and several groups of layers with a sliding window of two blocks."""
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=3, layer_types=kinds, sliding_window=64, query_pre_attn_scalar=32, **SHAPE
    )
    return saved(config, tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def gemma4(in_process: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with full attention, whose heads are twice as long as those of layers with a sliding window."""
    from transformers import Gemma4TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma4TextConfig(
        num_hidden_layers=4,
        layer_types=kinds,
        sliding_window=64,
        global_head_dim=64,
        hidden_size_per_layer_input=0,
        **SHAPE,
    )
    return saved(config, tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def falcon(in_process: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Attention and Mamba 2 in each layer."""
    from transformers import FalconH1Config
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    mamba = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 64}
    config = FalconH1Config(num_hidden_layers=2, mamba_n_groups=1, **mamba, **SHAPE)
    with pytest.MonkeyPatch.context() as patch:
        # vLLM 0.32 fails on a CPU where a state inside a chunk is to be kept: its kernel does not return it.
        patch.setattr(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec)
        yield saved(config, tmp_path_factory.mktemp("falcon"))


ASKED = {
    **{name: prompts(name) for name in ("again", "evicted", "held", "others", "aborted", "reset", "failed", "drafts")},
    "shared": prompts("shared", shared=90),
}


@pytest.fixture(scope="module")
def right(llama: Path) -> dict[str, Answers]:
    """Answers of vLLM alone."""
    alone = Llm(llama, None, num_gpu_blocks_override=100)
    answers = {name: alone.answers(asked) for name, asked in ASKED.items()}
    alone.close()
    return answers


def test_blocks_come_back_from_disk_after_a_restart(llama: Path, right: dict[str, Answers], tmp_path: Path) -> None:
    for restarted in (False, True):
        engine = Llm(llama, {"host": "64MiB", "disk": str(tmp_path)})
        assert engine.answers(ASKED["evicted"]) == right["evicted"]
        assert (engine.metric("sidestream_disk_read_bytes") > 0) is restarted
        engine.close()
    assert sum(engine.cached) > sum(LENGTHS) * 3 // 4


def test_groups_of_layers_with_a_sliding_window(gemma: Path) -> None:
    options = {"disable_hybrid_kv_cache_manager": False}
    alone = Llm(gemma, None, num_gpu_blocks_override=200, **options)
    right = alone.answers(ASKED["evicted"])
    alone.close()
    engine = Llm(gemma, {"host": "64MiB"}, num_gpu_blocks_override=48, **options)
    assert len(engine.planner._groups) == 3
    for _ in range(3):
        assert engine.answers(ASKED["evicted"]) == right
    assert min(engine.cached) > 0 and engine.metric("external_prefix_cache_hits") > 0
    engine.close()


# Without the hybrid manager, all layers are one group, with blocks of their own sizes; with it, the sliding layers have
# longer blocks, so that all have equal bytes.
@pytest.mark.parametrize(("disabled", "parts"), [(True, "2 x 16384 + 2 x 32768"), (False, "2")])
def test_layers_with_heads_of_other_lengths(gemma4: Path, tmp_path: Path, disabled: bool, parts: str) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    options = {"disable_hybrid_kv_cache_manager": disabled}
    alone = Llm(gemma4, None, num_gpu_blocks_override=200, **options)
    right = {name: alone.answers(ASKED[name]) for name in ("evicted", "others")}
    alone.close()
    for restarted in (False, True):
        engine = Llm(gemma4, {"host": "64MiB", "disk": str(tmp_path)}, num_gpu_blocks_override=30, **options)
        connector = get_kv_transfer_group()
        assert connector._by_layer and connector._carrier._transfers._layout.describe()["parts"] == parts
        for name in (*right, *right):
            engine.aborted(ASKED["aborted"], after_steps=len(name))
            assert engine.answers(ASKED[name]) == right[name]
        assert (engine.planner.counts.hits["disk"] > 0) is restarted and engine.planner.counts.hits["host"] > 0
        engine.close()


def test_recurrent_states_come_back_from_host_memory_and_disk(
    falcon: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sidestream_kv.offload.loads import Loads

    options = {"disable_hybrid_kv_cache_manager": False, "enable_prefix_caching": True}
    alone = Llm(falcon, None, num_gpu_blocks_override=200, **options)
    right = {name: alone.answers(ASKED[name]) for name in ("evicted", "others", "shared")}
    assert alone.answers(ASKED["evicted"]) == right["evicted"]  # with states on the device
    alone.close()
    for restarted in (False, True):
        engine = Llm(falcon, {"host": "64MiB", "disk": str(tmp_path)}, num_gpu_blocks_override=30, **options)
        for name in (*right, *right):
            engine.aborted(ASKED["aborted"], after_steps=len(name))
            assert engine.answers(ASKED[name]) == right[name]
            assert restarted or engine.metric("num_preemptions") > 0
        assert sum(engine.cached) > sum(LENGTHS) * 3 // 4
        assert (engine.planner.counts.hits["disk"] > 0) is restarted and engine.planner.counts.hits["host"] > 0
        if restarted:
            assert engine.llm.reset_prefix_cache(reset_connector=True)
            assert engine.answers(ASKED["evicted"]) == right["evicted"] and engine.cached == [0] * len(LENGTHS)
            monkeypatch.setattr(Loads, "submit", lambda loads, job_id, plan: loads._miss(job_id, "gone"))
            assert engine.answers(ASKED["others"]) == right["others"]
            assert engine.answers(ASKED["evicted"]) == right["evicted"]
            assert engine.planner.counts.loads_failed > 0
        assert not engine.planner._states
        engine.close()


def test_recurrent_states_without_prefix_caching_are_refused(falcon: Path) -> None:
    from sidestream_kv.errors import ConfigError

    with pytest.raises(ConfigError, match="mamba_cache_mode is none: give --enable-prefix-caching"):
        Llm(falcon, {"host": "64MiB"}, enable_prefix_caching=False, disable_hybrid_kv_cache_manager=False)


def test_a_wrong_option_of_the_connector_is_one_clear_error(llama: Path) -> None:
    from sidestream_kv.errors import ConfigError

    with pytest.raises(ConfigError, match="SidestreamConnector: no option hots; did you mean host"):
        Llm(llama, {"hots": "64MiB"})


@pytest.mark.parametrize("drafts", [False, True])
def test_stores_begin_after_the_draft_model(drafts: bool) -> None:
    from sidestream_kv.connectors.carrier import Finished
    from sidestream_kv.connectors.vllm import SidestreamConnector

    calls: list[str] = []

    def call(name: str) -> Callable[[], Finished]:
        return lambda: calls.append(name) or Finished()

    connector = SidestreamConnector.__new__(SidestreamConnector)
    connector._carrier = SimpleNamespace(execute=call("execute"), finished=call("finished"))
    connector._vllm_config = SimpleNamespace(speculative_config=object() if drafts else None)
    connector.get_finished(set())
    connector.wait_for_save()
    assert calls == (["finished", "execute"] if drafts else ["execute", "finished", "execute"])


@pytest.fixture(scope="class")
def llm(llama: Path, right: dict[str, Answers], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llm]:
    """An engine that has room for about two of the requests. A process can have one engine at once."""
    engine = Llm(llama, {"host": "64MiB", "disk": str(tmp_path_factory.mktemp("kv"))})
    yield engine
    planner = engine.planner
    assert not planner._states and not planner._promotions and not planner._loads
    engine.close()


class TestOneEngine:
    def test_blocks_on_the_device_are_not_loaded(self, llm: Llm, right: dict[str, Answers]) -> None:
        hits = llm.metric("external_prefix_cache_hits")
        for _ in range(2):
            assert llm.answers(ASKED["again"][:1]) == right["again"][:1]
        assert llm.cached == [96] and llm.metric("external_prefix_cache_hits") == hits

    def test_blocks_that_the_device_has_evicted_are_loaded(self, llm: Llm, right: dict[str, Answers]) -> None:
        preempted = llm.metric("num_preemptions")
        assert llm.answers(ASKED["evicted"]) == right["evicted"]
        assert llm.answers(ASKED["others"]) == right["others"]
        before = [llm.metric(name) for name in ("external_prefix_cache_hits", "sidestream_loaded_bytes")]
        assert llm.answers(ASKED["evicted"]) == right["evicted"]
        after = [llm.metric(name) for name in ("external_prefix_cache_hits", "sidestream_loaded_bytes")]
        assert all(new > old for new, old in zip(after, before, strict=True))
        assert sum(llm.cached) > sum(LENGTHS) * 3 // 4
        assert llm.metric("num_preemptions") > preempted

    def test_blocks_for_which_stores_had_no_room_are_stored_by_later_steps(
        self, llm: Llm, right: dict[str, Answers], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(llm.planner, "_most_held", 2)  # a chunk of the prompt has four blocks
        assert llm.answers(ASKED["held"][2:3]) == right["held"][2:3]
        assert llm.planner.counts.stores_put_off > 0
        assert llm.answers(ASKED["others"]) == right["others"]
        assert llm.answers(ASKED["held"][2:3]) == right["held"][2:3]
        assert llm.cached[0] >= 192  # 64 without the later steps

    def test_requests_share_the_blocks_of_their_prefix(self, llm: Llm, right: dict[str, Answers]) -> None:
        assert llm.answers(ASKED["shared"][:1]) == right["shared"][:1]
        assert llm.answers(ASKED["others"]) == right["others"]
        assert llm.answers(ASKED["shared"]) == right["shared"]
        assert llm.cached[0] == 96 and min(llm.cached) >= 64

    def test_aborted_requests_leave_right_blocks(self, llm: Llm, right: dict[str, Answers]) -> None:
        for steps in (1, 2, 3, 5, 9):
            llm.aborted(ASKED["aborted"], steps)
            llm.aborted(ASKED["evicted"], steps)  # they are being loaded
            assert llm.answers(ASKED["aborted"][steps % 3 :: 3]) == right["aborted"][steps % 3 :: 3]
        assert llm.answers(ASKED["aborted"]) == right["aborted"]

    def test_after_a_reset_everything_is_computed_and_stored_again(self, llm: Llm, right: dict[str, Answers]) -> None:
        assert llm.answers(ASKED["reset"]) == right["reset"]
        assert llm.llm.reset_prefix_cache(reset_connector=True)
        assert llm.answers(ASKED["reset"]) == right["reset"] and llm.cached == [0] * len(LENGTHS)
        assert llm.answers(ASKED["others"]) == right["others"]
        assert llm.answers(ASKED["reset"]) == right["reset"] and min(llm.cached) > 0

    def test_a_reset_while_requests_run(self, llm: Llm, right: dict[str, Answers]) -> None:
        engine = llm.llm.llm_engine
        for asked in prompts("running")[:3]:
            engine.add_request(uuid.uuid4().hex, {"prompt_token_ids": asked}, llm._params())
        for _ in range(6):
            engine.step()
            assert llm.planner.busy
            assert llm.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        while engine.has_unfinished_requests():
            engine.step()
        assert llm.answers(ASKED["reset"]) == right["reset"]

    def test_a_failed_load_is_computed(
        self, llm: Llm, right: dict[str, Answers], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from sidestream_kv.offload.loads import Loads

        assert llm.answers(ASKED["failed"]) == right["failed"]
        assert llm.answers(ASKED["others"]) == right["others"]
        failed = llm.planner.counts.loads_failed
        monkeypatch.setattr(Loads, "submit", lambda loads, job_id, plan: loads._miss(job_id, "gone"))
        assert llm.answers(ASKED["failed"]) == right["failed"]
        assert llm.planner.counts.loads_failed > failed


def test_drafts_and_no_prefix_cache_on_the_device(llama: Path, right: dict[str, Answers]) -> None:
    # At the end, because vLLM 0.32 cannot start another engine in a process that has imported what ngram needs.
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    engine = Llm(llama, {"host": "64MiB"}, enable_prefix_caching=False, speculative_config=drafts)
    for _ in range(2):
        assert engine.answers(ASKED["drafts"]) == right["drafts"]
    assert engine.metric("external_prefix_cache_hits") > 0 and engine.metric("spec_decode_num_draft_tokens") > 0
    engine.close()
