"""Where what was compiled rests between starts: decoder layers, and our own kernels beside them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

# Where the compiler keeps what it makes, and where Triton does.
_LAYERS = "TORCHINDUCTOR_CACHE_DIR"
_KERNELS = "TRITON_CACHE_DIR"


def keep_compiled(directory: Path) -> None:
    """Have this process keep what is compiled in `directory`, and kernels in `triton` below it, for the next start. Not where somebody chose another
    place (`TORCHINDUCTOR_CACHE_DIR`, `TRITON_CACHE_DIR`), nor where nothing can be written: then it stays where torch and Triton have it, which a
    container loses.

    Before the first kernel: the compiler moves Triton's place once it compiles, and only then, so a start that finds all layers compiled would look
    elsewhere for kernels than the start that made them.
    """
    if not _is_chosen():
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.info("what is compiled is not kept in %s: %s", directory, error.strerror or error)
            return
        if not os.access(directory, os.W_OK | os.X_OK):
            return
        os.environ[_LAYERS] = str(directory)
    os.environ.setdefault(_KERNELS, str(Path(os.environ[_LAYERS]) / "triton"))


def _is_chosen() -> bool:
    """Whether the compiler's place is somebody's choice: torch names its own once it has looked."""
    if not os.environ.get(_LAYERS):
        return False
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes a second, which a start that need not ask saves

    return os.environ[_LAYERS] != default_cache_dir()
