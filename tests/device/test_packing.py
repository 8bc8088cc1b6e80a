"""The arithmetic of KV in 8 bits, in torch and in the kernel."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sidestream_kv.device.base import CopyBatch, Memory
from sidestream_kv.device.eight_bit import pack, unpack
from sidestream_kv.errors import InvariantError
from sidestream_kv.kv.eight_bit import EightBitLayout
from sidestream_kv.kv.layout import KVLayout
from sidestream_kv.types import Vectors

DTYPES = ("float32", "bfloat16", "float16")
# Half of a scale, and the rounding to the dtype.
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}


def vectors(dtype: str, elements: int = 12) -> Vectors:
    return EightBitLayout(KVLayout(1, 1, elements, 1, dtype)).packed


def numbers(dtype: str, count: int = 40, elements: int = 12) -> torch.Tensor:
    """Vectors of very different sizes, as uint8; the first consists of zeros."""
    made = torch.randn(count, elements, generator=torch.Generator().manual_seed(0))
    return (made * torch.logspace(-3, 3, count)[:, None] * (torch.arange(count) > 0)[:, None]).to(of(dtype))


def of(dtype: str) -> torch.dtype:
    return getattr(torch, dtype)  # type: ignore[no-any-return]


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_changes_by_at_most_half_a_127th_of_the_largest(dtype: str) -> None:
    plain = numbers(dtype)
    packed = pack(as_bytes(plain), vectors(dtype))
    assert packed.numel() == len(plain) * (12 + 4)
    back = unpack(packed, vectors(dtype)).view(of(dtype)).view(plain.shape)
    largest = plain.float().abs().amax(1, keepdim=True)
    error = (back.float() - plain.float()).abs()
    assert bool((error <= largest * (0.5 / 127 + ROUNDING[dtype])).all())
    assert bool((error.amax(1)[1:] > 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_that_is_stored_again_does_not_change_further(dtype: str) -> None:
    once = pack(as_bytes(numbers(dtype)), vectors(dtype))
    assert torch.equal(pack(unpack(once, vectors(dtype)), vectors(dtype)), once)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_a_vector_that_is_not_finite_comes_back_as_nan_and_its_neighbours_do_not(strange: float) -> None:
    plain = numbers("float32")
    plain[7, 3] = strange
    back = unpack(pack(as_bytes(plain), vectors("float32")), vectors("float32")).view(torch.float32).view(plain.shape)
    assert back.isnan().all(1).tolist() == [row == 7 for row in range(len(plain))]


def test_striped_memory_is_refused() -> None:
    form = vectors("float32")
    kv = Memory(
        "kv", tuple(torch.zeros(form.plain_bytes, dtype=torch.uint8) for _ in range(2)), (form.plain_bytes // 2,) * 2
    )
    host = Memory("host", (torch.zeros(form.packed_bytes, dtype=torch.uint8),))
    batch = CopyBatch(kv, host, np.array([0]), np.array([0]), form.packed_bytes, packs=form)
    with pytest.raises(InvariantError, match="kv to host: striped KV cannot be packed"):
        list(batch.segments())


@pytest.mark.parametrize(("dtype", "elements", "table"), [("float32", 12, True), ("bfloat16", 64, False)])
def test_the_kernel_computes_the_same(dtype: str, elements: int, table: bool) -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed: it comes with torch on Linux x86-64")
    assert triton.runtime.interpreter is not None
    from sidestream_kv.device.cuda.kernels import convert_segments

    form, count = vectors(dtype, elements), 3 if table else 1
    plain = [as_bytes(numbers(dtype, 20, elements) * (index + 1)) for index in range(count)]
    plain[0].view(of(dtype))[elements + 1] = math.nan
    expected = [pack(each, form) for each in plain]
    size = expected[0].numel()
    stage = torch.zeros(count * size, dtype=torch.uint8)

    def convert(segments: list[torch.Tensor], *, unpacks: bool) -> None:
        addresses = torch.tensor([each.data_ptr() for each in segments])
        start = addresses.data_ptr() if table else segments[0].data_ptr()
        convert_segments(start, stage.data_ptr(), count, size, form, unpacks=unpacks, table=table)

    convert(plain, unpacks=False)
    finite = torch.ones(size, dtype=torch.bool)
    finite[form.packed_bytes : 2 * form.packed_bytes] = False  # a vector that is not finite may have any codes
    for index, each in enumerate(expected):
        here = stage[index * size : (index + 1) * size]
        assert torch.equal(here[finite], each[finite]), index
    back = [torch.zeros_like(each) for each in plain]
    convert(back, unpacks=True)
    for found, each in zip(back, expected, strict=True):
        wanted = unpack(each, form).view(of(dtype))
        rtol = 2**-7 if dtype == "bfloat16" else 0.0  # the interpreter cuts off what a GPU rounds
        torch.testing.assert_close(found.view(of(dtype)), wanted, rtol=rtol, atol=0, equal_nan=True)
