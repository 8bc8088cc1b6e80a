"""LoRA adapters: small matrices beside a model's weights. Rows of one batch may use different adapters.

The matrices of all loaded adapters lie one after another: for a Linear, `down` is `[slots * rank, in_features]` and
`up` `[out_features, slots * rank]`. A product with all of `down`, a mask that keeps each token's own adapter, and a
product with all of `up` compute the adapters of every row. So a step launches the same kernels whichever adapters its
rows use, and a CUDA graph contains them.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from sidestream.checkpoint_files import read_json
from sidestream.errors import ModelError
from sidestream.models.divided import Division, Gathered, Reduced
from sidestream.models.fp8 import Fp8Linear
from sidestream.models.packed import GgmlLinear
from sidestream.models.weights import READ_BY_OTHERS, PackedLinear
from sidestream_kv.device.kinds import on_host
from sidestream_kv.device.machine import check_fits

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_IN_LAYER = re.compile(r"\.\d+\.")
# Fields of PEFT's config that change a forward, with the values that leave it as it is here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(
        (
            "use_dora",
            "use_qalora",
            "lora_bias",
            "fan_in_fan_out",
            "modules_to_save",
            "layer_replication",
            "trainable_token_indices",
            "target_parameters",
            "alora_invocation_tokens",
            "arrow_config",
        ),
        (False, None, [], {}),
    ),
}


class ColumnMask:
    """Which columns of `down` count for each token of the pass, `[T, slots * rank]`; None: no adapter counts."""

    def __init__(self) -> None:
        self.value: Tensor | None = None


class AdaptedLinear(nn.Module):
    """A Linear with the matrices of all adapters."""

    def __init__(self, base: Any, mask: ColumnMask, columns: int, like: Tensor) -> None:
        """`like`: gives dtype and device."""
        super().__init__()
        self.base = base
        self.down: Tensor
        self.up: Tensor
        self.register_buffer("down", torch.zeros(columns, base.in_features, dtype=like.dtype, device=like.device))
        self.register_buffer("up", torch.zeros(base.out_features, columns, dtype=like.dtype, device=like.device))
        self.mask = mask
        self._joined: tuple[nn.Module, int] | None = None

    def join(self, base: nn.Module, joined: nn.Module, down: Tensor, up: Tensor, first: int) -> None:
        """From now on, compiled code computes this Linear as the outputs of `joined` from `first` on. `base`, `down`
        and `up` are parts of its memory.
        """
        self.base, self.down, self.up = base, down, up
        self._joined = joined, first

    def forward(self, states: Tensor) -> Tensor:
        """`[..., T, in_features]` to `[..., T, out_features]`."""
        mask = self.mask.value
        if self._joined is not None and mask is not None and torch.compiler.is_compiling():
            joined, first = self._joined
            outputs: Tensor = joined(states)
            return outputs[..., first : first + len(self.up)]
        product: Tensor = self.base(states)
        return product if mask is None else product + linear(linear(states, self.down) * mask, self.up)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The matrices of one adapter.

    digest    hash of everything that changes a forward, equal on all ranks
    matrices  for a Linear, by its name: `down` `[r, in_features]`, and `up` `[out_features, r]` times the scale; in a
              sharded model, of this rank
    """

    digest: str
    matrices: Mapping[str, tuple[Tensor, Tensor]]


class Adapters:
    """The adapters of one model. `put` and `choose` are called as work of the stream on which the model runs.

    slots   adapters that are loaded at a time; slot 0 stands for none, so they are numbered from 1
    rank    largest rank of an adapter
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        slots: int,
        rank: int,
        dtype: torch.dtype,
        pads: bool,
        divided: Mapping[str, Division] = MappingProxyType({}),
    ) -> None:
        """Allocates the matrices, in `dtype`, and changes the module. `pads`: whether passes have padding, and are
        never captured in a CUDA graph. `divided`: how a sharded model's Linears were divided, by name. Raises
        ModelError if no layer can have adapters, and ConfigError if they do not fit the host's memory.
        """
        self.slots, self.rank = slots, rank
        self._like = next(module.parameters()).new_empty(0, dtype=dtype)
        self._mask = ColumnMask()
        self._chosen: Tensor | None = None
        linears, columns = [*_linears(module)], slots * rank
        if on_host(self._like.device):
            values = columns * (1 + slots + sum(child.in_features + child.out_features for *_, child in linears))
            named = f"adapters (max_loras {slots}, max_lora_rank {rank})"
            check_fits(named, values * self._like.itemsize, promised=0)
        table = torch.eye(slots).repeat_interleave(rank, 1).to(self._like)
        self._columns = pad(table, (0, 0, 1, 0))  # [slots + 1, slots * rank]
        self._parts: dict[str, AdaptedLinear] = {}
        self._filled: set[int] = set()
        self._pads, self._divided = pads, divided
        for name, parent, last, child in linears:
            adapted = AdaptedLinear(child, self._mask, columns, self._like)
            setattr(parent, last, adapted)
            self._parts[name] = adapted
        if not self._parts:
            raise ModelError(f"{type(module).__name__} has no layers that can have adapters")

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Numbers of inputs and outputs, on all ranks, of each Linear that may have adapters, by its name."""
        sizes = {name: [part.down.shape[1], part.up.shape[0]] for name, part in self._parts.items()}
        for name, division in self._divided.items():
            if name in sizes:
                sizes[name][1 - division.dim] = division.whole
        return {name: (inputs, outputs) for name, (inputs, outputs) in sizes.items()}

    def read(self, path: str) -> Adapter:
        """Read an adapter in PEFT's format, onto the model's device. Reads safetensors only: no pickles. Any thread.
        Raises ModelError.
        """
        directory = Path(path)
        if not (directory / _CONFIG).is_file() or not (directory / _WEIGHTS).is_file():
            raise ModelError(
                f"{path} has no {_CONFIG} or no {_WEIGHTS}: give the directory of an adapter that PEFT has saved"
            )
        config = read_json(directory / _CONFIG)
        for field, neutral in _NEUTRAL.items():
            if config.get(field, neutral[0]) not in neutral:
                raise ModelError(f"{path}: {field} is {config[field]!r}, which is not supported")
        found: dict[str, dict[str, Tensor]] = {}
        try:
            with safe_open(directory / _WEIGHTS, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  # it is no mapping
                    match = _MATRIX.fullmatch(key)
                    if match is None or match[1] not in self._parts:
                        raise ModelError(
                            f"{path}: {key} belongs to a part that cannot have adapters; those that can: "
                            + ", ".join(sorted({name.rpartition(".")[2] for name in self._parts}))
                        )
                    found.setdefault(match[1], {})[match[2]] = file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{directory / _WEIGHTS} cannot be read: {error}") from error
        if not found:
            raise ModelError(f"{directory / _WEIGHTS} holds no matrices")
        digest = hashlib.sha256()
        matrices = {}
        for name, pair in sorted(found.items()):
            down, up = self._checked(path, name, pair)
            scale = _scale(config, path, name, len(down))
            digest.update(f"{name} {down.dtype} {up.dtype} {list(down.shape)} {scale!r}\n".encode())
            for tensor in (down, up):
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            if (division := self._divided.get(name)) is not None:  # columns of `down`, or rows of `up`
                down, up = (division.of(down), up) if division.dim else (down, division.of(up))
            matrices[name] = own = down.to(self._like), (up.float() * scale).to(self._like)
            if not all(matrix.isfinite().all() for matrix in own):
                raise ModelError(
                    f"{path}: {name} has values that are not finite in {self._like.dtype}, times lora_alpha / r, which "
                    f"is {scale:g}: fetch the adapter again"
                )
        return Adapter(digest.hexdigest()[:32], matrices)

    def _checked(self, path: str, name: str, pair: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        if len(pair) < 2:
            raise ModelError(f"{path}: {name} has only one of the matrices lora_A and lora_B")
        down, up = pair["A"], pair["B"]
        if {down.dtype, up.dtype} - {*_DTYPES}:
            raise ModelError(
                f"{path}: {name} has matrices of {down.dtype} and {up.dtype}: save it in float32, bfloat16 or float16"
            )
        rank = max((1, *down.shape[:1]))
        if rank > self.rank:
            raise ModelError(
                f"{path}: the rank of {name} is {rank}, and adapters may have up to {self.rank}: raise max_lora_rank"
            )
        inputs, outputs = self.sizes[name]
        expected = (rank, inputs), (outputs, rank)
        if (tuple(down.shape), tuple(up.shape)) != expected:
            raise ModelError(
                f"{path}: {name} has matrices {list(down.shape)} and {list(up.shape)}, the model takes "
                f"{list(expected[0])} and {list(expected[1])}: it is an adapter of another model"
            )
        return down, up

    def put(self, slot: int, adapter: Adapter | None) -> None:
        """Let `slot` hold this adapter; None: nothing. No row of a later step may still use the slot's old content."""
        first = (slot - 1) * self.rank
        columns = slice(first, first + self.rank)
        with torch.inference_mode():
            for name, part in self._parts.items():
                part.down[columns].zero_()
                part.up[:, columns].zero_()
                if adapter is not None and name in adapter.matrices:
                    down, up = adapter.matrices[name]
                    part.down[first : first + len(down)].copy_(down)
                    part.up[:, first : first + len(down)].copy_(up)
        (self._filled.discard if adapter is None else self._filled.add)(slot)

    def choose(self, slots: Tensor) -> None:
        """The next pass uses these slots: int64 `[T]`, one for each packed token; 0: none."""
        # On a GPU, the pass may be captured, and replayed when adapters are loaded.
        self._chosen = slots if self._filled or not self._pads else None

    def begin_pass(self, num_tokens: int) -> None:
        """Make the mask of a pass over `num_tokens` tokens, the last of which are padding."""
        chosen = self._chosen
        self._mask.value = None if chosen is None else self._columns[pad(chosen, (0, num_tokens - len(chosen)))]


def _scale(config: Mapping[str, Any], path: str, name: str, rank: int) -> float:
    """As PEFT scales the matrices of this Linear. Raises ModelError."""
    alpha, patterns = config.get("lora_alpha", 8), config.get("alpha_pattern") or {}
    try:
        own = (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", name))
        alpha = next(own, alpha)
    except (AttributeError, re.error) as error:
        message = f"{path}: alpha_pattern is {patterns!r:.300}: give an object of regular expressions and numbers"
        raise ModelError(message) from error
    if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:
        raise ModelError(f"{path}: lora_alpha of {name} is {alpha!r:.300}: give a finite number")
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _linears(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """The Linears that may have adapters: name in the whole model, parent, name in the parent, module. Left out are
    those that others read, that see some tokens only (experts, the last layer's logits), or that are shared.
    """
    for name, parent in list(module.named_modules()):
        for last, child in list(parent.named_children()):
            whole = name if isinstance(parent, Gathered | Reduced) else f"{name}.{last}" if name else last
            own = whole.rpartition(".")[2]
            if not isinstance(child, nn.Linear | PackedLinear | Fp8Linear | GgmlLinear) or own in READ_BY_OTHERS:
                continue
            if _IN_LAYER.search(whole) and ".experts." not in whole and own != "gate":
                yield whole, parent, last, child
