"""From a directory or a hub id to a model that is known to be served right.

Cheap refusals come first: config, then weight files, then the weights, then the self-check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from sidestream.config import unknown_name
from sidestream.errors import ConfigError, ModelError
from sidestream.kv.layout import DTYPE_BYTES
from sidestream.models.adapter import PagedModel
from sidestream.models.check import check_paged, reference
from sidestream.models.facts import layout_of, max_positions, refuse_unservable, takes_long_rope
from sidestream.models.kept import keep_compiled
from sidestream.models.rope import fix_longrope
from sidestream.models.weights import check_files, digest_of_files, fingerprint_of, pack_linears, read_json

# Weights as safetensors only: the other formats run code while they are read.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_CONFIGS = ["*.json", "*.jinja", "*.model", "*.txt"]
_CPU = torch.device("cpu")


def load_model(
    path_or_hub_id: str, *, dtype: str = "auto", block_tokens: int, device: torch.device = _CPU, max_model_len: int | None = None
) -> PagedModel:
    """Load, check and fingerprint a model in transformers' format; a hub id is downloaded first, a directory needs no network.

    dtype `"auto"` keeps that of the checkpoint. max_model_len: tokens that requests will have at most, None: as many as the
    model can be served with; of a model with LongRoPE it chooses the factors, and so its KV and its fingerprint. The weights are read on the host and then moved to `device`, where the check runs too;
    at the end there is one copy of them (on a CPU, an embedding that is the output matrix too may be there in two orders). Raises
    ModelError with the reason when the model cannot be read, does not fit, or cannot be served right.
    """
    if dtype != "auto" and dtype not in DTYPE_BYTES:
        raise ModelError(unknown_name("dtype", dtype, ("auto", *DTYPE_BYTES)))
    name = Path(path_or_hub_id).name
    with _about(name):
        directory = local_directory(path_or_hub_id)
        config = _read_config(directory)
        refuse_unservable(config)
        layout_of(config, dtype="float32", block_tokens=block_tokens)
        check_files(directory)
        module = _load(directory, config, dtype)
        layout = layout_of(module.config, dtype=str(module.dtype).removeprefix("torch."), block_tokens=block_tokens)
        long_rope = takes_long_rope(config, max_model_len=max_model_len)
        fix_longrope(module, long=long_rope)
        # On the host: the name of a model does not say where it runs.
        fingerprint = fingerprint_of(module, variant="long rope" if long_rope else "")
        if device.type == "cuda":
            keep_compiled()  # the check launches the first kernels
        module.to(device)
        model = PagedModel(
            module,
            name=name,
            layout=layout,
            max_model_len=max_positions(module.config, max_model_len=max_model_len),
            eos_token_ids=_eos_ids(module),
            fingerprint=fingerprint,
        )
        expected = reference(model)
        pack_linears(module)
        check_paged(model, expected)
    return model


def kv_token_bytes(path_or_hub_id: str, *, dtype: str = "auto") -> int:
    """Bytes that one token's KV takes, all layers; reads the config only. Raises ModelError."""
    with _about(Path(path_or_hub_id).name):
        config = _read_config(_directory(path_or_hub_id, _CONFIGS))
        refuse_unservable(config)
        stored = str(config.dtype or torch.float32).removeprefix("torch.")
        return layout_of(config, dtype=stored if dtype == "auto" else dtype, block_tokens=1).token_bytes


def weights_digest(path_or_hub_id: str) -> str:
    """`digest_of_files` of a model that could be served; one of a hub is downloaded first. Raises ModelError, as `load_model` would."""
    with _about(Path(path_or_hub_id).name):
        directory = local_directory(path_or_hub_id)
        refuse_unservable(_read_config(directory))
        check_files(directory)
        return digest_of_files(directory)


@contextlib.contextmanager
def _about(name: str) -> Iterator[None]:
    """Name the model in every reason; what transformers raises is a reason too."""
    try:
        with quiet():
            yield
    except ConfigError as error:
        raise ModelError(f"model {name}: {error}") from error
    except torch.OutOfMemoryError as error:
        raise ModelError(f"model {name}: it does not fit the GPU ({str(error).splitlines()[0]}); choose a smaller one or dtype") from error
    except Exception as error:  # transformers and the model's own code raise anything here
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelError(f"model {name}: transformers cannot load or run it ({type(error).__name__}: {reason})") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no warnings of transformers meanwhile; what matters in them becomes a ModelError."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def local_directory(path_or_hub_id: str) -> Path:
    """Where a model's files are, fetched first if they must be. Raises ModelError."""
    return _directory(path_or_hub_id, _FILES)


def _directory(path_or_hub_id: str, patterns: list[str]) -> Path:
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or path_or_hub_id.startswith((".", "~")) or path_or_hub_id.count("/") > 1:
        raise ModelError(f"there is no directory {path}: check the path")
    return Path(snapshot_download(path_or_hub_id, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))


def _read_config(directory: Path) -> PreTrainedConfig:
    kind = read_json(directory / "config.json").get("model_type")
    if not kind:
        raise ModelError(f"{directory / 'config.json'} has no model_type: it is no transformers config")
    if (directory / "generation_config.json").exists():
        read_json(directory / "generation_config.json")  # transformers would go on without it, and never stop an answer
    config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return config


def _load(directory: Path, config: PreTrainedConfig, dtype: str) -> Any:
    module, loaded = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        attn_implementation="eager",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    for problem, names in (("lack", loaded["missing_keys"]), ("have the wrong shape for", loaded["mismatched_keys"])):
        if names:
            # transformers fills these with random numbers and goes on.
            first = sorted(str(name) for name in names)[0]
            raise ModelError(
                f"its weight files {problem} {len(names)} of the model's tensors, such as {first}: fetch weights that fit config.json"
            )
    return module.eval()


def _eos_ids(module: Any) -> tuple[int, ...]:
    ids = module.generation_config.eos_token_id if module.generation_config is not None else None
    ids = getattr(module.config, "eos_token_id", None) if ids is None else ids
    return tuple(ids) if isinstance(ids, (list, tuple)) else () if ids is None else (int(ids),)
