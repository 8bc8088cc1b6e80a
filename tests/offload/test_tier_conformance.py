"""The disk tier and the example's tier against the contract, and the example's tier in an engine. tests/offload/
test_shared_stores.py has the tiers that several engines share.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import sidestream_kv
from proof.disk_slots import DiskSlots
from proof.toy import ToyModel
from sidestream.config import EngineConfig, SamplingParams
from sidestream.engine import Engine, build_engine
from sidestream.errors import ConfigError
from sidestream.types import CachedTokens, Delta
from sidestream_kv.config import OffloadConfig
from sidestream_kv.offload.tiers import stack
from sidestream_kv.offload.tiers.base import Entry, PersistentTier, TierContext
from sidestream_kv.offload.tiers.disk import DiskTier, entry_bytes
from sidestream_order.tier_conformance import TierConformance

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_tier.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_tier", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


own_tier = load_example()


class TestDiskTier(TierConformance):
    def open(self, context: TierContext, *, capacity_blocks: int) -> PersistentTier:
        capacity = capacity_blocks * entry_bytes(context.layout)
        return DiskTier.open(
            self.directory / "kv", layout=context.layout, fingerprint=context.fingerprint, capacity_bytes=capacity
        )

    def damage(self, tier: PersistentTier, entry: Entry) -> None:
        DiskSlots(self.directory / "kv").flip(entry.key)

    def lose(self, tier: PersistentTier) -> bool:
        shutil.rmtree(self.directory / "kv")
        return True


class TestOwnTier(TierConformance):
    def open(self, context: TierContext, *, capacity_blocks: int) -> PersistentTier:
        capacity = capacity_blocks * context.layout.block_bytes
        tier: PersistentTier = own_tier.SqliteTier(self.directory / "kv.db", context, capacity_bytes=capacity)
        return tier

    def damage(self, tier: PersistentTier, entry: Entry) -> None:
        db = tier._db  # type: ignore[attr-defined]
        with db:
            (data,) = db.execute("SELECT data FROM block WHERE serial = ?", (entry.serial,)).fetchone()
            db.execute("UPDATE block SET data = ? WHERE serial = ?", (bytes([data[0] ^ 1]) + data[1:], entry.serial))


def ask(engine: Engine, prompt: list[int]) -> tuple[list[int], CachedTokens]:
    """The tokens of an answer, and where its prompt was found."""
    deltas: queue.Queue[Delta] = queue.Queue()
    engine.submit(prompt, SamplingParams(max_tokens=6), deltas.put)
    tokens: list[int] = []
    while True:
        delta = deltas.get(timeout=30)
        tokens.extend(delta.token_ids)
        if delta.finish_reason is not None:
            return tokens, delta.cached


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's tier is known, after the tiers of the package."""
    monkeypatch.setattr(stack, "_KINDS", list(stack._KINDS))
    stack.register(own_tier.KIND)
    yield


@pytest.mark.usefixtures("registered")
def test_registered_tier_serves_a_second_engine_and_is_counted(tmp_path: Path) -> None:
    """The whole of what a tier touches: its own module, and one call of `register` (or one row in the registry)."""
    prompt = list(range(1, 33))
    answers, found = [], []
    for _ in range(2):
        model = ToyModel()
        offload = OffloadConfig(host=32 * model.layout.block_bytes, tiers={"sqlite": {"path": tmp_path / "kv.db"}})
        sizes = {"block_tokens": model.layout.block_tokens, "chunk_tokens": 16, "token_budget": 24, "max_running": 4}
        config = EngineConfig(kv_memory=24 * model.layout.block_bytes, offload=offload, compute_threads=1, **sizes)
        engine = build_engine(model, config)
        assert engine.parts.costs is not None
        engine.parts.costs.saw_prefill = lambda *_: None  # type: ignore[method-assign]
        try:
            tokens, cached = ask(engine, prompt)
            assert engine.flush(timeout_s=30)
        finally:
            engine.close()
        answers.append(tokens)
        found.append(dict(cached.by_tier))
    assert answers[0] == answers[1] == model.expected(prompt, 6)
    assert found[0] == {}
    assert found[1].keys() == {"sqlite"}
    value = engine.parts.metrics.value
    assert value("cached_tokens_total", "sqlite") == found[1]["sqlite"]
    assert value("transfers_total", "sqlite-read", "done") > 0
    assert value("tier_blocks", "sqlite") > 0
    assert stack.names()[-1] == "sqlite"


def test_adding_a_tier_changes_two_files(tmp_path: Path) -> None:
    """The example as a module of a copy of the package, and its row: a process that uses the copy knows the tier."""
    original = Path(sidestream_kv.__file__).parent
    package = tmp_path / "sidestream_kv"
    shutil.copytree(original, package, ignore=shutil.ignore_patterns("__pycache__", "data"))
    source = EXAMPLE.read_text(encoding="utf-8")
    source = source[: source.index("def main(")].replace("from sidestream_kv.offload.tiers.stack import register\n", "")
    (package / "offload/tiers/sqlite.py").write_text(source, encoding="utf-8")
    rows = package / "offload/tiers/stack.py"
    text = rows.read_text(encoding="utf-8").replace("import disk, ", "import disk, sqlite, ")
    rows.write_text(text.replace("[disk.KIND, ", "[disk.KIND, sqlite.KIND, "), encoding="utf-8")
    changed = sorted(
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if not (original / path.relative_to(package)).exists()
        or path.read_bytes() != (original / path.relative_to(package)).read_bytes()
    )
    assert changed == ["offload/tiers/sqlite.py", "offload/tiers/stack.py"]
    program = """
import sys
from sidestream_kv.config import OffloadConfig
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.offload.tiers.base import TierContext
from sidestream_kv.offload.tiers.stack import names, open_tiers
layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, block_tokens=8, dtype="float32")
config = OffloadConfig(tiers={"sqlite": {"path": sys.argv[1]}})
print(*names(), *open_tiers(config, TierContext(layout, "model")))
assert "torch" not in sys.modules
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "kv.db")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    *known, opened = ran.stdout.split()
    assert known[:4] == ["device", "host", "disk", "sqlite"], ran.stderr
    assert opened == "sqlite"


def test_unknown_tier_is_refused_with_the_nearest_known_name(tmp_path: Path) -> None:
    context = TierContext(ToyModel().layout, "toy")
    with pytest.raises(ConfigError, match="no tier dsk; did you mean disk"):
        stack.open_tiers(OffloadConfig(tiers={"dsk": {}}), context)


@pytest.mark.usefixtures("registered")
def test_a_tier_name_cannot_be_registered_twice() -> None:
    with pytest.raises(ConfigError, match="a tier sqlite is known already"):
        stack.register(own_tier.KIND)


@pytest.mark.usefixtures("registered")
def test_a_tier_that_cannot_be_opened_closes_the_tiers_opened_before(tmp_path: Path) -> None:
    (tmp_path / "kv.db").write_text("no database")
    context = TierContext(ToyModel().layout, "toy")
    config = OffloadConfig(disk=tmp_path / "disk", tiers={"sqlite": {"path": tmp_path / "kv.db"}})
    with pytest.raises(ConfigError, match=r"kv\.db"):
        stack.open_tiers(config, context)
    stack.open_tiers(OffloadConfig(disk=tmp_path / "disk"), context)["disk"].close()  # its lock is free
