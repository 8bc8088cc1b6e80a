"""Reads the JSON files of a checkpoint. `read_json` is the only reader: it checks each field that it knows, so that an
error names the file, the field, the value and what is expected.

Called on the caller's thread before the tokenizer and the weights are read. Knows neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
import reprlib
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidestream.config import MODEL_OPTIONS
from sidestream.errors import ModelError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
INDEX = "model.safetensors.index.json"
"""Name of the file that lists the shards, if the weights are split over several files."""

_MAX_BYTES = 64 << 20  # indexes of the largest models have about 10 MB
_MAX_ID = (1 << 31) - 1
# Upper bounds of sizes: a wrong number would keep the start busy for hours, because transformers makes an object for
# each layer and expert. The largest models have 126 layers, 16,384 experts, a width of 53,248 and 262,208 tokens.
_MAX_LAYERS = 1 << 12
_MAX_EXPERTS = 1 << 16
_MAX_WIDTH = 1 << 20
_MAX_VOCAB = 1 << 24
# Files that are read while a model loads.
_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken")


@dataclass(frozen=True, slots=True)
class _Kind:
    """Values that a field may have. `expected`: their description in an error."""

    expected: str
    accepts: Callable[[Any], bool]


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _whole(low: int, high: int) -> _Kind:
    return _Kind(f"a whole number in [{low}, {high}]", lambda value: _is_whole(value, low, high))


def _size(low: int, high: int) -> _Kind:
    """A size of the model; some architectures give a list with one size for each layer."""

    def accepts(value: Any) -> bool:
        values = value if isinstance(value, list) else [value]
        return all(one is None or _is_whole(one, low, high) for one in values)

    return _Kind(f"a whole number in [{low}, {high}]", accepts)


_SHARD_NAME = re.compile(r"[^/\\\0]+\.safetensors")
_ANY = _Kind("a value", lambda value: True)
_NOT_NAN = _Kind("a number, not NaN", lambda value: bool(value == value))  # NaN differs from itself
_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_OBJECT = _Kind("a JSON object", lambda value: isinstance(value, dict))
_DTYPE = _Kind(
    "a dtype such as bfloat16",
    lambda value: isinstance(value, str) and bool(re.fullmatch(r"auto|(torch\.)?b?float\d\w*", value)),
)
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_TEXTS = _Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value))
_FACTOR = _Kind(
    "a number above 0", lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value > 0
)
_TOKEN_IDS = _Kind(
    f"a token id, a whole number in [0, {_MAX_ID}], or a list of such numbers",
    lambda value: all(_is_whole(one, 0, _MAX_ID) for one in (value if isinstance(value, list) else [value])),
)
_SHARD = _Kind(
    "the name of a .safetensors file in the same directory, without a path",
    lambda value: isinstance(value, str) and _SHARD_NAME.fullmatch(value) is not None,
)

_TOKENS = {"eos_token_id": _TOKEN_IDS, **dict.fromkeys(("bos_token_id", "pad_token_id"), _whole(-1, _MAX_ID))}
_ROPE = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    "factor": _FACTOR,
    "original_max_position_embeddings": _whole(1, _MAX_ID),
}
# Many sizes have several names, because architectures have names of their own.
_CONFIG = {
    **_TOKENS,
    **dict.fromkeys(("model_type", "transformers_weights", "hidden_act"), _TEXT),
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    **dict.fromkeys(("auto_map", "rope_scaling", "rope_parameters", "text_config", "quantization_config"), _OBJECT),
    **dict.fromkeys(("is_encoder_decoder", "tie_word_embeddings"), _FLAG),
    "layer_types": _TEXTS,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _size(1, _MAX_LAYERS)),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _size(0, _MAX_EXPERTS)
    ),
    **dict.fromkeys(("num_experts_per_tok", "num_kv_shared_layers"), _size(0, _MAX_EXPERTS)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), _size(1, _MAX_WIDTH)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "head_dim"), _size(0, _MAX_WIDTH)),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), _size(1, _MAX_WIDTH)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), _size(1, _MAX_ID)),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), _size(0, _MAX_ID)),
    "vocab_size": _size(1, _MAX_VOCAB),
}
_FIELDS: Mapping[str, Mapping[str, _Kind]] = {
    CONFIG: _CONFIG,
    GENERATION_CONFIG: {**_TOKENS, **dict.fromkeys(MODEL_OPTIONS, _ANY)},  # SamplingDefaults checks the options
    ADAPTER_CONFIG: {"base_model_name_or_path": _TEXT},
    INDEX: {"weight_map": _OBJECT},
    "tokenizer_config.json": {"tokenizer_class": _TEXT, "auto_map": _OBJECT},
}


def check_files_of(directory: Path) -> None:
    """Check the fields of every known JSON file of a checkpoint, and that no file in its directory is a pipe or device,
    which would stop the start. Raises ModelError.
    """
    for path in sorted(directory.iterdir()):
        if path.suffix in _SUFFIXES and path.exists() and not path.is_dir():
            check_regular(path)
        if path.name in _FIELDS:
            read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file, with its known fields checked; a null counts as absent.

    Raises ModelError with the file's name and, for a wrong value, the field, the value and what is expected.
    """
    try:
        size = check_regular(path)
        if size > _MAX_BYTES:
            raise ModelError(f"{path} has {size} bytes, and at most {_MAX_BYTES} are read: fetch it again")
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ModelError(f"{path} holds a {type(found).__name__}, not a JSON object: fetch it again")
        _check_fields(path, found, _FIELDS.get(path.name, {}))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}: give a directory that transformers saved, or fetch the file"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}): fetch it again") from error
    return found


def check_regular(path: Path) -> int:
    """Size of a regular file in bytes. Raises ModelError for anything else, because reading a pipe would wait for its
    writer; OSError if the file cannot be examined.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for name, is_kind in _OTHER_KINDS if is_kind(status.st_mode)), "special file")
        raise ModelError(f"{path} is a {kind}, not a regular file: put the file in its place")
    return status.st_size


_OTHER_KINDS = (
    ("directory", stat.S_ISDIR),
    ("pipe (FIFO)", stat.S_ISFIFO),
    ("socket", stat.S_ISSOCK),
    ("device", lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode)),
)


def _check_fields(path: Path, found: Mapping[str, Any], kinds: Mapping[str, _Kind], *, within: str = "") -> None:
    for name, value in found.items():
        kind = kinds.get(name, _NOT_NAN)
        if value is not None and not kind.accepts(value):
            raise ModelError(
                f"{path}: {within}{name} is {reprlib.repr(value)}: it must be {kind.expected}; "
                "correct the file, or fetch it again"
            )
        if isinstance(value, dict):
            _check_fields(path, value, _kinds_within(name, value, kinds), within=f"{within}{name}.")


def _kinds_within(name: str, value: Mapping[str, Any], kinds: Mapping[str, _Kind]) -> Mapping[str, _Kind]:
    """Kinds of the fields of an object that is a field itself."""
    if name == "weight_map":
        return dict.fromkeys(value, _SHARD)
    if kinds is _ROPE or name.startswith("rope_"):
        return _ROPE
    return kinds if name == "text_config" else {}
