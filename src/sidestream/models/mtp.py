"""A head for multi-token prediction (MTP): one decoder layer of the model's own class, which drafts tokens. Its input
is the embedding of a token joined with the hidden state of the previous position. It shares the model's embedding and
output matrix.

At position p the head reads token p and the hidden state of position p - 1. So its KV at p does not depend on later
tokens, and is stored in the same block as the model's KV (hazard H15 in docs/glossary.md). Published heads number this
input p - 1 instead of p. This has no effect, because only relative positions matter. To draft further tokens, the head
reads its own hidden state in place of the model's.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import pad

from sidestream.attention.interface import AttentionBatch
from sidestream.attention.rotary import Rotation
from sidestream.checkpoint_files import CONFIG, check_regular, read_json
from sidestream.errors import ModelError
from sidestream.models.adapter import OpaqueBatch, PagedModel, padded_length
from sidestream.models.directory import local_directory
from sidestream.models.latent import keep_latents
from sidestream.models.recurrent import number_attention_layers
from sidestream.models.weights import check_files, digest_of_files, pack_linears
from sidestream_kv.device.kinds import CPU, on_host

log = logging.getLogger(__name__)

# Tensor names in checkpoints, and Sidestream's names for them. All other tensors belong to the decoder layer.
_QWEN = {
    "mtp.fc.": "join.",
    "mtp.pre_fc_norm_embedding.": "norm_embedding.",
    "mtp.pre_fc_norm_hidden.": "norm_hidden.",
    "mtp.norm.": "norm.",
    "mtp.layers.0.": "layer.",
}
_DEEPSEEK = {
    "eh_proj.": "join.",
    "enorm.": "norm_embedding.",
    "hnorm.": "norm_hidden.",
    "shared_head.norm.": "norm.",
    "": "layer.",
}
_SHARED = ("shared_head.head.weight", "embed_tokens.weight")
_OWN_FORMAT = "sidestream-mtp"
# Config fields that must be equal for head and model. `_FACTS` is for Sidestream's own files, `_CHECKPOINT_FACTS` for
# checkpoints, whose tensor names depend on the number of layers.
_FACTS = ("model_type", "hidden_size", "vocab_size")
_CHECKPOINT_FACTS = ("hidden_size", "vocab_size", "num_hidden_layers")
_EXPERT = re.compile(r"^(?P<path>layer\..*\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight$")


class MtpHead(nn.Module):
    """The head of one model. It shares the model's embedding and output matrix.

    feeds_normed   True: the next draft's input is the hidden state after the head's last norm (Qwen). False: the hidden
                   state before that norm (DeepSeek, GLM)
    """

    def __init__(self, model: Any, *, feeds_normed: bool) -> None:
        """`model` is a transformers causal model. The new head's norms are copies of the model's last norm; all other
        weights are random. Raises ModelError.
        """
        super().__init__()
        base = model.base_model
        lacking = [name for name in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(base, name)]
        if lacking:
            raise ModelError(f"a head needs the model's {lacking[0]}, and {type(base).__name__} has none of that name")
        self._model = (model,)  # in a tuple, so that torch does not count the model's weights as weights of the head
        config = copy.deepcopy(model.config)
        index = config.num_hidden_layers
        config.num_hidden_layers += 1
        if getattr(config, "layer_types", None):
            config.layer_types = [*config.layer_types, "full_attention"]
        if getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = [*config.mlp_layer_types, config.mlp_layer_types[-1]]
        self.config = config
        # If rotary embeddings differ between types of layers, their forward needs the type of the head's layer.
        by_type = "layer_type" in inspect.signature(base.rotary_emb.forward).parameters
        self._rotary = {"layer_type": "full_attention"} if by_type else {}
        self.hidden_size = int(config.hidden_size)
        self.feeds_normed = feeds_normed
        self.norm_embedding, self.norm_hidden, self.norm = (copy.deepcopy(base.norm) for _ in range(3))
        reference = base.norm.weight
        with torch.device(CPU):
            self.join = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=False)
            self.layer = type(base.layers[-1])(config, layer_idx=index)
        for part in (self.join, self.layer):
            part.apply(model._init_weights)
        self.to(reference.device, reference.dtype)
        # Tensors that the model always keeps in float32, such as the routing weights of experts, stay float32 in the
        # head.
        theirs = base.layers[-1].state_dict()
        for name, tensor in self.layer.state_dict(keep_vars=True).items():
            if name in theirs:
                tensor.data = tensor.data.to(theirs[name].dtype)

    @property
    def served(self) -> Any:
        """The transformers model that the head drafts for."""
        return self._model[0]

    def forward(self, tokens: Tensor, before: Tensor, positions: Tensor, **attention: Any) -> tuple[Tensor, Tensor]:
        """Two hidden states, both `[N, T, hidden_size]`. The first is the input of the output matrix, whose logits
        predict the token after each of `tokens`. The second is the argument `before` of the next call.

        tokens, positions   int64 `[N, T]`
        before              `[N, T, hidden_size]`: hidden state of the position before each of `tokens`
        attention           more arguments for the layer's attention
        """
        left = self._through(tokens, before, positions, **attention)
        left = left[0] if isinstance(left, tuple) else left
        normed = self.norm(left)
        return normed, normed if self.feeds_normed else left

    def _through(self, tokens: Tensor, before: Tensor, positions: Tensor, **attention: Any) -> Any:
        joined, rotary = self.joined(tokens, before, positions)
        return self.layer(joined, position_embeddings=rotary, position_ids=positions, use_cache=False, **attention)

    def joined(self, tokens: Tensor, before: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
        """The layer's input `[N, T, hidden_size]`, and the position embeddings for its attention."""
        base = self.served.base_model
        joined = self.join(
            torch.cat([self.norm_embedding(base.embed_tokens(tokens)), self.norm_hidden(before)], dim=-1)
        )
        if hasattr(
            base.rotary_emb, "mrope_section"
        ):  # Qwen3.5 has three positions per token (time, height, width), which are equal for text
            positions = positions.expand(3, *positions.shape)
        return joined, base.rotary_emb(joined, position_ids=positions, **self._rotary)

    @torch.inference_mode()
    def step(self, tokens: Tensor, before: Tensor, positions: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """Like `forward`, but for a packed batch: both results are `[T, hidden_size]`. Also writes the head's KV to the
        block pool, in the first layer after the model's layers.
        """
        count = len(tokens)
        predicts, feeds = self(*_padded(tokens, before, positions), attention_mask=None, paged_batch=OpaqueBatch(batch))
        return predicts[0, :count], feeds[0, :count]

    @torch.inference_mode()
    def write_kv(self, tokens: Tensor, before: Tensor, positions: Tensor, batch: AttentionBatch) -> None:
        """Write the same KV as `step`, but compute no results."""
        with contextlib.suppress(_Written):
            self._through(
                *_padded(tokens, before, positions), attention_mask=None, paged_batch=OpaqueBatch(_KeysAndValues(batch))
            )

    def logits(self, predicts: Tensor) -> Tensor:
        """Logits `[..., vocab_size]` of the head's output `[..., hidden_size]`."""
        found: Tensor = self.served.get_output_embeddings()(predicts)
        return found


def _padded(tokens: Tensor, before: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of `forward` for a packed batch, as one sequence. On a CPU, the sequence is padded to one of few
    lengths, as in `PagedModel.forward`.
    """
    if on_host(tokens.device):
        missing = padded_length(len(tokens)) - len(tokens)
        tokens, positions, before = (
            pad(tokens, (0, missing)),
            pad(positions, (0, missing)),
            pad(before, (0, 0, 0, missing)),
        )
    return tokens[None], before[None], positions[None]


class _Written(Exception):
    """Raised to leave a layer after its keys and values were written, without computing attention."""


@dataclass(frozen=True, slots=True)
class _KeysAndValues:
    """A batch whose attention writes keys and values to the pool and then leaves the layer by raising `_Written`."""

    batch: AttentionBatch

    @property
    def slot_mapping(self) -> Tensor:
        return self.batch.slot_mapping

    def layer(self, index: int) -> Tensor:
        return self.batch.layer(index)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, *, rotary: Rotation | None = None, **how: Any
    ) -> Tensor:
        """Write keys and values, and raise `_Written`."""
        self.batch.write(key, value, layer, rotary)
        raise _Written


def attach_head(model: PagedModel, source: str | Path) -> MtpHead:
    """Attach the head in `source` to the model. `source` is a file in Sidestream's format, or a checkpoint that
    contains a head (a directory or a hub id).

    The model's blocks get one more layer for the head's KV and more layers for a hidden state; the model's fingerprint
    is extended by the head's fingerprint. Raises ModelError if there is no head, or if it does not fit the model.
    """
    head = load_head(model.module, source)
    layout = model.layout
    extra = 1 + layout.layers_for(head.hidden_size)
    number_attention_layers(head.layer, first=layout.num_layers)
    if layout.latent_dim:
        keep_latents(head.layer)
    model.layout = replace(layout, num_layers=layout.num_layers + extra)
    digest = xxhash.xxh3_128(model.fingerprint.encode())
    for name, tensor in sorted(head.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    model.fingerprint = digest.hexdigest()
    pack_linears(head)
    model.expose_hidden_states()
    return head


def load_head(model: Any, source: str | Path) -> MtpHead:
    """A head for a transformers model, on the model's device. `source` has the head's weights. Raises ModelError."""
    given, feeds_normed = _read(Path(source).expanduser(), model.config)
    head = MtpHead(model, feeds_normed=feeds_normed)
    given = _with_joined_experts(given)
    own = head.state_dict()
    lacking, strange = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if lacking or strange:
        raise ModelError(
            f"the head in {source} {'lacks' if lacking else 'has'} {(lacking or strange)[0]}: "
            f"it is not a head for {model.config.model_type}"
        )
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise ModelError(
                f"the head in {source} has {name} of shape {list(tensor.shape)}, but the model needs "
                f"{list(own[name].shape)} (hidden size {head.hidden_size}): it belongs to another model"
            )
    head.load_state_dict(given)
    return head.eval()


def write_head(head: MtpHead, path: Path, *, record: Mapping[str, str] | None = None) -> None:
    """Write a file in Sidestream's format atomically. `record` documents the head's training; its entry `weights`
    identifies the model (`digest_of_files`).
    """
    facts = {name: str(getattr(head.config, name)) for name in _FACTS}
    partial = path.with_name(path.name + ".partial")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    save_file(
        tensors, partial, {**(record or {}), "format": _OWN_FORMAT, "feeds_normed": str(head.feeds_normed), **facts}
    )
    partial.replace(path)


def _read(source: Path, config: Any) -> tuple[dict[str, Tensor], bool]:
    """A head's tensors by Sidestream's names, and the head's `feeds_normed`."""
    if source.is_file():
        with _opened(source) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _OWN_FORMAT:
                raise ModelError(
                    f"{source} is not a head file of Sidestream (its format is {metadata.get('format')}): "
                    "give such a file, or a checkpoint's directory"
                )
            _check_facts(source, {name: metadata.get(name) for name in _FACTS}, config)
            _compare_weights(source, metadata.get("weights"), config.name_or_path)
            return {name: file.get_tensor(name) for name in file.keys()}, metadata.get("feeds_normed") == "True"  # noqa: SIM118
    if source.suffix == ".safetensors":
        raise ModelError(f"there is no file {source}: check the path of the head")
    directory = local_directory(str(source))
    described = _described(directory / CONFIG)
    _check_facts(directory, {name: described[name] for name in _CHECKPOINT_FACTS if name in described}, config)
    tensors: dict[str, Tensor] = {}
    qwen = False
    prefix = f"model.layers.{config.num_hidden_layers}."
    for name, read in _stored(directory):
        if name.startswith("mtp."):
            qwen = True
            tensors[_renamed(name, _QWEN)] = read()
        elif name.startswith(prefix) and name.removeprefix(prefix) not in _SHARED:
            tensors[_renamed(name.removeprefix(prefix), _DEEPSEEK)] = read()
    if not tensors:
        raise ModelError(
            f"{directory} contains no head: it has no tensors named mtp.* or {prefix}*; "
            "give the file of a head (--draft-head); `sidestream models train-mtp` makes one"
        )
    return tensors, qwen


def _stored(directory: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The names of a checkpoint's tensors, each with a function that reads its values."""
    path = directory / CONFIG
    if quantisation := (read_json(path) if path.exists() else {}).get("quantization_config"):
        for name, tensor in (check_files(directory, quantisation).state_dict or {}).items():
            yield name, partial(tensor.__getitem__, ...)
        return
    for path in sorted(directory.glob("*.safetensors")):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                yield name, partial(file.get_tensor, name)


def _described(path: Path) -> Mapping[str, Any]:
    """The config of a checkpoint's language model; empty if there is no config."""
    config = read_json(path) if path.exists() else {}
    return config.get("text_config") or config


def _check_facts(source: Path, facts: Mapping[str, Any], config: Any) -> None:
    for name, value in facts.items():
        if str(value) != str(getattr(config, name)):
            raise ModelError(
                f"{source} was made for {name} {value}, but the model has {getattr(config, name)}: "
                "give the model's own head"
            )


def _compare_weights(source: Path, made_for: str | None, directory: str) -> None:
    """Warn if the head was trained for other weights than the weights in `directory`. Such a head may lead to fewer
    accepted drafts, but does not change outputs.
    """
    if made_for is None or not directory or not Path(directory).is_dir():
        return
    weights = digest_of_files(Path(directory))
    if weights != made_for:
        log.warning(
            "the head in %s was trained for weights %s, but the model in %s has %s: fewer drafts may be accepted",
            source,
            made_for,
            directory,
            weights,
        )


def _opened(path: Path) -> Any:
    try:
        check_regular(path)
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is no readable safetensors file ({error}): take another copy of it") from error


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for theirs, ours in names.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _with_joined_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack the matrices of experts to `[experts, ...]`, as transformers' layers expect them. Checkpoints store them
    one by one.
    """
    joined: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if (found := _EXPERT.match(name)) is None:
            joined[name] = tensor
        else:
            experts.setdefault(found["path"], {}).setdefault(int(found["number"]), {})[found["part"]] = tensor
    for path, parts in experts.items():
        for number, part in parts.items():
            if lacking := sorted({"gate_proj", "up_proj", "down_proj"} - part.keys()):
                raise ModelError(f"the head lacks {path}.{number}.{lacking[0]}.weight: fetch its checkpoint again")
        ordered: Iterable[dict[str, Tensor]] = [parts[number] for number in sorted(parts)]
        joined[f"{path}.gate_up_proj"] = torch.stack(
            [torch.cat([part["gate_proj"], part["up_proj"]]) for part in ordered]
        )
        joined[f"{path}.down_proj"] = torch.stack([part["down_proj"] for part in ordered])
    return joined
