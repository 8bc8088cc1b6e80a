"""The secondary tier for vLLM, and what the connector refuses, against stand-ins of both versions' interfaces. What
needs vLLM: test_real_vllm.py.
"""

from __future__ import annotations

import ast
import logging
import mmap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_stand_ins import (
    CHUNK_BYTES,
    NEW,
    OLD,
    VERSIONS,
    Vllm,
    config_of,
    hf_config,
    installed,
    job,
    model_at,
    spec_of,
)

from sidestream_kv.connectors import vllm_plugin
from sidestream_kv.connectors.checkpoint import fingerprint_of
from sidestream_kv.connectors.planner import Group
from sidestream_kv.connectors.vllm_identity import each_layer_waits
from sidestream_kv.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
HASH = bytes(range(32))


def offload_key(number: int, group: int = 0) -> bytes:
    """vLLM's key: a block hash and the index of a group."""
    return bytes([number]) + HASH[1:] + group.to_bytes(4, "big")


@pytest.fixture(params=VERSIONS)
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with installed(request.param) as found:
        yield found


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with installed(OLD) as found:
        yield found


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with installed(NEW) as found:
        yield found


class Host:
    """Host memory of eight chunks and the tier behind it."""

    def __init__(self, vllm: Vllm, home: Path, *, config: Any = None, spec: Any = None, **options: Any) -> None:
        self.vllm = vllm
        self.memory = mmap.mmap(-1, 8 * CHUNK_BYTES)
        self.view = memoryview(self.memory).cast("B", (8, CHUNK_BYTES))
        config = config or config_of(model_at(home / "model"))
        vllm.current = config
        options = {"disk": str(home / "kv"), **options}
        self.tier = vllm.adapter("vllm_tier").SidestreamTier(
            offloading_spec=spec or spec_of(vllm, config), primary_kv_view=self.view, tier_type="sidestream", **options
        )
        self._jobs = 0

    def fill(self, row: int, value: int) -> None:
        self.memory[row * CHUNK_BYTES : (row + 1) * CHUNK_BYTES] = bytes([value]) * CHUNK_BYTES

    def row(self, row: int) -> bytes:
        return self.memory[row * CHUNK_BYTES : (row + 1) * CHUNK_BYTES]

    def submit(self, method: str, chunks: dict[bytes, int]) -> Any:
        self._jobs += 1
        getattr(self.tier, method)(job(self.vllm, self._jobs, chunks))
        self.tier._store.drain()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self._jobs
        return result

    def store(self, chunks: dict[bytes, int]) -> Any:
        return self.submit("submit_store", chunks)

    def load(self, chunks: dict[bytes, int]) -> Any:
        return self.submit("submit_load", chunks)

    def lookup(self, *keys: bytes) -> list[str]:
        return [self.tier.lookup(key, None).name for key in keys]

    def shutdown(self) -> None:
        self.tier.shutdown()


def test_chunks_come_back_after_a_restart(vllm: Vllm, tmp_path: Path) -> None:
    host = Host(vllm, tmp_path)
    host.fill(3, 33)
    host.fill(5, 55)
    assert host.store({offload_key(1): 3, offload_key(2): 5}).success
    host.shutdown()
    after = Host(vllm, tmp_path)
    assert after.lookup(offload_key(1), offload_key(2), offload_key(3)) == ["HIT", "HIT", "MISS"]
    assert after.load({offload_key(2): 0, offload_key(1): 7}).success
    assert (after.row(0), after.row(7)) == (bytes([55]) * CHUNK_BYTES, bytes([33]) * CHUNK_BYTES)
    after.shutdown()


def test_equal_hashes_of_two_groups_are_two_chunks(vllm: Vllm, tmp_path: Path) -> None:
    host = Host(vllm, tmp_path)
    host.store({offload_key(1, group=0): 0})
    assert host.lookup(offload_key(1, group=0), offload_key(1, group=1)) == ["HIT", "MISS"]
    host.shutdown()


def test_a_chunk_that_is_being_written_is_a_miss_because_host_memory_still_has_it(vllm: Vllm, tmp_path: Path) -> None:
    host = Host(vllm, tmp_path)
    host.tier.submit_store(job(vllm, 1, {offload_key(1): 0}))
    assert host.lookup(offload_key(1)) == ["MISS"]
    host.shutdown()


def damaged(host: Host, tmp_path: Path) -> None:
    host.store({offload_key(1): 0, offload_key(2): 1})
    with (tmp_path / "kv" / "engine-0" / "segment-000000").open("r+b") as file:
        file.write(b"x" * 100)  # the first slot


def test_the_intact_chunks_of_a_load_count_as_loaded(new: Vllm, tmp_path: Path) -> None:
    host = Host(new, tmp_path)
    damaged(host, tmp_path)
    result = host.load({offload_key(1): 2, offload_key(2): 3})
    assert not result.success
    (good,) = result.successful_keys
    assert sorted(host.lookup(good)) == ["HIT"]
    assert result.transfer_bytes == CHUNK_BYTES
    host.shutdown()


def test_a_version_that_cannot_name_chunks_loses_the_whole_load(old: Vllm, tmp_path: Path) -> None:
    host = Host(old, tmp_path)
    damaged(host, tmp_path)
    result = host.load({offload_key(1): 2, offload_key(2): 3})
    assert not result.success
    assert sorted(host.lookup(offload_key(1), offload_key(2))) == ["HIT", "MISS"]
    host.shutdown()


def test_after_a_reset_the_tier_is_off_until_the_next_start(
    vllm: Vllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(vllm, tmp_path)
    host.store({offload_key(1): 0})
    host.tier.drain_jobs()
    assert not host.store({offload_key(2): 0}).success
    assert host.lookup(offload_key(1), offload_key(2)) == ["MISS", "MISS"]
    assert "off until the next start" in caplog.text
    host.shutdown()
    after = Host(vllm, tmp_path)
    assert after.lookup(offload_key(1), offload_key(2)) == ["HIT", "MISS"]
    after.shutdown()


def test_shutdown_lets_go_of_the_engines_memory(vllm: Vllm, tmp_path: Path) -> None:
    host = Host(vllm, tmp_path)
    host.store({offload_key(1): 0})
    host.shutdown()
    host.view.release()
    host.memory.close()


def test_each_data_parallel_engine_has_a_directory(vllm: Vllm, tmp_path: Path) -> None:
    model = model_at(tmp_path / "model")
    hosts = [Host(vllm, tmp_path, config=config_of(model, index=index)) for index in (0, 1)]
    hosts[0].store({offload_key(1): 0})
    assert [host.lookup(offload_key(1)) for host in hosts] == [["HIT"], ["MISS"]]
    for host in hosts:
        host.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capasity": 1}, "secondary tier sidestream: no option capasity; did you mean disk_capacity"),
        ({"disk": None}, r"has one medium, not \[\]: give `disk`, a directory"),
        ({"disk": ""}, r"has one medium, not \[\]: give `disk`, a directory"),
        ({"tiers": {"sqlite": {}}}, "has one medium, not .*another entry of secondary_tiers"),
        ({"disk": None, "tiers": {"sqlite": {}}}, "no tier sqlite"),
        ({"disk_capacity": 5000}, "disk_capacity is 5000 bytes, but one block of this model takes 12288"),
        ({"disk_capacity": "much"}, "disk_capacity is 'much': give a size such as"),
        ({"threads": 0}, "threads is 0: give a whole number from 1 to 64"),
        ({"max_pending": -1}, "max_pending is -1 bytes"),
        ({"load_deadline_s": 0}, "load_deadline_s is 0: give a positive number"),
        ({"disk": "/dev/null"}, "disk directory /dev/null/engine-0 cannot be used: .*give a directory"),
    ],
)
def test_a_wrong_option_is_refused(vllm: Vllm, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Host(vllm, tmp_path, **options)


def test_a_second_engine_on_the_directory_finds_the_chunks_of_the_first(vllm: Vllm, tmp_path: Path) -> None:
    host, other = Host(vllm, tmp_path), Host(vllm, tmp_path)
    host.store({offload_key(1): 0})
    deadline_s = monotonic() + 10
    while other.lookup(offload_key(1)) == ["MISS"] and monotonic() < deadline_s:
        list(other.tier.get_finished_jobs())
    assert other.lookup(offload_key(1)) == ["HIT"]
    host.shutdown()
    other.shutdown()


def draft(path: Path) -> Any:
    return SimpleNamespace(draft_model_config=config_of(path).model_config)


OTHERS: dict[str, Callable[[Vllm, Path], tuple[Any, Any]]] = {
    "weights": lambda v, p: (config_of(model_at(p / "model", weights=b"others")), None),
    "overrides": lambda v, p: (config_of(p / "model", hf=hf_config(rope_parameters={"factor": 4})), None),
    "dtype": lambda v, p: (config_of(p / "model", dtype="float16"), None),
    "hash algorithm": lambda v, p: (config_of(p / "model", algorithm="sha256_cbor"), None),
    "ranks": lambda v, p: (config_of(p / "model", tp=2), None),
    "draft": lambda v, p: (config_of(p / "model", speculative_config=draft(model_at(p / "draft"))), None),
    "groups": lambda v, p: (None, spec_of(v, config_of(p / "model"), layers=("a", "c"))),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_directory_of_another_model_or_layout_is_refused(vllm: Vllm, tmp_path: Path, other: str) -> None:
    Host(vllm, tmp_path).shutdown()
    config, spec = OTHERS[other](vllm, tmp_path)
    with pytest.raises(ConfigError, match="was written by another model or layout"):
        Host(vllm, tmp_path, config=config or config_of(tmp_path / "model"), spec=spec)


def test_a_directory_of_another_kv_layout_is_refused(new: Vllm, tmp_path: Path) -> None:
    Host(new, tmp_path).shutdown()
    with pytest.raises(ConfigError, match=r"kv_layout 'NHD .*\(here 'HND"):
        Host(new, tmp_path, spec=spec_of(new, config_of(tmp_path / "model"), kv_layout="HND"))


def test_a_directory_of_another_attention_backend_is_refused(old: Vllm, tmp_path: Path) -> None:
    Host(old, tmp_path).shutdown()
    with pytest.raises(ConfigError, match="kv_layout"):
        Host(old, tmp_path, config=config_of(tmp_path / "model", attention_config="FlashInfer"))


def test_a_directory_of_another_hash_seed_is_refused_because_nothing_would_be_found(
    vllm: Vllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Host(vllm, tmp_path).shutdown()
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    with pytest.raises(ConfigError, match=r"hash 'sha256 seed=0' \(here 'sha256 seed=1'\)"):
        Host(vllm, tmp_path)


def test_another_transformers_or_a_moved_checkpoint_is_the_same_model(vllm: Vllm, tmp_path: Path) -> None:
    Host(vllm, tmp_path).shutdown()
    moved = model_at(tmp_path / "moved")
    Host(vllm, tmp_path, config=config_of(moved, hf=hf_config(transformers_version="6"))).shutdown()


def test_hashes_that_are_random_in_each_process_are_refused(
    old: Vllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    with pytest.raises(ConfigError, match=r"no block would be found after a restart: set .* PYTHONHASHSEED"):
        Host(old, tmp_path)


def test_a_hash_that_is_not_cryptographic_needs_a_seed(
    new: Vllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model_at(tmp_path / "model"), algorithm="xxhash")
    with pytest.raises(ConfigError, match=r"PYTHONHASHSEED .*--prefix-caching-hash-algo at sha256"):
        Host(new, tmp_path, config=config)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    Host(new, tmp_path, config=config).shutdown()


def test_recurrent_states_need_prefix_caching_and_a_version_that_names_them(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = vllm.adapter("vllm_versions")
    monkeypatch.setattr(versions, "resolve_kv_cache_block_sizes", lambda *arguments: (16, 16))
    spec: Any = type("MambaSpec", (), {"block_size": 16, "mamba_cache_mode": "align"})()
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["mixer"])])
    config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=1))
    if vllm.is_old:
        with pytest.raises(ConfigError, match=r"have complete recurrent states: use vLLM 0\.32"):
            versions.groups_of(config, caches)
        return
    assert versions.groups_of(config, caches) == ([Group(16, 1, window=2, handed=True)], 16)
    spec.mamba_cache_mode = "none"
    with pytest.raises(ConfigError, match="mamba_cache_mode is none: give --enable-prefix-caching"):
        versions.groups_of(config, caches)


def test_scales_that_differ_in_each_process_are_refused(old: Vllm, tmp_path: Path) -> None:
    config = config_of(model_at(tmp_path / "model"), scales=True)
    with pytest.raises(ConfigError, match="calculate_kv_scales gives FP8 KV other scales in each process"):
        Host(old, tmp_path, config=config, fingerprint="llama")


def without_configuration(vllm: Vllm, tmp_path: Path, **options: Any) -> Any:
    spec = spec_of(vllm, config_of(model_at(tmp_path / "model")))
    vllm.current = None
    view = memoryview(bytearray(8 * CHUNK_BYTES)).cast("B", (8, CHUNK_BYTES))
    return vllm.adapter("vllm_tier").SidestreamTier(spec, view, "sidestream", disk=str(tmp_path / "kv"), **options)


def test_a_tier_that_is_not_told_the_configuration_needs_a_fingerprint(new: Vllm, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r'use "kv_connector": "SidestreamOffloadingConnector" .* or give `fingerprint`'
    ):
        without_configuration(new, tmp_path)
    without_configuration(new, tmp_path, fingerprint="llama, factor 4").shutdown()
    with pytest.raises(ConfigError, match=r"fingerprint 'llama, factor 4' \(here 'llama'\)"):
        without_configuration(new, tmp_path, fingerprint="llama")


def test_adapters_need_a_fingerprint(vllm: Vllm, tmp_path: Path) -> None:
    config = config_of(model_at(tmp_path / "model"), lora_config=object())
    with pytest.raises(ConfigError, match="LoRA adapters: give `fingerprint`"):
        Host(vllm, tmp_path, config=config)
    Host(vllm, tmp_path, config=config, fingerprint="llama and adapters of May").shutdown()


@pytest.mark.parametrize(("version", "warns"), [("0.25.0", 1), ("0.25.1", 0), ("0.32.7+cpu", 0), ("0.33.0rc1", 1)])
def test_a_version_outside_the_tried_ones_says_what_was_tried(
    version: str, warns: int, caplog: pytest.LogCaptureFixture
) -> None:
    with installed(version) as vllm:
        vllm.adapter("vllm_versions").warn_if_untried()
    assert sum("was tried with 0.25.1 and 0.32.0" in line for line in caplog.messages) == warns


def test_the_connector_sets_the_configuration_while_its_tiers_are_made(vllm: Vllm) -> None:
    made = vllm.adapter("vllm_connector").SidestreamOffloadingConnector("the configuration", "scheduler", None)
    assert (made.seen, vllm.current) == ("the configuration", None)


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """Our logger as it is before vLLM loads the plugin."""
    ours = logging.getLogger("sidestream_kv")
    before = ours.handlers[:], ours.level, ours.propagate
    ours.handlers = []
    yield ours
    ours.handlers, ours.propagate = before[0], before[2]
    ours.setLevel(before[1])


def test_the_plugin_registers_names_whose_classes_exist_and_may_run_again(vllm: Vllm, log: logging.Logger) -> None:
    vllm_plugin.register()
    vllm_plugin.register()
    for factory, name in ((vllm.tiers, "sidestream"), (vllm.connectors, "SidestreamOffloadingConnector")):
        module, found = factory.known[name]
        assert isinstance(getattr(vllm.adapter(module.rpartition(".")[2]), found), type)
    assert len(log.handlers) == 1


def test_our_log_goes_where_vllms_goes(vllm: Vllm, log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_plugin.register()
    theirs, seen = logging.getLogger("vllm"), list[str]()
    monkeypatch.setattr(theirs, "handle", lambda record: seen.append(record.getMessage()))
    theirs.setLevel(logging.INFO)
    log.getChild("x").info("shown")
    theirs.setLevel(logging.WARNING)
    log.getChild("x").info("hidden")
    theirs.setLevel(logging.NOTSET)
    assert seen == ["shown"]


def test_a_vllm_without_tiers_starts_as_without_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    vllm_plugin.register()


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "packages/sidestream-kv/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {
        "sidestream": f"{vllm_plugin.__name__}:{vllm_plugin.register.__name__}"
    }
    assert not [name for name in project["dependencies"] if name.startswith("vllm")]


# Interfaces for tiers, connectors, metrics and configurations, and four facts: the version, the device's name, whether
# block hashes have a fixed seed, and the block sizes that the scheduler uses.
ALLOWED = {
    "vllm",
    "vllm.config",
    "vllm.distributed",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.distributed.kv_transfer.kv_connector.v1",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.platforms",
    "vllm.v1.core",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.sched",
    "vllm.v1.kv_offload",
    "vllm.v1.kv_offload.base",
    "vllm.v1.kv_offload.tiering.base",
    "vllm.v1.kv_offload.tiering.factory",
    "vllm.v1.metrics.cache_hit_source",
}


def test_the_adapter_imports_only_interfaces_of_vllm() -> None:
    found = set[str]()
    for path in (ROOT / "packages/sidestream-kv/src/sidestream_kv/connectors").glob("vllm*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update(name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
    assert {name for name in found if name.split(".")[0] == "vllm"} == ALLOWED


def test_a_fingerprint_follows_the_revision_in_the_hubs_cache(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    for commit in ("a1", "b2"):
        model_at(cache / "snapshots" / commit, weights=commit.encode())
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a1")
    of = {
        revision: fingerprint_of("org/name", revision=revision, download_dir=str(tmp_path))
        for revision in (None, "a1", "b2")
    }
    assert of[None] == of["a1"] != of["b2"]
    with pytest.raises(ConfigError, match=r"the weights of org/name \(c3\) are not in .*: give `fingerprint`"):
        fingerprint_of("org/name", revision="c3", download_dir=str(tmp_path))


def test_a_fingerprint_sees_large_files_that_differ_in_part(tmp_path: Path) -> None:
    content = bytearray(3 << 20)
    found = set[str]()
    for change in (None, 0, len(content) // 2, -1):
        changed = bytearray(content)
        if change is not None:
            start = change % len(content)
            changed[start : start + (1 << 16)] = b"x" * len(changed[start : start + (1 << 16)])
        found.add(fingerprint_of(str(model_at(tmp_path / "model", weights=bytes(changed)))))
    assert len(found) == 3, "four files, of which the last differs in one byte that no sample sees"


def test_a_directory_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no weights to take a fingerprint of: give `fingerprint`"):
        fingerprint_of(str(tmp_path))


def test_a_step_waits_as_a_whole_if_vllm_does_not_call_for_each_layer() -> None:
    class MLAAttention:
        pass

    class OfAModel(MLAAttention):
        pass

    class DeepseekV32IndexerCache:
        pass

    modules = {"a": MLAAttention(), "b": OfAModel(), "b.indexer": DeepseekV32IndexerCache()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=modules))
    assert each_layer_waits(config, ["a", "b"])
    assert not each_layer_waits(config, modules) and not each_layer_waits(config, ["a", "unknown"])


def test_regions_of_different_sizes_in_the_same_memory_are_refused() -> None:
    raw, blocks = torch.zeros(160, dtype=torch.uint8), 4

    def regions(second: int) -> list[int]:
        """Numbers of bytes, if a second group of layers begins at this byte."""
        tensors = [
            SimpleNamespace(layers=[name], size=160, layer_stride=blocks * page, block_stride=page, offset=offset)
            for name, page, offset in (("a", 16, 0), ("b", 24, second))
        ]
        config = SimpleNamespace(num_blocks=blocks, kv_cache_tensors=tensors)
        return [region.numel() for region in vllm.adapter("vllm_versions").regions_of({"a": raw, "b": raw}, config)[0]]

    with installed(NEW) as vllm:
        assert regions(64) == [64, 96]
        for second in (0, 63):
            with pytest.raises(ConfigError, match="blocks of different sizes in the same memory"):
                regions(second)
