"""Which models can compute the same bits in every batch, and what these bits depend on (docs/decisions/0074)."""

from __future__ import annotations

import torch
from torch import nn

from sidestream.errors import ModelError
from sidestream.models.adapter import PagedModel
from sidestream.models.invariant import ROWS, use_invariant_linears
from sidestream_kv.device.kinds import on_host

_MOST_HEAD_DIM = 256  # on a GPU, two sums of larger heads do not fit the registers of a program
_ALIGNED = 4  # on a GPU, torch's softmax adds in another order where rows begin at other multiples of 16 bytes


def arithmetic(device: torch.device, compute_threads: int | None) -> str:
    """What the bits of KV depend on besides the model: the rest of the fingerprint, to be read in messages."""
    if on_host(device):
        threads = compute_threads or torch.get_num_threads()
        machine = f"{torch.backends.cpu.get_cpu_capability()} with {threads} threads, {ROWS} rows"
    else:
        machine = torch.cuda.get_device_name(device)
    return f" with batch_invariant ({machine}, torch {torch.__version__})"


def make_invariant(model: PagedModel, *, quantised: bool = False) -> None:
    """Let a new model compute the same bits in every batch. `quantised`: it has weights that stay quantised. Raises
    ModelError unless all that it computes is known to be invariant then.
    """
    if (reason := _reason(model, quantised=quantised)) is not None:
        raise ModelError(
            f"batch_invariant is on, but {reason}, for which equal bits in every batch are not supported: "
            "leave batch_invariant out"
        )
    if on_host(model.module.device):
        model.in_blocks = True
    else:
        use_invariant_linears(model.module)


def _reason(model: PagedModel, *, quantised: bool) -> str | None:
    if model.state_layout is not None:
        return "its layers keep recurrent states"
    if model.layout.latent_dim:
        return "its attention keeps latents"
    if model.places:
        return "its layers differ in their heads"
    if model.traced is not None:
        return "its attention is code of its own"
    if quantised:
        return "its weights stay quantised"
    if not on_host(model.module.device) and model.vocab_size % _ALIGNED:
        return f"its vocabulary of {model.vocab_size} tokens is no multiple of {_ALIGNED}"
    compiled = None if on_host(model.module.device) else _compiled_modules(model)
    if compiled is not None and model.layout.head_dim > _MOST_HEAD_DIM:
        return f"its heads have {model.layout.head_dim} elements, more than {_MOST_HEAD_DIM}"
    for name, part in model.module.named_modules():
        weights = [*part.parameters(recurse=False)]
        if not weights or type(part) is nn.Linear or isinstance(part, nn.Embedding):
            continue
        if any(weight.dim() > 1 for weight in weights):
            return f"its {name} is a {type(part).__name__}, not a Linear"
        if compiled is not None and part not in compiled:
            return f"its {name}, a {type(part).__name__}, is not compiled with its layers"
    return None


def _compiled_modules(model: PagedModel) -> set[nn.Module]:
    from sidestream.models.compiled import compiled_parts  # its import takes a second

    return {part for parts in compiled_parts(model) for part in parts.modules()}
