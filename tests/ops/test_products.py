"""Products of one row, and those in which the number of rows changes no bit. On a GPU if there is one, else in Triton's
interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from sidestream.models.invariant import invariant_linear
from sidestream.ops import products
from sidestream.ops.products import multiply_few

pytest.importorskip(
    "triton", reason="triton is not installed: it comes with torch on Linux x86-64, or with the dev extra"
)

HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.usefixtures("products_row_by_row"), *[pytest.mark.gpu] * (HERE == "cuda")]
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (HERE == "cuda")  # Triton's interpreter lacks bfloat16
SIZES = [(200, 72), (4096, 4096), (12288, 4096), (4096, 24576)] if HERE == "cuda" else [(200, 72), (128, 136)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_has_the_same_bits_at_any_place_among_any_number_of_rows(
    dtype: torch.dtype, inputs: int, outputs: int, biased: bool
) -> None:
    draws = torch.Generator().manual_seed(1)
    states, weight, bias = (
        torch.randn(*shape, generator=draws).to(HERE, dtype) for shape in ((300, inputs), (outputs, inputs), (outputs,))
    )
    given = bias if biased else None
    whole = invariant_linear(states[None], weight, given)[0]
    exact = linear(states.double(), weight.double(), None if given is None else given.double())
    torch.testing.assert_close(whole.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=2e-5 * inputs)
    for begin, stop in ((0, 1), (7, 8), (5, 21), (0, 64), (100, 165), (40, 297)):
        assert torch.equal(invariant_linear(states[begin:stop], weight, given), whole[begin:stop])
    assert invariant_linear(states[:0], weight, given).shape == (0, outputs)


def test_rows_of_every_length_have_the_bits_of_a_part_of_a_larger_state() -> None:
    states = torch.randn(20, 96, device=HERE)
    weight = torch.randn(40, 32, device=HERE)
    assert torch.equal(
        invariant_linear(states[:, 32:64], weight, None), invariant_linear(states[:, 32:64].clone(), weight, None)
    )


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [*SIZES, (8200, 10)])
@pytest.mark.parametrize("biased", [False, True])
def test_one_row_is_multiplied_by_a_kernel_of_its_own(
    dtype: torch.dtype, inputs: int, outputs: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = torch.Generator().manual_seed(1)
    states, weight, bias = (
        torch.randn(*shape, generator=draws).to(HERE, dtype) for shape in ((3, inputs), (outputs, inputs), (outputs,))
    )
    given = bias if biased else None
    exact = linear(states.double(), weight.double(), None if given is None else given.double())
    several = multiply_few(states, weight, given)
    assert torch.equal(several, linear(states, weight, given))
    monkeypatch.setattr(products, "linear", None)
    for row in range(3):
        one = multiply_few(states[row : row + 1], weight, given)
        torch.testing.assert_close(one.double(), exact[row : row + 1], rtol=torch.finfo(dtype).eps, atol=2e-6 * inputs)
    column = states[:1].t().contiguous()[:, :1].t()  # its elements may be apart
    assert torch.equal(multiply_few(column, weight, given), multiply_few(states[:1], weight, given))
