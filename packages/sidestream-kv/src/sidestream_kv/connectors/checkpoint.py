"""A fingerprint of a checkpoint that takes milliseconds: another engine's blocks must not be served to other weights."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from sidestream_kv.errors import ConfigError

_SAMPLES, _SAMPLE_BYTES, _WHOLE_BYTES = 64, 4096, 1 << 20


def fingerprint_of(model: str) -> str:
    """Hash of the checkpoint's config and weights: all bytes of small files, and of larger ones their size, their
    first MiB (where safetensors have shapes and dtypes) and 64 samples.

    model  a directory, or a hub id whose snapshot is in the hub's cache
    Raises ConfigError if neither is there: give `fingerprint` then.
    """
    directory = Path(model) if os.path.isdir(model) else _snapshot(model)  # noqa: PTH112
    digest = hashlib.blake2b(digest_size=16)
    files = sorted(path for path in directory.iterdir() if path.suffix in (".json", ".safetensors", ".bin", ".gguf"))
    if not files:
        raise ConfigError(f"{directory} has no weights to take a fingerprint of: give the tier `fingerprint`")
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(_WHOLE_BYTES))
            for sample in range(_SAMPLES if size > _WHOLE_BYTES else 0):
                file.seek(_WHOLE_BYTES + (size - _WHOLE_BYTES) * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _snapshot(model: str) -> Path:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}"
    try:
        return cache / "snapshots" / (cache / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        raise ConfigError(
            f"the weights of {model} are not in {cache}, so blocks of other weights could not be told apart: give the "
            "tier `fingerprint`, a name of these weights"
        ) from None
