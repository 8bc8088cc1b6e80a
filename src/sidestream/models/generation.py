"""A checkpoint's sampling defaults, from its generation_config.json.

Reads one JSON file; runs no code of the checkpoint. Called while a model loads, before its weights are read.
"""

from __future__ import annotations

from pathlib import Path

from sidestream.checkpoint_files import GENERATION_CONFIG, read_json
from sidestream.config import MODEL_OPTIONS, SamplingDefaults
from sidestream.errors import ModelError, RequestRejected


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """The sampling defaults of the checkpoint in `directory`; neutral values for absent fields.

    As in vLLM and SGLang, `do_sample` is not read: many chat checkpoints give a temperature but no `do_sample`, and
    with transformers' default of it all of them would be greedy. Raises ModelError with file, field, value, bound and
    remedy.
    """
    path = directory / GENERATION_CONFIG
    found = read_json(path) if path.exists() else {}
    given = {name: found[name] for name in MODEL_OPTIONS if found.get(name) is not None}
    if given.get("top_k") == -1:  # vLLM's spelling of "off"
        given["top_k"] = 0
    try:
        return SamplingDefaults(given)
    except RequestRejected as error:
        remedy = "correct the file, or ignore its sampling defaults with --generation-config none"
        raise ModelError(f"{path}: {error}; {remedy}") from error
