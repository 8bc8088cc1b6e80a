"""Layers whose weights stay as they are in a GGUF file, and the loading of a module with such layers.

On a CPU, ggml multiplies by the packed weight (`ggml.py`), which is mapped from the file: it takes no memory of the
process, and other processes share it. The experts of a layer are three stacks of weights. Repacked copies, for steps of
few tokens, take memory. The inputs of a product are rounded to 8 bits in blocks, each token by itself. Called on the
loading thread, and later on the thread of the forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

from sidestream.errors import InvariantError, ModelError
from sidestream.models.ggml import FLOAT32, Experts, Ggml, Matrix, gated, library, multiplied
from sidestream.models.gguf_file import (
    INSTALL,
    TENSOR_NAMES,
    GatesAndUps,
    GgufFile,
    GgufTensor,
    check_package,
    gguf_in,
    halved,
    read_gguf,
)
from sidestream_kv.device.kinds import on_host
from sidestream_kv.device.machine import memory_bytes
from sidestream_kv.kv.layout import DTYPE_BYTES

logger = logging.getLogger(__name__)

_EMBEDDING, _OUTPUT = (f"{TENSOR_NAMES[name]}.weight" for name in ("token_embd", "output"))
# Without an order to repack, the file and the copies may take this share of the memory that is available.
_MEMORY_SHARE = 2 / 3
# Names of the weights of a module that may stay packed; experts have two, of which the first one has two stacks.
_WEIGHTS = ("weight", "gate_up_proj", "down_proj")
# End of the name of Gemma's embeddings, whose rows are multiplied by `embed_scale`.
_SCALED = "TextScaledWordEmbedding"
# Modules that compute `down_proj(act_fn(gate_proj(x)) * up_proj(x))`.
_MLPS = (LlamaMLP, MistralMLP, Qwen2MLP, Qwen2MoeMLP, Qwen3MLP, Qwen3MoeMLP)


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


def copies_of(file: GgufFile, ggml: Ggml, *, repack: bool | None) -> int:
    """Bytes of the repacked copies that a model of this file will have; `repack` as in `load_model`."""
    multiplied = [tensor for name, tensor in file.tensors.items() if name != _EMBEDDING or _OUTPUT not in file.tensors]
    num_bytes = sum(
        tensor.stored.num_bytes
        for tensor in multiplied
        if tensor.is_kept and ggml.repacks(tensor.kind.number, tensor.stored.shape)
    )
    if repack is None:
        available = memory_bytes()[1]
        file_bytes = sum(tensor.stored.num_bytes for tensor in file.tensors.values())
        repack = available is not None and num_bytes + file_bytes <= available * _MEMORY_SHARE
    return num_bytes if repack else 0


def kept_packed(
    file: GgufFile, device: torch.device, dtype: torch.dtype, *, ranks: int, repack: bool | None
) -> KeptPacked | None:
    """The weights of a file that stay packed; None: all become plain. Raises ModelError if no package reads them."""
    value_bytes = DTYPE_BYTES[str(dtype).removeprefix("torch.")]
    sizes = [file.num_bytes(packed=packed, value_bytes=value_bytes) / 2**30 for packed in (True, False)]
    if (ggml := packing(device, ranks=ranks)) is not None:
        copies = copies_of(file, ggml, repack=repack)
        logger.info(
            "weights stay packed as %s: %.2f GiB, mapped from %s, and %.2f GiB of repacked copies",
            *(file.kinds(), sizes[0], file.path.name, copies / 2**30),
        )
        return KeptPacked(file.state_dict(), ggml, dtype, repack=copies > 0)
    check_package()
    remedy = f": {INSTALL} keeps them packed in {sizes[0]:.2f} GiB" if on_host(device) and ranks == 1 else ""
    logger.warning("weights of %s become plain and take %.2f GiB%s", file.path.name, sizes[1], remedy)
    return None


class GgmlLinear(nn.Module):
    """A Linear with a packed weight. `packed`: its bytes, uint8."""

    def __init__(self, matrix: Matrix, packed: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        self.packed: Tensor
        self.register_buffer("packed", packed)
        self.bias = bias
        self.matrix = matrix
        self.siblings = _Siblings([matrix])

    def forward(self, states: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`, in the dtype of `states`."""
        product = self.siblings.product(self.matrix, states).to(states.dtype, copy=True)
        if self.bias is not None:
            product = product + self.bias
        return product.view(*states.shape[:-1], self.out_features)


class _Siblings:
    """Matrices that are multiplied by the same states one after the other, so that one call of ggml is enough.

    The products of all are computed when the first one is asked for, and each is given out once. Used by the thread of
    the forward pass only.
    """

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._matrices = matrices
        self._computation = multiplied(matrices, 1)
        self._states: Tensor | None = None
        self._products: dict[Matrix, Tensor] = {}

    def product(self, matrix: Matrix, states: Tensor) -> Tensor:
        """`[T, rows]`, float32; to be read before the next forward pass."""
        if states is not self._states or matrix not in self._products:
            found = self._multiply(states.reshape(-1, matrix.shape[1]))
            self._states, self._products = states, dict(zip(self._matrices, found, strict=True))
        product = self._products.pop(matrix)
        if not self._products:
            self._states = None
        return matrix.ordered(product)

    def _multiply(self, states: Tensor) -> list[Tensor]:
        # Decode of one request uses one computation again: to describe another one takes 0.1 ms.
        computation = self._computation if len(states) == 1 else multiplied(self._matrices, len(states))
        return computation.run(states)


class GgmlMlp(nn.Module):
    """The gated MLP of a Llama or Qwen with packed weights: one call of ggml, unless a Linear was replaced (LoRA)."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn
        self._matrices = (self.gate_proj.matrix, self.up_proj.matrix, self.down_proj.matrix)
        self._computation = gated(*self._matrices, 1)

    def forward(self, states: Tensor) -> Tensor:
        """`[..., hidden_size]` to `[..., hidden_size]`, in the dtype of `states`."""
        linears = (self.gate_proj, self.up_proj, self.down_proj)
        if not all(isinstance(one, GgmlLinear) for one in linears):
            return cast("Tensor", self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states)))
        flat = states.reshape(-1, states.shape[-1])
        computation = self._computation if len(flat) == 1 else gated(*self._matrices, len(flat))
        return computation.run(flat)[-1].to(states.dtype, copy=True).view(states.shape)


class GgmlExperts(nn.Module):
    """The gated MLPs of a layer's experts, with stacks of packed weights: one call of ggml for the experts that tokens
    choose. Its buffers are the bytes of the stacks, uint8.
    """

    def __init__(self, experts: Experts, packed: Sequence[Tensor], num_chosen: int) -> None:
        """`packed`: bytes of the stacks, and biases. `num_chosen`: number of experts that a token chooses."""
        super().__init__()
        for number, one in enumerate(packed):
            self.register_buffer(f"packed_{number}", one)
        self._experts = experts
        self._computation = experts.computation(1, num_chosen)

    def forward(self, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`[T, hidden_size]`, experts `[T, K]` and their weights `[T, K]` to `[T, hidden_size]`."""
        computation = self._computation if len(states) == 1 else self._experts.computation(*chosen.shape)
        products = computation.run(states[:, None], chosen)[-1]
        return products.mul_(weights[..., None]).sum(1).to(states.dtype)


class GgmlEmbedding(nn.Module):
    """An Embedding with a packed weight. `packed`: its bytes, uint8. `scale`: a factor of its results."""

    def __init__(self, matrix: Matrix, packed: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = matrix.shape
        self.packed: Tensor
        self.register_buffer("packed", packed)
        self._matrix, self._dtype, self._scale = matrix, dtype, scale

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids `[...]` to `[..., embedding_dim]`."""
        rows = self._matrix.rows(tokens.reshape(-1)).to(self._dtype).view(*tokens.shape, self.embedding_dim)
        return rows if self._scale is None else rows * self._scale


class KeptPacked:
    """Quantised weights, and experts, of a GGUF file that stay packed.

    While transformers builds the module, such a weight is one number in the shape of the weight, which takes no memory.
    `restore` then replaces the layers that have it. `repack`: Linears get repacked copies where there are kernels.
    """

    def __init__(self, state_dict: Mapping[str, Any], ggml: Ggml, dtype: torch.dtype, *, repack: bool) -> None:
        self._ggml, self._dtype, self._repack = ggml, dtype, repack
        self._weights: dict[int, tuple[Tensor, tuple[GgufTensor, ...]]] = {}
        self._made: dict[int, list[tuple[Matrix, Tensor]]] = {}
        self.state_dict = {name: self._stand_in(tensor) for name, tensor in state_dict.items()}
        """The state dict for transformers."""

    def _stand_in(self, tensor: GgufTensor | GatesAndUps) -> Any:
        parts = (tensor,) if isinstance(tensor, GgufTensor) else (tensor.gates, tensor.ups)
        if not all(part.is_kept and self._ggml.supports(*part.kind) for part in parts):
            return tensor
        number = torch.zeros((), dtype=self._dtype)
        self._weights[number.data_ptr()] = (number, parts)
        return number.expand(tensor.shape)

    def restore(self, module: nn.Module) -> None:
        """Replace the layers of a module that was built from `state_dict`. Raises ModelError for damaged weights."""
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                weights = [weight for one in _WEIGHTS if isinstance(weight := getattr(child, one, None), Tensor)]
                if any(weight.data_ptr() in self._weights for weight in weights):
                    setattr(parent, name, self._layer(child, weights))
        for parent in list(module.modules()):
            _join(parent)
        if len(self._made) != len(self._weights):
            raise InvariantError(f"{len(self._weights) - len(self._made)} packed weights have no layer in the module")

    def _layer(self, child: Any, weights: Iterable[Tensor]) -> nn.Module:
        """A layer with packed weights in place of transformers' own. `weights`: its stand-ins."""
        made = [part for one in weights for part in self._matrices(one.data_ptr())]
        if isinstance(child, nn.Embedding):
            scale: Any = getattr(child, "embed_scale", None) if type(child).__name__.endswith(_SCALED) else None
            if type(child) is not nn.Embedding and scale is None:
                raise InvariantError(f"a {type(child).__name__} may do more than look up rows")
            return GgmlEmbedding(*made[0], self._dtype, None if scale is None else scale.to(self._dtype))
        if self._repack:
            for matrix, _ in made:
                matrix.repack()
        if isinstance(child, nn.Linear):
            return GgmlLinear(*made[0], child.bias)
        return self._experts(child, made)

    def _experts(self, child: Any, made: Sequence[tuple[Matrix, Tensor]]) -> GgmlExperts:
        stacks, packed = [matrix for matrix, _ in made], [one for _, one in made]
        if isinstance(child, GptOssExperts):
            gates_and_ups, downs = child.gate_up_proj_bias.detach().float(), child.down_proj_bias.detach().float()
            biases = [gates_and_ups[:, 0::2].contiguous(), gates_and_ups[:, 1::2].contiguous(), downs]
            held = [Matrix(self._ggml, one.view(torch.uint8), FLOAT32, tuple(one.shape)) for one in biases]
            experts, packed = Experts(stacks, held, (child.alpha, child.limit)), [*packed, *biases]
        elif isinstance(child.act_fn, SiLUActivation | nn.SiLU):
            experts = Experts(stacks)
        else:
            raise ModelError(
                f"its experts compute {child.config.hidden_act}: of GGUF files, those with silu are served"
            )
        return GgmlExperts(experts, packed, child.config.num_experts_per_tok)

    def _matrices(self, where: int) -> list[tuple[Matrix, Tensor]]:
        """The matrices that a stand-in stands for, and their bytes; made once."""
        if where not in self._made:
            self._made[where] = [self._matrix(part) for part in self._weights[where][1]]
        return self._made[where]

    def _matrix(self, weight: GgufTensor) -> tuple[Matrix, Tensor]:
        packed, shape = weight.bytes(), weight.stored.shape
        order = halved(torch.arange(shape[0]), weight.interleaved, dim=0) if weight.interleaved else None
        matrix = Matrix(self._ggml, packed, weight.kind.number, shape, order)
        if not matrix.is_valid():
            raise ModelError(
                f"its weight {weight.stored.name} in {weight.stored.path.name} holds values of NaN or infinity: "
                "the file is damaged, fetch it again"
            )
        return matrix, packed


def _join(parent: nn.Module) -> None:
    """Let the products of a part of a model be computed in fewer calls of ggml."""
    named = [getattr(parent, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    projections = [one for one in named if isinstance(one, GgmlLinear)]
    if len(projections) == len(named):
        siblings = _Siblings([one.matrix for one in projections])
        for one in projections:
            one.siblings = siblings
    for name in ("mlp", "shared_expert"):
        mlp: Any = getattr(parent, name, None)
        if type(mlp) in _MLPS and isinstance(mlp.act_fn, SiLUActivation | nn.SiLU):
            inner = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
            if all(isinstance(one, GgmlLinear) and one.bias is None for one in inner):
                setattr(parent, name, GgmlMlp(mlp))
