"""The on-disk cache of compiled code: decoder layers compiled by Inductor, and our own kernels compiled by Triton.
Later starts find the code there.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from sidestream.models.catalog import cache_root

logger = logging.getLogger(__name__)

# Environment variables of Inductor and Triton. Triton's default cache lies below TRITON_HOME.
_INDUCTOR_DIR = "TORCHINDUCTOR_CACHE_DIR"
_TRITON_DIR = "TRITON_CACHE_DIR"
_TRITON_HOME = "TRITON_HOME"


def use_compile_cache() -> None:
    """Set the cache directories of this process. For layers, it is `compiled` below `cache_root()`; for kernels, it is
    `triton` below the layers' directory.

    A directory that the user chose (`TORCHINDUCTOR_CACHE_DIR`; `TRITON_CACHE_DIR`, `TRITON_HOME`) is not changed. If
    our directory cannot be written, the defaults of torch and Triton stay; a container loses those directories when it
    ends. Idempotent.

    Call before the first kernel launch. Inductor changes Triton's directory, but only when Inductor compiles. So a
    start that finds all layers compiled would look for kernels in another directory than the start that compiled them.
    """
    if not _is_chosen(_INDUCTOR_DIR):
        try:
            _set_directory(_INDUCTOR_DIR, cache_root() / "compiled")
        except RuntimeError as error:  # no home directory
            logger.info("compiled code is not cached: %s", error)
    if not _is_chosen(_TRITON_DIR):
        if home := os.environ.get(_TRITON_HOME):
            _set_directory(_TRITON_DIR, Path(home) / ".triton" / "cache")
        elif layers := os.environ.get(_INDUCTOR_DIR):
            _set_directory(_TRITON_DIR, Path(layers) / "triton")


def _is_chosen(name: str) -> bool:
    """Whether the user set this variable. torch also sets it, to torch's default below the temporary directory."""
    directory = os.environ.get(name)
    if not directory or not Path(directory).is_relative_to(tempfile.gettempdir()):
        return bool(directory)
    # Imported here: Inductor takes three seconds to import.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return not Path(directory).is_relative_to(default_cache_dir())


def _set_directory(name: str, directory: Path) -> None:
    directory = directory.expanduser().absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.info("compiled code is not cached in %s: %s", directory, error.strerror or error)
        return
    if os.access(directory, os.W_OK | os.X_OK):
        os.environ[name] = str(directory)
    else:
        logger.info("compiled code is not cached in %s: it cannot be written", directory)
