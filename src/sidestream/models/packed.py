"""Layers whose weights stay as they are in a GGUF file, and the loading of a module with such layers.

On a CPU, ggml multiplies by the packed weight (`ggml.py`), which is mapped from the file: it takes no memory of the
process, and other processes share it. The inputs of a product are rounded to 8 bits in blocks, each token by itself.
Called on the loading thread, and later on the thread of the forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sidestream.errors import InvariantError, ModelError
from sidestream.models.ggml import Ggml, Matrix, library
from sidestream.models.gguf_file import (
    INSTALL,
    QUANTISED,
    GgufFile,
    GgufTensor,
    check_package,
    gguf_in,
    halved,
    read_gguf,
)
from sidestream_kv.device.kinds import on_host
from sidestream_kv.kv.layout import DTYPE_BYTES

logger = logging.getLogger(__name__)


def gguf_of(directory: Path, config: Any) -> GgufFile | None:
    """The GGUF file with the weights of a directory; None: it has others. Raises ModelError if the file does not fit
    the config.
    """
    if (path := gguf_in(directory)) is None:
        return None
    file = read_gguf(path)
    file.check_fits(config)
    return file


def packing(device: torch.device, *, ranks: int = 1) -> Ggml | None:
    """The library that multiplies by packed weights on this device; None: weights become plain."""
    return library() if on_host(device) and ranks == 1 else None


def kept_packed(file: GgufFile, device: torch.device, dtype: torch.dtype, *, ranks: int) -> KeptPacked | None:
    """The weights of a file that stay packed; None: all become plain. Raises ModelError if no package reads them."""
    value_bytes = DTYPE_BYTES[str(dtype).removeprefix("torch.")]
    sizes = [file.num_bytes(packed=packed, value_bytes=value_bytes) / 2**30 for packed in (True, False)]
    if (ggml := packing(device, ranks=ranks)) is not None:
        logger.info("weights stay packed as %s: %.2f GiB, mapped from %s", file.kinds(), sizes[0], file.path.name)
        return KeptPacked(file.tensors, ggml, dtype)
    check_package()
    remedy = f": {INSTALL} keeps them packed in {sizes[0]:.2f} GiB" if on_host(device) and ranks == 1 else ""
    logger.warning("weights of %s become plain and take %.2f GiB%s", file.path.name, sizes[1], remedy)
    return None


class GgmlLinear(nn.Module):
    """A Linear with a packed weight. `packed`: its bytes, uint8."""

    def __init__(self, weight: GgufTensor, matrix: Matrix, packed: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        self.packed: Tensor
        self.register_buffer("packed", packed)
        self.bias = bias
        self._matrix, self._interleaved = matrix, weight.interleaved

    def forward(self, states: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`, in the dtype of `states`."""
        product = self._matrix.product(states.reshape(-1, self.in_features))
        if self._interleaved:
            product = halved(product, self._interleaved, dim=1)
        product = product.to(states.dtype)
        if self.bias is not None:
            product = product + self.bias
        return product.view(*states.shape[:-1], self.out_features)


class GgmlEmbedding(nn.Module):
    """An Embedding with a packed weight. `packed`: its bytes, uint8."""

    def __init__(self, matrix: Matrix, packed: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = matrix.shape
        self.packed: Tensor
        self.register_buffer("packed", packed)
        self._matrix, self._dtype = matrix, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids `[...]` to `[..., embedding_dim]`."""
        return self._matrix.rows(tokens.reshape(-1)).to(self._dtype).view(*tokens.shape, self.embedding_dim)


class KeptPacked:
    """Quantised weights of a GGUF file that stay packed.

    While transformers builds the module, such a weight is one number in the shape of the weight, which takes no memory.
    `restore` then replaces the layers that have it.
    """

    def __init__(self, state_dict: Mapping[str, Any], ggml: Ggml, dtype: torch.dtype) -> None:
        self._ggml, self._dtype = ggml, dtype
        self._weights: dict[int, tuple[Tensor, GgufTensor]] = {}
        self.state_dict = {name: self._stand_in(tensor) for name, tensor in state_dict.items()}
        """The state dict for transformers."""

    def _stand_in(self, tensor: Any) -> Any:
        if not isinstance(tensor, GgufTensor) or tensor.kind not in QUANTISED or not self._ggml.supports(*tensor.kind):
            return tensor
        number = torch.zeros((), dtype=self._dtype)
        self._weights[number.data_ptr()] = (number, tensor)
        return number.expand(tensor.stored.shape)

    def restore(self, module: nn.Module) -> None:
        """Replace the layers of a module that was built from `state_dict`. Raises ModelError for damaged weights."""
        made: dict[int, tuple[Matrix, Tensor]] = {}
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if not isinstance(child, nn.Linear | nn.Embedding) or child.weight.data_ptr() not in self._weights:
                    continue
                where = child.weight.data_ptr()
                weight = self._weights[where][1]
                matrix, packed = made[where] = made[where] if where in made else self._made(weight)
                if isinstance(child, nn.Linear):
                    setattr(parent, name, GgmlLinear(weight, matrix, packed, child.bias))
                elif type(child) is nn.Embedding:
                    setattr(parent, name, GgmlEmbedding(matrix, packed, self._dtype))
                else:
                    raise InvariantError(f"{name} is a {type(child).__name__}, which may do more than look up rows")
        if len(made) != len(self._weights):
            raise InvariantError(f"{len(self._weights) - len(made)} packed weights have no layer in the module")

    def _made(self, weight: GgufTensor) -> tuple[Matrix, Tensor]:
        rows, columns = weight.stored.shape
        packed = weight.bytes()
        matrix = Matrix(self._ggml, packed, weight.kind.number, (rows, columns))
        if not matrix.is_valid():
            raise ModelError(
                f"its weight {weight.stored.name} in {weight.stored.path.name} holds values of NaN or infinity: "
                "the file is damaged, fetch it again"
            )
        return matrix, packed
