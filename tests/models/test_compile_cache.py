"""A start reuses what an earlier start compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir, triton_cache_dir

from sidestream.models.compile_cache import use_compile_cache

LAYERS, KERNELS, HOME = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME"
CACHE = "SIDESTREAM_CACHE"


@pytest.fixture(autouse=True)
def environment(tmp_path: Path) -> Iterator[None]:
    """As it was, whatever was set."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (LAYERS, KERNELS, HOME):
            patch.setenv(name, "")  # to be put back
            del os.environ[name]
        patch.setenv(CACHE, str(tmp_path / "ours"))
        yield


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return tmp_path / "ours" / "compiled"


def test_compiled_layers_and_kernels_are_cached_in_one_directory(ours: Path, tmp_path: Path) -> None:
    use_compile_cache()
    assert (ours / "triton").is_dir()
    assert (cache_dir(), triton_cache_dir(0)) == (str(ours), str(ours / "triton"))
    os.environ[CACHE] = str(tmp_path / "other")
    use_compile_cache()
    assert (os.environ[LAYERS], os.environ[KERNELS]) == (str(ours), str(ours / "triton"))
    assert not (tmp_path / "other").exists()


def test_torchs_default_cache_directory_does_not_count_as_chosen(ours: Path) -> None:
    assert cache_dir() == os.environ[LAYERS] == default_cache_dir()
    os.environ[KERNELS] = triton_cache_dir(0)  # as torch does once it has compiled a kernel
    use_compile_cache()
    assert (os.environ[LAYERS], os.environ[KERNELS]) == (str(ours), str(ours / "triton"))


def test_empty_cache_variables_do_not_count_as_chosen(ours: Path) -> None:
    os.environ[LAYERS] = os.environ[KERNELS] = os.environ[HOME] = ""
    use_compile_cache()
    assert (os.environ[LAYERS], os.environ[KERNELS]) == (str(ours), str(ours / "triton"))


def test_a_chosen_cache_directory_is_kept(ours: Path, tmp_path: Path) -> None:
    os.environ[LAYERS] = str(tmp_path / "layers")
    use_compile_cache()
    assert (os.environ[LAYERS], os.environ[KERNELS]) == (str(tmp_path / "layers"), str(tmp_path / "layers" / "triton"))
    del os.environ[LAYERS]
    os.environ[KERNELS] = str(tmp_path / "kernels")
    use_compile_cache()
    assert (os.environ[LAYERS], os.environ[KERNELS]) == (str(ours), str(tmp_path / "kernels"))


def test_a_chosen_triton_home_is_kept(ours: Path, tmp_path: Path) -> None:
    os.environ[HOME] = str(tmp_path)
    use_compile_cache()
    assert (os.environ[LAYERS], os.environ[KERNELS]) == (str(ours), str(tmp_path / ".triton" / "cache"))


@pytest.mark.parametrize("name", [LAYERS, CACHE])
def test_relative_cache_directories_survive_a_change_of_directory(name: str, tmp_path: Path) -> None:
    os.environ[name] = "here"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        use_compile_cache()
    assert os.environ[KERNELS] == str(tmp_path / "here" / ("triton" if name == LAYERS else "compiled/triton"))
    assert os.environ[LAYERS] == ("here" if name == LAYERS else str(tmp_path / "here" / "compiled"))


def test_an_unwritable_cache_leaves_the_variables_unset(ours: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours.parent.touch()
    caplog.set_level("INFO", logger="sidestream.models.compile_cache")
    use_compile_cache()
    assert LAYERS not in os.environ
    assert KERNELS not in os.environ
    assert caplog.messages == [f"compiled code is not cached in {ours}: Not a directory"]


@pytest.mark.parametrize("chosen", [True, False])
def test_without_a_home_kernels_are_cached_beside_compiled_layers(
    chosen: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    caplog.set_level("INFO", logger="sidestream.models.compile_cache")
    if chosen:
        os.environ[LAYERS] = str(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(CACHE)
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.setattr(Path, "home", homeless)
        use_compile_cache()
    expected = (str(tmp_path), str(tmp_path / "triton")) if chosen else (None, None)
    assert (os.environ.get(LAYERS), os.environ.get(KERNELS)) == expected
    assert caplog.messages == ([] if chosen else ["compiled code is not cached: Could not determine home directory."])


@pytest.mark.parametrize("chosen", [True, False])
def test_a_read_only_cache_directory_is_not_used(
    chosen: bool, ours: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="sidestream.models.compile_cache")
    place = tmp_path / "image" if chosen else ours
    (place / "triton").mkdir(parents=True)
    if chosen:  # filled before, in an image
        os.environ[LAYERS] = str(place)
    with pytest.MonkeyPatch.context() as patch:  # root may write everywhere
        patch.setattr(os, "access", lambda path, mode: False)
        use_compile_cache()
    assert os.environ.get(LAYERS) == (str(place) if chosen else None)
    assert KERNELS not in os.environ
    assert caplog.messages == [
        f"compiled code is not cached in {place / 'triton' if chosen else place}: it cannot be written"
    ]
