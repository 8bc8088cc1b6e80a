"""Where what was compiled rests between starts: decoder layers, and our own kernels beside them."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from sidestream.models.catalog import cache_root

logger = logging.getLogger(__name__)

# Where the compiler keeps what it makes, where Triton does, and what Triton's own place is below.
_LAYERS = "TORCHINDUCTOR_CACHE_DIR"
_KERNELS = "TRITON_CACHE_DIR"
_TRITON_HOME = "TRITON_HOME"


def keep_compiled() -> None:
    """Have this process keep what is compiled for the next start: in `compiled` below the cache's directory, and
    kernels in `triton` below that. Not where somebody chose another place (`TORCHINDUCTOR_CACHE_DIR`;
    `TRITON_CACHE_DIR`, `TRITON_HOME`), nor where nothing can be written: then it stays where torch and Triton have it,
    which a container loses. Again it does nothing.

    Before the first kernel, of whoever launches it: the compiler moves Triton's place once it compiles, and only then,
    so a start that finds all layers compiled would look elsewhere for kernels than the start that made them.
    """
    if not _is_chosen(_LAYERS):
        try:
            _keep(_LAYERS, cache_root() / "compiled")
        except RuntimeError as error:  # no home
            logger.info("what is compiled is not kept: %s", error)
    if not _is_chosen(_KERNELS):
        if home := os.environ.get(_TRITON_HOME):
            _keep(_KERNELS, Path(home) / ".triton" / "cache")
        elif layers := os.environ.get(_LAYERS):
            _keep(_KERNELS, Path(layers) / "triton")


def _is_chosen(name: str) -> bool:
    """Whether a user chose this directory: torch, too, sets the variable, to its own default below the directory for
    temporary files.
    """
    place = os.environ.get(name)
    if not place or not Path(place).is_relative_to(tempfile.gettempdir()):
        return bool(place)
    # Imported here: the compiler takes three seconds to import, which every start would pay.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return not Path(place).is_relative_to(default_cache_dir())


def _keep(name: str, directory: Path) -> None:
    directory = directory.expanduser().absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.info("what is compiled is not kept in %s: %s", directory, error.strerror or error)
        return
    if os.access(directory, os.W_OK | os.X_OK):
        os.environ[name] = str(directory)
    else:
        logger.info("what is compiled is not kept in %s: it cannot be written", directory)
