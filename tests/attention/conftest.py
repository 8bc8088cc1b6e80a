"""Without a GPU, Triton's kernels run in its interpreter. That must be asked for before triton is imported for the first time."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import torch


def _interpret() -> None:
    if "triton" in sys.modules:
        raise RuntimeError("triton was imported before it could be told to interpret: collect tests/attention first, or by itself")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.experimental.gluon  # noqa: F401  # the first launch would import it
        from triton.runtime import interpreter

        import sidestream.attention.triton.kernels  # noqa: F401
        from sidestream.attention.triton import launch
    finally:
        del os.environ["TRITON_INTERPRET"]  # what was imported stays interpreted; child processes are not meant

    launch._PROGRAMS = 12  # here one runs after another; how many there are changes no result, as a test shows

    # Triton before 3.9 makes the bounds of a loop from arrays of one element, which NumPy refuses from 2.4 on.
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_index


if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    _interpret()
