"""Compile the kernels beside the model for an H100, and print their names; no GPU is needed. Run by test_kernels_compile.py."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sidestream.execute import kernels as execute
from sidestream.speculate import kernels as speculate

TARGET = GPUTarget("cuda", 90, 32)
LONG, INT, BF16 = "*i64", "*i32", "*bf16"


def compiled(kernel: Any, *types: str, **constants: bool) -> None:
    names = kernel.arg_names
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    values = {(names.index(name),): value for name, value in constants.items()}
    triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=values), target=TARGET)
    print(kernel.fn.__name__)


compiled(execute.change_tables, LONG, LONG, INT, "i32")
compiled(execute.standing, *[LONG] * 6, INT, BF16, *[LONG] * 3, "*u8", INT, BF16, *["i32"] * 3)
for drafts in (True, False):
    compiled(execute.inputs, *[LONG] * 7, INT, *[LONG] * 5, INT, *["i32"] * 5, DRAFTS=drafts)
for padded in (True, False):
    compiled(execute.one_token_each, INT, LONG, LONG, "*u8", LONG, LONG, "i32", "i32", PADDED=padded)
for keeps, hidden in ((True, True), (True, False), (False, False)):
    compiled(execute.advance, *[LONG] * 7, BF16, LONG, LONG, INT, BF16, LONG, *["i32"] * 4, KEEPS=keeps, HIDDEN=hidden)
compiled(execute.before, BF16, LONG, LONG, LONG, BF16, BF16, BF16, *["i32"] * 4)
compiled(execute.keep, BF16, *[LONG] * 4, BF16, BF16, *["i32"] * 5)
compiled(speculate.largest_of_parts, BF16, "*fp32", INT, *["i32"] * 3)
compiled(speculate.largest, "*fp32", INT, LONG, "*u8", "i32")
compiled(speculate.look_up, INT, LONG, LONG, LONG, *["i32"] * 5)
