"""Products of compiled layers with one row, by a kernel of our own (docs/decisions/0077)."""

from __future__ import annotations

import torch
from torch import fx

from sidestream.ops.products import multiply_few, starts_early

# Not `custom_op`, whose calls take twice as long: long prompts are computed by calls that no graph holds.
torch.library.define("sidestream::multiply_few", "(Tensor states, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl("sidestream::multiply_few", "CompositeExplicitAutograd")(multiply_few)
torch.library.register_fake(
    "sidestream::multiply_few", lambda states, weight, bias: states.new_empty(states.shape[0], weight.shape[0])
)


def use_own_products(graph: fx.Graph) -> None:
    """Let `multiply_few` compute a graph's products of states with stored weights of 16 bits, on GPUs whose kernels may
    start early.
    """
    aten = torch.ops.aten
    for target in (aten.mm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            *bias, states, turned = node.args
            if node.kwargs or turned.target not in (aten.t.default, aten.permute.default):
                continue
            if any(part.meta["val"].dim() != 1 for part in bias):  # a sum with other states
                continue
            weight = turned.args[0]
            meta = weight.meta["val"]
            if weight.op == "placeholder" and meta.is_cuda and meta.itemsize == 2 and starts_early(meta.device):
                node.target = torch.ops.sidestream.multiply_few.default
                node.args = (states, weight, *(bias or [None]))
