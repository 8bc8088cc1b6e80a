"""What one start compiled, the next one finds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir, triton_cache_dir

from sidestream.models.kept import keep_compiled

LAYERS, KERNELS, HOME = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME"


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """As it was, whatever was set."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (LAYERS, KERNELS, HOME):
            patch.setenv(name, "")  # to be put back
            del os.environ[name]
        yield


def test_layers_and_kernels_are_kept_together_from_the_first_kernel_on(tmp_path: Path) -> None:
    place = tmp_path / "some" / "compiled"
    keep_compiled(place)
    assert (place / "triton").is_dir()
    assert (cache_dir(), triton_cache_dir(0)) == (str(place), str(place / "triton"))
    keep_compiled(tmp_path / "other")
    assert (os.environ[LAYERS], os.environ[KERNELS]) == (str(place), str(place / "triton"))
    assert not (tmp_path / "other").exists()


def test_what_torch_looked_up_itself_was_nobodys_choice(tmp_path: Path) -> None:
    assert cache_dir() == os.environ[LAYERS] == default_cache_dir()
    os.environ[KERNELS] = triton_cache_dir(0)  # as torch does once it has compiled a kernel
    keep_compiled(tmp_path)
    assert (os.environ[LAYERS], os.environ[KERNELS]) == (str(tmp_path), str(tmp_path / "triton"))


def test_nothing_is_no_choice(tmp_path: Path) -> None:
    os.environ[LAYERS] = os.environ[KERNELS] = os.environ[HOME] = ""
    keep_compiled(tmp_path)
    assert (os.environ[LAYERS], os.environ[KERNELS]) == (str(tmp_path), str(tmp_path / "triton"))


def test_a_place_that_somebody_chose_stays(tmp_path: Path) -> None:
    os.environ[LAYERS] = str(tmp_path / "layers")
    keep_compiled(tmp_path / "ours")
    assert (os.environ[LAYERS], os.environ[KERNELS]) == (str(tmp_path / "layers"), str(tmp_path / "layers" / "triton"))
    del os.environ[LAYERS]
    os.environ[KERNELS] = str(tmp_path / "kernels")
    keep_compiled(tmp_path / "ours")
    assert (os.environ[LAYERS], os.environ[KERNELS]) == (str(tmp_path / "ours"), str(tmp_path / "kernels"))


def test_tritons_home_is_a_choice_that_the_compiler_does_not_undo(tmp_path: Path) -> None:
    os.environ[HOME] = str(tmp_path)
    keep_compiled(tmp_path / "ours")
    assert (os.environ[LAYERS], os.environ[KERNELS]) == (str(tmp_path / "ours"), str(tmp_path / ".triton" / "cache"))


def test_places_hold_whatever_directory_the_process_goes_to(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        os.environ[LAYERS] = "layers"
        keep_compiled(Path("ours"))
    assert os.environ[KERNELS] == str(tmp_path / "layers" / "triton")
    del os.environ[LAYERS]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        keep_compiled(Path("ours"))
    assert os.environ[LAYERS] == str(tmp_path / "ours")


def test_where_nothing_can_be_kept_all_stays_where_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    caplog.set_level("INFO", logger="sidestream.models.kept")
    keep_compiled(tmp_path / "file" / "compiled")
    assert LAYERS not in os.environ
    assert KERNELS not in os.environ
    assert caplog.messages == [
        f"what is compiled is not kept in {tmp_path / 'file' / 'compiled' / part}: Not a directory" for part in ("", "triton")
    ]


@pytest.mark.parametrize("chosen", [True, False])
def test_a_place_that_can_only_be_read_is_not_written_to(chosen: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="sidestream.models.kept")
    (tmp_path / "triton").mkdir()
    if chosen:  # filled before, in an image
        os.environ[LAYERS] = str(tmp_path)
    with pytest.MonkeyPatch.context() as patch:  # root may write everywhere
        patch.setattr(os, "access", lambda path, mode: False)
        keep_compiled(tmp_path)
    assert os.environ.get(LAYERS) == (str(tmp_path) if chosen else None)
    assert KERNELS not in os.environ
    assert f"what is compiled is not kept in {tmp_path / 'triton'}: it cannot be written" in caplog.messages
