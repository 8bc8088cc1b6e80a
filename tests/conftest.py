"""Nothing here reaches a network: models are tiny and made on the spot, servers listen on loopback.

Without a GPU, Triton's kernels run in its interpreter. That must be asked for before triton is imported for the first
time.
"""

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies

gc.disable()  # until all tests are collected: modules live as long as the process, and are a fifth faster to import

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# No test waits for a clock, Hypothesis' neither, and every run is the same.
settings.register_profile("house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


def _interpret() -> None:
    if "triton" in sys.modules:
        raise RuntimeError("triton was imported before it could be told to interpret")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.experimental.gluon  # noqa: F401  # the first launch would import it
        from triton.runtime import interpreter

        import sidestream.attention.triton.gated_delta
        import sidestream.attention.triton.invariant_kernels
        import sidestream.attention.triton.kernels
        import sidestream.ops.adapter_kernels
        import sidestream.ops.draft_kernels
        import sidestream.ops.expert_kernels
        import sidestream.ops.product_kernels
        import sidestream.ops.step_kernels  # noqa: F401
        import sidestream_kv.device.cuda.kernels
        import sidestream_kv.device.cuda.peer_kernels  # noqa: F401
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

    # A third of a launch is the language's members being replaced and put back. Every kernel here is interpreted: they
    # may stay replaced.
    replace, replaced = interpreter._patch_lang, set[str]()

    def replace_once(kernel: Any) -> Any:
        if kernel.__module__ not in replaced:  # what it sees of the language
            replaced.add(kernel.__module__)
            replace(kernel)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once

    # The next tenth is a table that is built at every use.
    dtype_of, known = interpreter._get_np_dtype, {}

    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = dtype_of(dtype.scalar)
        return known[name]

    interpreter._get_np_dtype = look_up


if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    _interpret()


@pytest.fixture(autouse=True)
def garbage_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """An LLM has all there is looked through for garbage: half a second with every test's modules, and nobody here
    waits for a collection.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "sidestream.engine.loading" in sys.modules and request.node.get_closest_marker("freezes_gc_heap") is None:
            patch.setattr(sys.modules["sidestream.engine.loading"], "freeze_gc_heap", lambda: lambda: None)
        yield


@pytest.fixture
def products_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter multiply each row of a matrix the same way, however many rows there are, as a GPU does.

    It calls numpy's matmul, and OpenBLAS chooses the order of its sums by the number of rows on some processors
    (Haswell, Zen).
    """
    if torch.cuda.is_available():
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def dot(self: Any, a: Any, b: Any, accumulator: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        total = np.zeros_like(accumulator.data)
        left, right = (part.data.astype(total.dtype) for part in (a, b))
        for inner in range(left.shape[-1]):
            total += left[:, inner, None] * right[inner]
        return interpreter.TensorHandle(total + accumulator.data, accumulator.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


# The files that take longest, the longest first.
LONGEST = (
    "proof/torture/test_many_schedules.py",
    "models/test_compiled.py",
    "server/test_processes.py",
    "bench/test_bench_gpu.py",
    "test_ranks_structured.py",
    "models/test_hybrid.py",
    "models/test_families.py",
    "test_ranks.py",
    "formats/test_formats.py",
    "races/test_all_orders.py",
    "proof/test_crash.py",
    "ops/test_draw.py",
    "cli/test_train.py",
    "attention/test_triton.py",
    "models/test_gpu_functions.py",
    "bench/test_bench_serve.py",
    "bench/test_bench_hybrid.py",
    "cli/test_serve.py",
    "attention/test_engine_in_interpreter.py",
    "test_async_llm.py",
    "main_job/test_recorded_tokens.py",
    "proof/test_torture_command.py",
    "main_job/test_demo_model.py",
    "test_examples.py",
    "contributing/test_worked_pages.py",
    "races/test_museum.py",
    "proof/torture/test_same_seed.py",
    "speculate/test_mtp.py",
    "models/test_distil.py",
    "proof/torture/test_hardware.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: processes that share the files out then end at about the same time."""
    tests = Path(__file__).parent
    order = {tests / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish() -> None:
    """Collect garbage again, but not that of modules. Hypothesis first makes its random numbers: some versions look for
    references to them, and see none from what is frozen.
    """
    given(strategies.none())(lambda _: None)()
    gc.freeze()
    gc.enable()
