"""Loads a model from a directory or a hub id, and checks that it can be served correctly.

Cheap checks come first: config, then weight files, then the weights, then the self-check. Error messages say "it" for
the model, because `naming_model` puts the model's name in front.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, DeepseekV3Config, GenerationConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from sidestream.checkpoint_files import CONFIG, read_json
from sidestream.config import KV_CACHE_DTYPES, EngineConfig, default_block_tokens
from sidestream.errors import ConfigError, ModelError, ProcessFailed
from sidestream.models.adapter import PagedModel
from sidestream.models.checkpoint_tensors import StoredTensor, unused_names
from sidestream.models.compile_cache import use_compile_cache
from sidestream.models.config_checks import (
    ModelParts,
    check_servable,
    has_recurrent_states,
    layer_heads,
    max_positions,
    parts_of,
    scaled_length,
    takes_long_rope,
)
from sidestream.models.directory import check_config, local_directory, name_of
from sidestream.models.divided import Division
from sidestream.models.fp8 import Kept, kept_eight_bits
from sidestream.models.gguf_file import gguf_in
from sidestream.models.invariant_checks import arithmetic, make_invariant
from sidestream.models.packed import KeptPacked, gguf_of, kept_packed, packing
from sidestream.models.precision import Precision, choose_precision
from sidestream.models.recurrent import unbind_time_steps
from sidestream.models.rope import fix_dynamic_rope, fix_longrope
from sidestream.models.self_check import Reference, attention_error, check_paged, reference
from sidestream.models.shard import ShardCheck, check_same, check_units, rank_fingerprint, retie, shard, share_of
from sidestream.models.text_part import find_base_model, text_config, text_module, whole_class
from sidestream.models.weights import (
    Checkpoint,
    check_files,
    check_finite,
    digest_of_files,
    fingerprint_of,
    pack_linears,
    stored_dtype_and_bytes,
)
from sidestream_kv.config import unknown_name
from sidestream_kv.device.group import Group
from sidestream_kv.device.kinds import CPU, on_gpu, on_host
from sidestream_kv.device.thread_limits import refused_threads_named
from sidestream_kv.kv.layout import DTYPE_BYTES, FP8, KVLayout

logger = logging.getLogger(__name__)

_CPU = torch.device(CPU)
# Kinds that only code in their own repositories defines, and whose definition is that of another kind.
_SAME_AS = {"kimi_k2": DeepseekV3Config}
_FP8_GPU = (8, 9)  # smallest compute capability for which Triton compiles conversions of float8
_KV_ERROR = (
    "model %s: keys and values lie in %s; in the self-check, the attention of a layer differs by %.2g %% from exact "
    "attention, and by %.2g %% with KV in %s"
)
# While transformers builds a model, it replaces functions and defaults of torch. If two threads built models at once,
# one thread could get the dtype of the other, or report tied weights as missing.
_ONE_BUILDS = threading.Lock()


def load_model(
    path_or_hub_id: str,
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    block_tokens: int | None,
    device: torch.device = _CPU,
    max_model_len: int | None = None,
    repack: bool | None = None,
    batch_invariant: bool = False,
    compute_threads: int | None = None,
    group: Group | None = None,
) -> PagedModel:
    """Load, check and fingerprint a model in transformers' format. A hub id is downloaded first; a directory needs no
    network.

    dtype           `"auto"`: the checkpoint's dtype, or float32 on a CPU that computes much faster in float32
                    (`models/precision.py`)
    kv_cache_dtype  see `EngineConfig.kv_cache_dtype`. The self-check runs without, and then the error is measured
    block_tokens    tokens of a block; None: the default for this model and device (`config.default_block_tokens`)
    max_model_len   tokens of the longest request; None: the model's limit. With LongRoPE and dynamic scaling, this
                    number selects the frequencies, and so affects the KV and the fingerprint
    repack          keep repacked copies of packed weights: see `EngineConfig.repack`
    batch_invariant  see `EngineConfig.batch_invariant`; the fingerprint then depends on `compute_threads`, too
    group           the ranks of tensor parallelism, which call this together; the result has this rank's share of the
                    weights and KV heads, and its forward must be called by all ranks together. None: one rank

    Weights are read into host memory and moved to `device`, where the self-check runs. One copy of the weights remains;
    only a tied embedding may exist twice on a CPU, the second time in oneDNN's order. With a group, each rank copies
    its share of one weight after another. Whole weights that keep the checkpoint's dtype take no memory, because the
    files are memory-mapped. Raises ModelError with the reason when the model cannot be read, does not fit, or cannot be
    served correctly, and ProcessFailed when another rank ends.
    """
    _check_dtype(dtype)
    name = name_of(path_or_hub_id)
    with naming_model(name):
        directory = local_directory(path_or_hub_id)
        check_config(directory)
        config = read_config(directory)
        text = check_servable(config)
        ranks = 1 if group is None else group.size
        with _ONE_BUILDS:
            early, _ = _parts_of_rank(text, dtype="float32", block_tokens=block_tokens, device=device, ranks=ranks)
            _in_cache_dtype(early.kv, kv_cache_dtype, device)
            stored = check_files(directory, getattr(config, "quantization_config", None))
            precision = _precision(directory, config, dtype, device)
            logger.info("model %s: %s", name, precision)
            chosen = getattr(torch, precision.dtype)
            kept = _kept(directory, config, stored, device, chosen, ranks=ranks, repack=repack)
            check_units(text, kept.units if isinstance(kept, Kept) else {}, size=ranks)
            module = read_module(directory, config, stored, dtype=chosen, attention="eager", kept=kept)
            served = str(module.dtype).removeprefix("torch.")
            parts, num_heads = _parts_of_rank(
                module.config, dtype=served, block_tokens=block_tokens, device=device, ranks=ranks
            )
        variant = _fix_ropes(module, text, max_model_len) + "unbound time steps" * unbind_time_steps(module)
        # Computed on the host, so that the fingerprint is the same on every device.
        fingerprint = fingerprint_of(module, variant=variant)
        if batch_invariant:
            fingerprint += arithmetic(device, compute_threads)  # rule: keys-tell-invariant-kv
        if on_gpu(device):
            use_compile_cache()  # the self-check launches the first kernels
        divided = _place(module, group, fingerprint, device)
        model = PagedModel(
            module,
            name=name,
            layout=parts.kv,
            state_layout=parts.state,
            max_model_len=max_positions(module.config, max_model_len=max_model_len),
            eos_token_ids=_eos_ids(module),
            fingerprint=fingerprint if group is None else rank_fingerprint(fingerprint, group.rank, group.size),
            weights_fingerprint=fingerprint,
            num_heads=num_heads,
            divided=divided,
        )
        if batch_invariant:
            make_invariant(model, quantised=kept is not None)
        _check(model, kv_cache_dtype)
    return model


def load_for(path: str, config: EngineConfig, *, device: torch.device, group: Group | None = None) -> PagedModel:
    """`load_model` with the options of an engine's config."""
    return load_model(
        path,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        block_tokens=config.block_tokens,
        device=device,
        max_model_len=config.max_model_len,
        repack=config.repack,
        batch_invariant=config.batch_invariant,
        compute_threads=config.compute_threads,
        group=group,
    )


def _check(model: PagedModel, kv_cache_dtype: str) -> None:
    """Run the self-check, after which the model has its final layout and the order of its weights."""
    expected = reference(model)
    model.layout = replace(model.layout, windows=expected.windows)
    pack_linears(model.module)
    check_paged(model, expected)
    if kv_cache_dtype != "auto":
        _keep_kv_in(kv_cache_dtype, model, expected)


def _keep_kv_in(kv_cache_dtype: str, model: PagedModel, expected: Reference) -> None:
    """Change the form of the model's KV, and log the error of attention before and after."""
    exact, layout = attention_error(model, expected), _in_cache_dtype(model.layout, kv_cache_dtype, model.module.device)
    model.layout = layout
    error = attention_error(model, expected)
    logger.info(_KV_ERROR, model.name, layout.dtype, 100 * error, 100 * exact, layout.compute_dtype)


def _in_cache_dtype(layout: KVLayout, kv_cache_dtype: str, device: torch.device) -> KVLayout:
    """The layout, with keys and values in the given form: see `EngineConfig.kv_cache_dtype`. Raises ConfigError."""
    if kv_cache_dtype == "auto":
        return layout
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(unknown_name("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES))
    refused = f"kv_cache_dtype is {kv_cache_dtype}, but"
    if layout.latent_dim:
        raise ConfigError(
            f"{refused} its attention keeps latents, of which every head makes its keys and values: only keys and "
            "values may have 8 bits; leave kv_cache_dtype out"
        )
    if on_gpu(device) and torch.cuda.is_available() and (found := torch.cuda.get_device_capability(device)) < _FP8_GPU:
        raise ConfigError(
            f"{refused} this GPU has the compute capability {found[0]}.{found[1]}, and only from "
            f"{_FP8_GPU[0]}.{_FP8_GPU[1]} on (Ada, Hopper) do GPUs convert float8: leave kv_cache_dtype out"
        )
    return replace(layout, dtype=FP8, read_as=layout.dtype)


def _fix_ropes(module: Any, text: PreTrainedConfig, max_model_len: int | None) -> str:
    """Make rotary embeddings independent of the batch; in place. Returns a name of what was chosen, or nothing."""
    long_rope = takes_long_rope(text, max_model_len=max_model_len)
    fix_longrope(module, long=long_rope)
    if length := scaled_length(text, max_model_len=max_model_len):
        fix_dynamic_rope(module, length)
        return f"rope for {length}"
    return "long rope" if long_rope else ""


def _kept(
    directory: Path,
    config: PreTrainedConfig,
    stored: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    *,
    ranks: int,
    repack: bool | None,
) -> Kept | KeptPacked | None:
    """The weights that stay quantised. Raises ModelError."""
    if (gguf := gguf_of(directory, config)) is not None:
        return kept_packed(gguf, device, dtype, ranks=ranks, repack=repack)
    return kept_eight_bits(stored.state_dict, device, dtype)


def _place(module: Any, group: Group | None, fingerprint: str, device: torch.device) -> Mapping[str, Division]:
    """Move a whole module to `device`, or this rank's share of it. Returns how Linears were divided, by name. Raises
    ModelError.
    """
    if group is None or group.size == 1:
        module.to(device)
        check_finite(module)  # on the device, where it takes least time
        return {}
    check_finite(module)
    check_same(group, fingerprint, device)
    checked = ShardCheck(module)
    divided = shard(module, group, device=device)
    module.to(device)
    retie(module)
    checked.check(module)
    return divided


def _parts_of_rank(
    config: PreTrainedConfig, *, dtype: str, block_tokens: int | None, device: torch.device, ranks: int
) -> tuple[ModelParts, int | None]:
    """Layouts of one rank's KV and recurrent state, and its number of query heads (None: the number in the config).
    Raises ModelError.
    """
    if block_tokens is None:
        block_tokens = default_block_tokens(device.type, recurrent=has_recurrent_states(config))
    parts = parts_of(config, dtype=dtype, block_tokens=block_tokens)
    if ranks == 1:
        return parts, None
    if layer_heads(config):
        raise ModelError(
            f"{config.model_type} has layers that differ in their heads, or read the KV of others, which are not "
            "divided over ranks: run this model on one rank"
        )
    share = share_of(config, size=ranks, dtype=dtype)
    kv_heads = 1 if parts.kv.latent_dim else share.num_kv_heads  # every rank has the whole latents
    return replace(parts, kv=replace(parts.kv, num_kv_heads=kv_heads), state=share.state_layout), share.num_heads


def precision_of(path_or_hub_id: str, *, dtype: str = "auto", device: torch.device = _CPU) -> Precision:
    """The dtype that `load_model` would choose, with the reason; reads no weights. Raises ModelError."""
    _check_dtype(dtype)
    with naming_model(name_of(path_or_hub_id)):
        directory = local_directory(path_or_hub_id, weights=False)
        check_config(directory)
        return _precision(directory, read_config(directory), dtype, device)


def kv_token_bytes(path_or_hub_id: str, *, dtype: str = "auto", device: torch.device = _CPU, ranks: int = 1) -> int:
    """KV bytes of one token in all layers of one rank, in the dtype that `load_model` would choose; reads no weights.
    Raises ModelError.
    """
    return cache_parts(path_or_hub_id, dtype=dtype, block_tokens=1, device=device, ranks=ranks).kv.token_bytes


def cache_parts(
    path_or_hub_id: str,
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    block_tokens: int | None,
    device: torch.device = _CPU,
    ranks: int = 1,
) -> ModelParts:
    """The layouts of a model's KV and recurrent states, in the dtype that `load_model` would choose; reads no weights.

    kv_cache_dtype, block_tokens   as in `load_model`
    ranks          number of ranks of tensor parallelism: with more than one, the layouts are those of each rank

    Raises ModelError, also for a model that the ranks cannot divide.
    """
    _check_dtype(dtype)
    with naming_model(name_of(path_or_hub_id)):
        directory, config, text = _servable_config(path_or_hub_id)
        chosen = _precision(directory, config, dtype, device).dtype
        with _ONE_BUILDS:
            parts, _ = _parts_of_rank(text, dtype=chosen, block_tokens=block_tokens, device=device, ranks=ranks)
        return replace(parts, kv=_in_cache_dtype(parts.kv, kv_cache_dtype, device))


def default_block_tokens_of(path_or_hub_id: str, *, device: torch.device = _CPU) -> int:
    """Tokens of a block that `load_model` would choose; reads only the model's config. Raises ModelError."""
    with naming_model(name_of(path_or_hub_id)):
        _, _, text = _servable_config(path_or_hub_id)
        return default_block_tokens(device.type, recurrent=has_recurrent_states(text))


def _servable_config(path_or_hub_id: str) -> tuple[Path, PreTrainedConfig, PreTrainedConfig]:
    """A servable model's directory, without weights if it had to be downloaded, its config, and that of its text part.
    Raises ModelError.
    """
    directory = local_directory(path_or_hub_id, weights=False)
    check_config(directory)
    config = read_config(directory)
    return directory, config, check_servable(config)


def weights_digest(path_or_hub_id: str) -> str:
    """`digest_of_files` of a servable model; downloads a hub id first. Raises ModelError."""
    with naming_model(name_of(path_or_hub_id)):
        directory = local_directory(path_or_hub_id)
        check_config(directory)
        config = read_config(directory)
        check_servable(config)
        check_files(directory, getattr(config, "quantization_config", None))
        return digest_of_files(directory)


def _check_dtype(dtype: str) -> None:
    if dtype != "auto" and dtype not in DTYPE_BYTES:
        raise ModelError(unknown_name("dtype", dtype, ("auto", *DTYPE_BYTES)))


def _precision(directory: Path, config: PreTrainedConfig, dtype: str, device: torch.device) -> Precision:
    stored, weights_bytes = stored_dtype_and_bytes(directory, getattr(config, "quantization_config", None))
    if config.dtype is not None:
        stored = str(config.dtype).removeprefix("torch.")
    if (gguf := gguf_of(directory, config)) is not None and packing(device) is not None:
        weights_bytes = gguf.num_bytes(packed=True, value_bytes=DTYPE_BYTES[stored])
    return choose_precision(dtype, stored, weights_bytes=weights_bytes, on_cpu=on_host(device))


@contextlib.contextmanager
def naming_model(name: str) -> Iterator[None]:
    """Turn every exception in the block, also exceptions of transformers, into a ModelError with the model's name.
    ProcessFailed passes through.
    """
    try:
        with quiet_transformers(), refused_threads_named():
            yield
    except ConfigError as error:
        raise ModelError(f"model {name}: {error}") from error
    except ProcessFailed:
        raise  # another rank has ended, which is no fault of the model
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"model {name}: it does not fit the GPU ({str(error).splitlines()[0]}); choose a smaller model or dtype"
        ) from error
    except Exception as error:  # transformers and the model's own code may raise any exception here
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelError(
            f"model {name}: transformers cannot load or run it ({type(error).__name__}: {reason})"
        ) from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings inside the context."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def config_directory(path_or_hub_id: str) -> Path:
    """The directory of a model's configs; downloads a hub id first, without weights. Raises ModelError."""
    with naming_model(name_of(path_or_hub_id)):
        return local_directory(path_or_hub_id, weights=False)


def read_config(directory: Path) -> PreTrainedConfig:
    """The config in a directory that passed `check_config`; beside a GGUF file, of the text part. Raises ModelError."""
    kind: Any = _SAME_AS.get(read_json(directory / CONFIG).get("model_type", ""))
    try:
        config: PreTrainedConfig = (kind or AutoConfig).from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        if kind is not None:
            config.model_type = kind.model_type
    except Exception as error:  # transformers raises errors of many types; some have their cause on the second line
        reason = " ".join(str(error).split())[:400] or repr(error)
        raise ModelError(f"{directory / CONFIG}: transformers cannot read it ({reason}): correct the file") from error
    return config if gguf_in(directory) is None else text_config(config)  # such a file has the text part alone


def read_module(
    directory: Path,
    config: PreTrainedConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | str,
    attention: str,
    kept: Kept | KeptPacked | None = None,
) -> Any:
    """Transformers' module with the weights of a directory. Every stored weight has a place in the module.

    `checkpoint`: what `check_files` found in the directory. `kept`: weights of it that stay quantised; None: all
    weights get `dtype`. Raises ModelError when the weights do not match the module; exceptions of transformers pass
    through.
    """
    stored = checkpoint.tensors
    text = text_config(config)
    if text.num_hidden_layers > len(stored):  # refused here, because making the layers could take hours
        raise ModelError(
            f"{directory / CONFIG} gives num_hidden_layers as {text.num_hidden_layers}, but the weight files hold "
            f"only {len(stored)} tensors: fetch weights and config.json of the same model"
        )
    how = {
        "dtype": dtype,
        "attn_implementation": attention,
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    if checkpoint.state_dict is None:
        module, loaded = whole_class(config).from_pretrained(
            directory, config=config, use_safetensors=True, local_files_only=True, trust_remote_code=False, **how
        )
    else:
        state_dict = checkpoint.state_dict if kept is None else kept.state_dict
        module, loaded = _from_state_dict(directory, config, state_dict, how)
    for problem, names in (("lack", loaded["missing_keys"]), ("have the wrong shape for", loaded["mismatched_keys"])):
        if names:
            # transformers fills such tensors with random numbers and continues.
            first = sorted(str(name) for name in names)[0]
            raise ModelError(
                f"its weight files {problem} {len(names)} of the model's tensors, such as {first}: "
                "fetch weights that fit config.json"
            )
    _refuse_surplus(module, stored, set(loaded["unexpected_keys"]))
    _refuse_contradicted_tie(module)
    if kept is not None:
        kept.restore(module)
    return find_base_model(module if text is config else text_module(module)).eval()


def _from_state_dict(
    directory: Path, config: PreTrainedConfig, state_dict: Mapping[str, Any], how: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """Transformers' module with the weights of a state dict, which are not quantised any more, and how loading went."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    module, loaded = whole_class(plain).from_pretrained(
        None, config=plain, state_dict=state_dict, trust_remote_code=False, **how
    )
    with contextlib.suppress(OSError):  # the directory has no generation_config.json
        module.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return module, loaded


def _refuse_surplus(module: Any, stored: Mapping[str, StoredTensor], unexpected: set[str]) -> None:
    """Refuse tensors without a place in the module: transformers would ignore them, and the answers would be wrong.

    `unexpected`: the stored names that transformers did not use, except names that transformers ignores for this model
    class (heads for speculative decoding, old buffers).
    """
    prefix = f"{module.base_model_prefix}."
    # transformers accepts a name with and without the prefix. If both are stored, it uses one tensor and drops the
    # other.
    twice = {name for name in stored if name.startswith(prefix) and name.removeprefix(prefix) in stored}
    surplus = sorted((unexpected - unused_names(stored, unexpected)) | twice)
    if surplus:
        raise ModelError(
            f"its weight files hold {len(surplus)} tensors that a model of this config.json does not use, such as "
            f"{surplus[0]}: fetch weights and config.json of the same model"
        )


def _refuse_contradicted_tie(module: Any) -> None:
    """Refuse a config that ties two tensors when both are stored and differ. transformers uses both, other engines use
    only one, so it is unclear which result was intended.
    """
    for name, source in module.get_expanded_tied_weights_keys(all_submodels=True).items():
        if module.get_parameter(name) is not module.get_parameter(source):
            raise ModelError(
                f"its config.json ties {name} to {source} (tie_word_embeddings), but its weight files hold a {name} "
                "that differs: set tie_word_embeddings to false if the model was trained so, "
                f"or remove {name} from the files"
            )


def _eos_ids(module: Any) -> tuple[int, ...]:
    ids = module.generation_config.eos_token_id if module.generation_config is not None else None
    ids = getattr(module.config, "eos_token_id", None) if ids is None else ids
    return tuple(ids) if isinstance(ids, (list, tuple)) else () if ids is None else (int(ids),)
