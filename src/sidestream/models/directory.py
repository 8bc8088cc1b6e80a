"""Finds a model's directory, fetches a hub id, and refuses a directory that cannot be served by its file names and JSON
files.

Called on the caller's thread before the tokenizer and the weights are read, so that the first error names the cause.
Knows nothing about tensors: `weights` reads the headers of weight files. A message that begins with "its" is completed
by the caller, which puts the model's name in front.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sidestream.checkpoint_files import ADAPTER_CONFIG, CONFIG, INDEX, check_files_of, read_json
from sidestream.errors import ModelError

WEIGHTS = "model.safetensors"


# Weights as safetensors only: other formats execute code while they are read.
_CONFIGS = ("*.json", "*.jinja", "*.model", "*.txt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_OFFLINE = "HF_HUB_OFFLINE is set"


def is_hub_id(model: str) -> bool:
    """Whether the text has the form of a hub id: `owner/name`."""
    return _HUB_ID.fullmatch(model) is not None


def name_of(model: str | Path) -> str:
    """The model's name for clients and errors: its directory's name, or `model` itself."""
    path = Path(model)
    return path.absolute().name if path.is_dir() else str(model)


def local_directory(path_or_hub_id: str, *, weights: bool = True) -> Path:
    """The directory of a model's files; downloads a hub id first. `weights`: with the weight files.

    Raises ModelError with cause and remedy.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if not is_hub_id(path_or_hub_id):
        raise ModelError(f"there is no directory {path}: check the path")
    if cause := _certain_miss(path_or_hub_id):
        raise _not_cached(cause)
    from huggingface_hub import constants, errors, snapshot_download  # takes half a second to import

    patterns = [*_CONFIGS, *(["*.safetensors"] if weights else [])]
    try:
        return Path(
            snapshot_download(path_or_hub_id, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"])
        )
    except errors.HFValidationError as error:
        raise ModelError(f"it is not a hub id ({error}): check the name, or give a directory") from error
    except errors.GatedRepoError as error:
        raise ModelError(
            "the hub gives it only to accounts that accepted its terms: accept them on its page, and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            "the hub has no such model, or it is private: check the name, or set HF_TOKEN to a token that may read it"
        ) from error
    except (OSError, errors.HfHubHTTPError) as error:
        cause = _OFFLINE if constants.HF_HUB_OFFLINE else next(iter(str(error).splitlines()), "")
        raise _not_cached(cause) from error


def _certain_miss(hub_id: str) -> str | None:
    """Why the hub cannot be reached, if the cache has no snapshot of `hub_id`. None: it may be there, or the hub may be
    reached; then the hub's own client decides.

    Imports only a small module of the hub's client, so that a wrong name is an error at once.
    """
    if "huggingface_hub.utils" in sys.modules:  # nothing to save; and the program may have changed how it connects
        return None
    from huggingface_hub import constants

    snapshots = f"{constants.HF_HUB_CACHE}/models--{'--'.join(hub_id.split('/'))}/snapshots"
    if os.path.isdir(snapshots):  # noqa: PTH112 - Path.is_dir raises if a parent cannot be read
        return None
    if constants.HF_HUB_OFFLINE:
        return _OFFLINE
    host = urlsplit(constants.ENDPOINT).hostname
    if not host or any(name.lower().endswith("_proxy") for name in os.environ):  # a proxy may find the host
        return None
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        return f"{host}: {error.strerror}"
    except UnicodeError:  # not the form of a host name
        pass
    return None


def _not_cached(cause: str) -> ModelError:
    from huggingface_hub import constants

    return ModelError(
        f"it is not complete in the cache {constants.HF_HUB_CACHE}, and the hub cannot be reached ({cause}): "
        "check the network and HF_ENDPOINT, fetch the model beforehand, or give a directory"
    )


def check_directory(directory: Path) -> None:
    """Raise ModelError with cause and remedy unless the directory can contain a model that Sidestream serves."""
    check_config(directory)
    check_weights_exist(directory)


def check_config(directory: Path) -> None:
    """The part of `check_directory` that needs no weights. A model on the hub can be checked with its configs alone."""
    _refuse_adapter(directory)
    if not (directory / CONFIG).exists():
        _refuse_without_config(directory)
    check_files_of(directory)
    config = read_json(directory / CONFIG)
    if not config.get("model_type"):
        raise ModelError(f"{directory / CONFIG} has no model_type: it is no transformers config")
    _refuse_own_code(config)
    _refuse_su_rope(config)
    if config.get("transformers_weights"):  # transformers would load these weights; Sidestream does not
        raise ModelError(
            f"its config.json names other weights, {config['transformers_weights']!r} (transformers_weights): "
            f"Sidestream reads only {WEIGHTS} or {INDEX}; rename the file, and remove the entry"
        )


def check_weights_exist(directory: Path) -> None:
    """The part of `check_directory` for weights. Raises ModelError, which names any weights in other formats."""
    if not any((directory / name).exists() for name in (WEIGHTS, INDEX)) and not any(directory.glob("*.gguf")):
        raise ModelError(f"{directory} has no {WEIGHTS} and no {INDEX}: {_other_weights(directory)}")


def _refuse_adapter(directory: Path) -> None:
    """Refuse a LoRA adapter: transformers without peft ignores it silently, and transformers with peft may load another
    base model.
    """
    adapters = sorted(path.name for path in directory.glob("adapter_model*"))
    if (directory / ADAPTER_CONFIG).exists():
        base = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path") or "an unnamed base model"
        adapters.insert(0, ADAPTER_CONFIG)
    elif adapters:
        base = "an unnamed base model"
    else:
        return
    merge = (
        f"merge it into {base} (PeftModel.merge_and_unload, then save_pretrained) and give the merged model's directory"
    )
    if (directory / "config.json").exists():
        raise ModelError(
            f"{directory} holds a LoRA adapter ({adapters[0]}) beside the model, and adapters are not applied: "
            f"{merge}, or move the adapter's files away to serve the model without it"
        )
    raise ModelError(f"{directory} holds a LoRA adapter ({adapters[0]}) for {base}, not a model: {merge}")


def _refuse_without_config(directory: Path) -> None:
    names = sorted(path.name for path in directory.iterdir())
    if not names:
        raise ModelError(
            f"{directory} is empty: give a directory with config.json, {WEIGHTS} and tokenizer.json, "
            "as transformers saves it"
        )
    if any(name.endswith((".gguf", ".bin", ".pt", ".pth")) or name.startswith("consolidated") for name in names):
        raise ModelError(f"{directory} has no config.json: {_other_weights(directory)}")


def _other_weights(directory: Path) -> str:
    """Text for an error: the weights in another format that the directory has, and the remedy."""
    gguf = sorted(path.name for path in directory.glob("*.gguf"))
    if gguf:
        return (
            f"{gguf[0]} is a GGUF file; put config.json, generation_config.json and the tokenizer's files of the model "
            "that it was made from beside it (hf download OWNER/NAME --include '*.json'; no weights are needed)"
        )
    patterns = ("pytorch_model*.bin", "*.pt", "*.pth")
    pickles = sorted(path.name for pattern in patterns for path in directory.glob(pattern))
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which can run code while it is read, so Sidestream does not read it; "
            "fetch the model in safetensors format, or convert it with transformers' save_pretrained if you trust it"
        )
    original = sorted(path.name for path in directory.glob("consolidated*"))
    if original:
        return f"{original[0]} is in its publisher's own layout; fetch the model in transformers' layout"
    return "fetch the weights, in safetensors format"


def _refuse_own_code(config: dict[str, Any]) -> None:
    if not config.get("auto_map"):
        return
    from transformers import CONFIG_MAPPING  # takes seconds to import; few checkpoints contain code

    if config["model_type"] not in CONFIG_MAPPING:
        raise ModelError(
            f"its model_type {config['model_type']!r} needs code of its own (auto_map in config.json), "
            "which Sidestream never runs: choose a model of a type that transformers knows, "
            "or install a newer transformers that knows this type"
        )


def _refuse_su_rope(config: dict[str, Any]) -> None:
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field)
        if isinstance(rope, dict) and "su" in (rope.get("type"), rope.get("rope_type")):
            raise ModelError(
                f"its config.json has {field} of type 'su', an old name of 'longrope' that transformers no longer "
                "reads: write 'longrope' there"
            )
