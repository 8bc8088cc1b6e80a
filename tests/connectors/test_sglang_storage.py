"""The storage for SGLang's HiCache, against stand-ins of its interface, and against SGLang's own if its files are there
(`make test-sglang`).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sglang_stand_ins import ADAPTER, Config, Controller, OldConfig, OldestConfig, Pool, Sglang, installed
from stand_ins import in_place_of
from vllm_stand_ins import model_at

from proof import faults
from proof.disk_slots import DiskSlots
from sidestream_kv.connectors.tier_options import TierOptions
from sidestream_kv.errors import ConfigError

PAGES = {"aa": 0, "bb": 1, "cc": 2}
MOVED = {"aa": 5, "bb": 6, "cc": 7}


@pytest.fixture
def sglang(tmp_path: Path) -> Iterator[Sglang]:
    with installed(model_at(tmp_path / "model")) as found:
        yield found


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The tier that is opened next, for faults."""
    opened, real = SimpleNamespace(), TierOptions.open

    def open_faulty(self: TierOptions, *arguments: Any) -> Any:
        opened.tier = faults.FaultyTier(real(self, *arguments))
        return opened.tier

    monkeypatch.setattr(TierOptions, "open", open_faulty)
    return opened


def start(sglang: Sglang, home: Path, *, v1: bool = True, pool: Any = None, config: Any = None, **options: Any) -> Any:
    extra: dict[str, Any] = {"backend_name": "s", "module_path": "m", "class_name": "c", "file_storage_path": "f"}
    extra |= {"interface_v1": int(v1), "disk": str(home / "kv"), "threads": 2, **options}
    config = config or Config()
    config.extra_config = extra
    return Controller(sglang.storage.SidestreamStorage(config, {}), pool or Pool(), zero_copy=v1)


def stored(sglang: Sglang, home: Path, **options: Any) -> Any:
    """A controller that has stored three pages with the values 1, 2, 3."""
    controller = start(sglang, home, **options)
    for value, page in enumerate(PAGES.values(), start=1):
        controller.fill(page, value)
    assert controller.backup(PAGES)
    return controller


@pytest.mark.parametrize("v1", [True, False])
def test_pages_come_back_after_a_restart_and_the_log_says_so(
    sglang: Sglang, tmp_path: Path, v1: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stored(sglang, tmp_path, v1=v1).storage.close()
    after = start(sglang, tmp_path, v1=v1)
    assert after.prefetch({**MOVED, "dd": 4}) == 3
    assert [after.page(page) for page in (5, 6, 7, 4)] == [1, 2, 3, 0]
    after.storage.close()
    assert any(f"{6 if v1 else 3} blocks reused" in line for line in caplog.messages)


def test_single_pages_are_stored_and_found_too(sglang: Sglang, tmp_path: Path) -> None:
    controller = start(sglang, tmp_path, v1=False)
    page = controller.pool.get_dummy_flat_data_page().fill_(7)
    assert controller.storage.set("aa", page)
    assert (controller.storage.exists("aa"), controller.storage.exists("bb")) == (True, False)
    assert controller.storage.get("aa", page.clone().zero_()).tolist() == page.tolist()
    controller.storage.close()


# Stores pages until it is killed, and prints a page's number once SGLang would count it as stored.
WRITER = """
import sys
from pathlib import Path
from sglang_stand_ins import installed
from test_sglang_storage import start

home = Path(sys.argv[1])
with installed(home / "model") as sglang:
    controller, number = start(sglang, home), 0
    while True:
        controller.fill(0, number % 200)
        assert controller.backup({f"{number:x}": 0})
        print(number, flush=True)
        number += 1
"""


def test_every_page_that_counted_as_stored_survives_kill_9(sglang: Sglang, tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        numbers = [int(process.stdout.readline()) for _ in range(8)]
        process.send_signal(signal.SIGKILL)
    after = start(sglang, tmp_path)
    assert after.prefetch({f"{number:x}": number for number in numbers}) == 8
    assert [after.page(number) for number in numbers] == numbers
    after.storage.close()


@pytest.mark.parametrize("v1", [True, False])
def test_a_damaged_page_and_those_after_it_are_misses(sglang: Sglang, tmp_path: Path, v1: bool) -> None:
    controller = stored(sglang, tmp_path, v1=v1)
    chunks = importlib.import_module("sidestream_kv.connectors.chunks")
    (directory,) = (tmp_path / "kv").iterdir()
    DiskSlots(directory).flip(chunks.key_of(b"bb/0"))
    assert controller.prefetch(MOVED) == 1
    assert controller.page(5) == 1
    assert controller.storage.batch_exists(["bb"]) == 0
    controller.storage.close()


def test_pages_are_not_stored_on_a_full_disk_and_nothing_is_raised(
    sglang: Sglang, tmp_path: Path, tier: SimpleNamespace
) -> None:
    controller = start(sglang, tmp_path)
    tier.tier.on_write = faults.full
    assert not controller.backup(PAGES)
    assert controller.prefetch(MOVED) == 0
    controller.storage.close()


def test_each_rank_has_its_own_directory(sglang: Sglang, tmp_path: Path) -> None:
    ranks = [Config(tp_rank=rank, tp_size=2) for rank in (0, 1)]
    ranks.append(Config(tp_rank=0, tp_size=2, pp_rank=1, pp_size=2, dp_rank=3))
    controllers = [stored(sglang, tmp_path, config=ranks[0])]
    controllers += [start(sglang, tmp_path, config=config) for config in ranks[1:]]
    sglang.replica = 1
    controllers.append(start(sglang, tmp_path))
    assert [controller.prefetch(MOVED) for controller in controllers] == [3, 0, 0, 0]
    names = ["tp-0-of-1.replica-1", "tp-0-of-2", "tp-0-of-2.pp-1-of-2.dp-3", "tp-1-of-2"]
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == names
    for controller in controllers:
        controller.storage.close()


def test_every_rank_of_an_mla_model_writes_its_own_pages(sglang: Sglang, tmp_path: Path) -> None:
    config = Config(tp_rank=1, tp_size=2, is_mla_model=True)
    start(sglang, tmp_path, config=config).storage.close()
    assert config.is_storage_writer


def test_versions_that_tell_too_little_are_refused(sglang: Sglang, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 0\.5\.21 or later"):
        start(sglang, tmp_path, config=OldestConfig())
    with pytest.raises(ConfigError, match="lets only the first of 2 ranks of an MLA model write"):
        start(sglang, tmp_path, config=OldConfig(tp_size=2, is_mla_model=True))


OTHERS: dict[str, Callable[[Sglang, Path], Any]] = {
    "weights": lambda sglang, home: model_at(home / "model", weights=b"others"),
    "overrides": lambda sglang, home: vars(sglang.model).update(json_model_override_args='{"rope_theta": 7}'),
    "kv dtype": lambda sglang, home: vars(sglang.model).update(kv_cache_dtype="fp8_e5m2"),
    "host layout": lambda sglang, home: {"pool": Pool("page_first_direct")},
    "interface": lambda sglang, home: {"v1": False},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_directory_of_another_model_or_layout_is_refused(sglang: Sglang, tmp_path: Path, other: str) -> None:
    start(sglang, tmp_path).storage.close()
    changed = OTHERS[other](sglang, tmp_path)
    with pytest.raises(ConfigError, match="was written by another model or layout"):
        start(sglang, tmp_path, **(changed if isinstance(changed, dict) else {}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_capasity": 1}, "no option disk_capasity; did you mean disk_capacity"),
        ({"disk": None}, "a tier has one medium, not"),
        ({"pool": Pool("layer_first")}, "a page must be contiguous, but --hicache-mem-layout is layer_first"),
    ],
)
def test_a_wrong_option_is_refused(sglang: Sglang, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(sglang, tmp_path, **options)


def test_weights_that_cannot_be_recognised_need_a_fingerprint(sglang: Sglang, tmp_path: Path) -> None:
    sglang.model.model_path = "nowhere/model"
    with pytest.raises(ConfigError, match="give `fingerprint`"):
        start(sglang, tmp_path)
    start(sglang, tmp_path, fingerprint="llama").storage.close()


def test_lora_needs_a_fingerprint(sglang: Sglang, tmp_path: Path) -> None:
    sglang.lora.enable_lora = True
    with pytest.raises(ConfigError, match="give `fingerprint`, and another one whenever an adapter changes"):
        start(sglang, tmp_path)


def test_a_model_with_other_state_is_refused_and_its_directory_is_free_again(sglang: Sglang, tmp_path: Path) -> None:
    controller = start(sglang, tmp_path)
    controller.storage.register_mem_host_pool_v2(controller.pool, "kv")
    with pytest.raises(ConfigError, match="has a pool mamba besides its KV"):
        controller.storage.register_mem_host_pool_v2(Pool(), "mamba")
    start(sglang, tmp_path).storage.close()


def test_after_a_flush_the_storage_is_off_unless_weights_never_change(
    sglang: Sglang, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    controller = stored(sglang, tmp_path)
    controller.pool.clear()
    assert not controller.backup({"dd": 0})
    assert controller.prefetch(MOVED) == 0
    assert "off until the next start, because SGLang flushed its cache" in caplog.text
    controller.storage.close()
    after = start(sglang, tmp_path, keep_after_flush=True)
    after.pool.clear()
    assert after.prefetch({**MOVED, "dd": 0}) == 3
    after.storage.close()


def test_cleared_pages_are_misses(sglang: Sglang, tmp_path: Path) -> None:
    controller = stored(sglang, tmp_path)
    controller.storage.clear()
    assert controller.prefetch(MOVED) == 0
    controller.storage.close()
    controller.storage.close()


def test_a_failure_is_a_miss_and_is_logged(sglang: Sglang, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    controller = start(sglang, tmp_path)
    controller.storage.close()
    assert not controller.backup(PAGES)
    assert controller.prefetch(MOVED) == 0
    assert "a call failed" in caplog.text


def test_a_page_is_copied_so_that_a_slow_write_stores_what_it_was(
    sglang: Sglang, tmp_path: Path, tier: SimpleNamespace, gate: threading.Event
) -> None:
    controller = start(sglang, tmp_path, load_deadline_s=0.05)
    controller.fill(0, 1)
    tier.tier.on_write = faults.slow(gate)
    assert not controller.backup({"aa": 0})
    controller.fill(0, 2)
    gate.set()
    controller.storage.close()
    after = start(sglang, tmp_path)
    assert after.prefetch({"aa": 3}) == 1
    assert after.page(3) == 1
    after.storage.close()


def test_a_read_into_a_tensor_is_a_miss_after_its_deadline(
    sglang: Sglang, tmp_path: Path, tier: SimpleNamespace, gate: threading.Event
) -> None:
    stored(sglang, tmp_path, v1=False).storage.close()
    controller, ended = start(sglang, tmp_path, v1=False, load_deadline_s=0.05), threading.Event()

    def hanging(proceed: Callable[[], None], block: Any) -> None:
        try:
            faults.slow(gate)(proceed, block)
        finally:
            ended.set()

    tier.tier.on_read = hanging
    assert controller.prefetch(MOVED) == 0
    assert not ended.is_set()
    assert controller.storage.batch_exists(["aa"]) == 0  # so that no other request waits
    gate.set()
    controller.storage.close()


def test_a_read_into_host_memory_that_has_begun_is_waited_for(
    sglang: Sglang, tmp_path: Path, tier: SimpleNamespace, gate: threading.Event
) -> None:
    stored(sglang, tmp_path).storage.close()
    controller = start(sglang, tmp_path, load_deadline_s=0.05)
    tier.tier.on_read = faults.slow(gate)
    results = list[int]()
    prefetch = threading.Thread(target=lambda: results.append(controller.prefetch(MOVED)))
    prefetch.start()
    while controller.storage.batch_exists(["aa"]) and prefetch.is_alive():  # until the reads are overdue
        prefetch.join(timeout=0.01)
    prefetch.join(timeout=0.1)
    assert prefetch.is_alive()  # two reads have begun; the others are given up
    gate.set()
    prefetch.join(timeout=30)
    assert results == [1]
    controller.storage.close()


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's own, from its files without what they import at their top: its interface needs none of its dependencies.
    The process has no server, whose arguments and ranks its runtime could tell.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no SGLang: make test-sglang")
    package = ModuleType("sglang")
    package.__path__ = list(spec.submodule_search_locations)
    with in_place_of("sglang", {"sglang": package}, ADAPTER):
        runtime = importlib.import_module("sglang.srt.runtime_context")
        server = Sglang(SimpleNamespace(kv_cache_dtype="auto"), SimpleNamespace(enable_lora=False))
        for name, told in server.runtime().items():
            monkeypatch.setattr(runtime, name, told)
        yield importlib.import_module("sglang.srt.mem_cache.storage.backend_factory")


@pytest.mark.parametrize("v1", [True, False])
def test_sglangs_own_factory_makes_the_storage_by_its_interface(factory: Any, tmp_path: Path, v1: bool) -> None:
    extra = {"backend_name": "sidestream", "module_path": "sidestream_kv.connectors.sglang_storage"}
    extra |= {"class_name": "SidestreamStorage", "disk": str(tmp_path / "kv"), "fingerprint": "w"}
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
    }
    values |= {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "m"}

    def started() -> Controller:
        config = factory.HiCacheStorageConfig(**values, extra_config={**extra, "interface_v1": int(v1)})
        pool = Pool()
        storage = factory.StorageBackendFactory.create_backend("dynamic", config, pool)
        return Controller(storage, pool, zero_copy=v1)

    before = started()
    before.fill(0, 1)
    assert before.backup({"aa": 0})
    before.storage.close()
    after = started()
    assert after.prefetch({"aa": 5, "bb": 6}) == 1
    assert after.page(5) == 1
    after.storage.close()
