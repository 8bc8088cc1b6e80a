"""New weights for a model that serves: of the same architecture, read beside the old ones, taken between two steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from sidestream.errors import ModelError
from sidestream.models.adapter import PagedModel
from sidestream_kv.device.kinds import on_host


def check_replaces(model: PagedModel, other: PagedModel) -> None:
    """Raises ModelError unless the weights of `other` fit in place of those of `model`."""
    ours, theirs = dict(_tensors(model.module)), dict(_tensors(other.module))
    for name in dict.fromkeys((*ours, *theirs)):
        here, there = ours.get(name), theirs.get(name)
        if here is None or there is None:
            raise ModelError(f"{name} is only in {'the new' if here is None else 'the served'} model")
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            raise ModelError(
                f"{name} has shape {list(there.shape)} and type {there.dtype}, but {list(here.shape)} and {here.dtype} "
                "in the served model"
            )
    if (model.layout, model.state_layout) != (other.layout, other.state_layout):
        raise ModelError(f"its KV is {other.layout}, but {model.layout} in the served model")


def take_weights(model: PagedModel, other: PagedModel) -> None:
    """Give `model` the weights of `other`, which fit (`check_replaces`). Call it as work of the stream on which the
    model runs.

    On a GPU, the tensors keep their addresses, because CUDA graphs contain these. On a CPU, the modules change hands,
    because packed weights are no ordinary tensors.
    """
    if on_host(model.module.device):
        model.module, model.stateful = other.module, other.stateful
    else:
        with torch.no_grad():
            for (_, tensor), (_, replacement) in zip(_tensors(model.module), _tensors(other.module), strict=True):
                tensor.copy_(replacement)
    model.fingerprint, model.weights_fingerprint = other.fingerprint, other.weights_fingerprint


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())
