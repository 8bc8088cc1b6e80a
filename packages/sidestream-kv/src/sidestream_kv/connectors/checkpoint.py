"""A fingerprint of a checkpoint's files, without reading all of them: blocks must not be served to other weights."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from sidestream_kv.errors import ConfigError

_SAMPLES, _SAMPLE_BYTES, _WHOLE_BYTES = 64, 4096, 1 << 20


def fingerprint_of(model: str, *, revision: str | None = None, download_dir: str | None = None) -> str:
    """Hash of the checkpoint's config and weights: all bytes of small files, and of larger ones their size, their
    first MiB (where safetensors have shapes and dtypes) and 64 samples.

    model         a directory, a file, or a hub id whose snapshot is in the hub's cache
    revision      branch, tag or commit of a hub id
    download_dir  the hub's cache, if it is not in the usual place

    Raises ConfigError if neither is there.
    """
    path = Path(model)
    directory = path if path.exists() else _snapshot(model, revision or "main", download_dir)
    inside = directory.iterdir() if directory.is_dir() else [directory]
    files = sorted(file for file in inside if file.suffix in (".json", ".safetensors", ".bin", ".pt", ".gguf"))
    if not any(file.suffix != ".json" for file in files):
        raise ConfigError(f"{directory} has no weights to take a fingerprint of: give `fingerprint`, a name of them")
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_WHOLE_BYTES))
            for sample in range(_SAMPLES if size > _WHOLE_BYTES else 0):
                opened.seek(_WHOLE_BYTES + (size - _WHOLE_BYTES) * sample // _SAMPLES)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _snapshot(model: str, revision: str, download_dir: str | None) -> Path:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(download_dir or os.environ.get("HF_HUB_CACHE") or home / "hub")
    cache = hub / f"models--{model.replace('/', '--')}"
    ref = cache / "refs" / revision
    snapshot = cache / "snapshots" / (ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision)
    if not snapshot.is_dir():
        raise ConfigError(
            f"the weights of {model} ({revision}) are not in {cache}, so blocks of other weights could not be told "
            "apart: give `fingerprint`, a name of these weights"
        )
    return snapshot
