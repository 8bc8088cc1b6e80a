"""Small stand-ins of vLLM's interface of tiers, in the shapes of 0.25.1 and 0.32, and of the configurations that a tier
is told. `installed` puts one in place of vLLM; the adapter is then imported anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from stand_ins import in_place_of, modules_of

VERSIONS = ("0.25.1", "0.32.0")
OLD, NEW = VERSIONS
ADAPTER = ("vllm_versions", "vllm_tier", "vllm_connector")
CHUNK_BYTES = 8192


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    RETRY = enum.auto()


class Medium(enum.Enum):
    STORAGE = "STORAGE"


@dataclasses.dataclass
class OldResult:
    job_id: int
    success: bool


@dataclasses.dataclass
class NewResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class OldManager:
    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str) -> None:
        self.tier_type = tier_type


class NewManager:
    def __init__(
        self, offloading_spec: Any, view: memoryview, tier_type: str, backpressure_detector: Any = None
    ) -> None:
        self.tier_type = tier_type
        self.bp_detector = backpressure_detector


class Factory:
    """Both registries of vLLM, which raise ValueError for a name that is taken."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, str]] = {}

    def register(self, name: str, module_path: str, class_name: str) -> None:
        if name in self.known:
            raise ValueError(f"{name!r} is already registered.")
        self.known[name] = (module_path, class_name)

    register_tier = register_connector = register


@dataclasses.dataclass
class Vllm:
    """A fake vLLM of one version. `current` is the configuration that is set while a connector is made."""

    version: str
    tiers: Factory = dataclasses.field(default_factory=Factory)
    connectors: Factory = dataclasses.field(default_factory=Factory)
    current: Any = None

    @property
    def is_old(self) -> bool:
        return self.version == OLD

    def adapter(self, name: str) -> Any:
        return importlib.import_module(f"sidestream_kv.connectors.{name}")

    def modules(self) -> dict[str, ModuleType]:
        """The modules that the adapter imports, by name."""
        state = self

        @contextlib.contextmanager
        def set_current_vllm_config(config: Any) -> Iterator[None]:
            before, state.current = state.current, config
            try:
                yield
            finally:
                state.current = before

        class OffloadingConnector:
            def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
                self.seen = state.current

        offload = {"LookupResult": LookupResult, "RequestOffloadingContext": SimpleNamespace}
        named: dict[str, dict[str, Any]] = {
            "vllm": {"__version__": self.version},
            "vllm.config": {
                "set_current_vllm_config": set_current_vllm_config,
                "get_current_vllm_config_or_none": lambda: state.current,
            },
            "vllm.platforms": {"current_platform": SimpleNamespace(get_device_name=lambda: "a GPU")},
            "vllm.v1.core": {},
            "vllm.v1.core.kv_cache_utils": {
                "resolve_kv_cache_block_sizes": None,
                **({} if self.is_old else {"DEFAULT_NONE_HASH_SEED": "seed"}),
            },
            "vllm.v1.core.sched.output": {} if self.is_old else {"KVConnectorBlockState": object},
            "vllm.v1.kv_offload": {},
            "vllm.v1.kv_offload.base": offload if self.is_old else {**offload, "Medium": Medium},
            "vllm.v1.kv_offload.tiering.base": {
                "JobResult": OldResult if self.is_old else NewResult,
                "SecondaryTierManager": OldManager if self.is_old else NewManager,
            },
            "vllm.v1.kv_offload.tiering.factory": {"SecondaryTierFactory": self.tiers},
            "vllm.distributed.kv_events": {},
            "vllm.distributed.kv_transfer.kv_connector.v1.base": {},
            "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": self.connectors},
            "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": {
                "OffloadingConnector": OffloadingConnector
            },
        }
        return modules_of(named)


@contextlib.contextmanager
def installed(version: str) -> Iterator[Vllm]:
    """This version in place of vLLM, for the adapter's modules, which are forgotten before and after."""
    vllm = Vllm(version)
    with in_place_of("vllm", vllm.modules(), ADAPTER):
        yield vllm


def model_at(directory: Path, *, weights: bytes = b"weights", config: dict[str, Any] | None = None) -> Path:
    """A directory that looks like a checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def hf_config(**values: Any) -> Any:
    return SimpleNamespace(to_json_string=lambda: json.dumps({"transformers_version": "5", "layers": 2, **values}))


def config_of(model: Path, *, algorithm: str = "sha256", dtype: str = "bfloat16", hf: Any = None, **parts: Any) -> Any:
    """Those attributes of a VllmConfig that the adapter reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model), revision=None, hf_config=hf or hf_config(), dtype=dtype, quantization=None
        ),
        load_config=SimpleNamespace(download_dir=None, load_format="auto"),
        lora_config=parts.get("lora_config"),
        speculative_config=parts.get("speculative_config"),
        attention_config=parts.get("attention_config", "any backend"),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=algorithm, cache_dtype="auto", calculate_kv_scales=parts.get("scales", False)
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=parts.get("tp", 1),
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_index=parts.get("index", 0),
        ),
    )


def spec_of(vllm: Vllm, config: Any, *, layers: tuple[str, ...] = ("a", "b"), kv_layout: str = "NHD") -> Any:
    """An OffloadingSpec of one group."""
    parallel = config.parallel_config
    if vllm.is_old:
        group = SimpleNamespace(kv_cache_spec="full attention, 16 tokens", layer_names=list(layers))
        return SimpleNamespace(
            vllm_config=config,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
            gpu_block_size=(16,),
            hash_block_size=16,
            block_size_factor=1,
        )
    return SimpleNamespace(
        config=SimpleNamespace(
            groups=(SimpleNamespace(tokens_per_block=16, layer_names=layers),),
            model=SimpleNamespace(name=config.model_config.model, dtype=config.model_config.dtype),
            cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=SimpleNamespace(
                tp_size=parallel.tensor_parallel_size,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=parallel.data_parallel_index,
            ),
            kv_cache_layout=kv_layout,
            canonical_layout=False,
            replicated_layout=False,
        )
    )


def job(vllm: Vllm, job_id: int, chunks: dict[bytes, int]) -> Any:
    """A transfer of these keys to or from these rows of host memory."""
    name = "block_ids" if vllm.is_old else "chunk_ids"
    return SimpleNamespace(job_id=job_id, keys=list(chunks), **{name: list(chunks.values())})
