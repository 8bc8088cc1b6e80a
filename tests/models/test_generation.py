"""What a checkpoint's generation_config.json says of sampling, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidestream.config import MODEL_OPTIONS, NEUTRAL, SamplingDefaults, SamplingParams
from sidestream.errors import ModelError, RequestRejected
from sidestream.models.generation import sampling_defaults

FIELDS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}


def checkpoint(directory: Path, fields: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return directory


def test_sampling_defaults_have_all_five_fields_and_no_others(tmp_path: Path) -> None:
    others = {"do_sample": False, "eos_token_id": [1, 2], "num_beams": 4, "transformers_version": "4.51.0"}
    assert sampling_defaults(checkpoint(tmp_path, {**FIELDS, **others})) == SamplingDefaults(FIELDS)


@pytest.mark.parametrize(
    "fields", [None, {}, dict.fromkeys(FIELDS), {"top_k": -1}], ids=["no file", "empty", "null", "top_k -1"]
)
def test_fields_missing_in_generation_config_have_neutral_defaults(
    tmp_path: Path, fields: dict[str, Any] | None
) -> None:
    defaults = sampling_defaults(tmp_path if fields is None else checkpoint(tmp_path, fields))
    assert defaults == NEUTRAL
    assert {name: defaults[name] for name in FIELDS} == {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("temperature", "0.6", r"a number in \[0\.0, 100\.0\]"),
        ("temperature", 10**400, r"a number in \[0\.0, 100\.0\]"),
        ("top_k", -2, r"a whole number in \[0, \d+\]"),
        ("top_k", 2.5, r"a whole number in \[0, \d+\]"),
        ("top_p", 0, r"a number in \(0\.0, 1\.0\]"),
        ("min_p", 1.5, r"a number in \[0\.0, 1\.0\]"),
        ("repetition_penalty", [1.1], r"a number in \(0\.0, 10\.0\]"),
    ],
)
def test_a_bad_value_is_refused_with_file_field_and_bound(tmp_path: Path, field: str, value: Any, bound: str) -> None:
    words = (
        rf"generation_config\.json: {field} is .+: it must be {bound}; "
        "correct the file, or .+ --generation-config none$"
    )
    with pytest.raises(ModelError, match=words):
        sampling_defaults(checkpoint(tmp_path, {field: value}))


@pytest.mark.parametrize("text", ["{", "[]", '"top_k"'])
def test_a_file_that_holds_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        sampling_defaults(tmp_path)


def test_a_request_may_override_each_default_even_by_a_neutral_value() -> None:
    defaults = SamplingDefaults(FIELDS)
    assert set(FIELDS) == set(MODEL_OPTIONS)
    untouched = SamplingParams().spec(seed=1, eos_ids=(), defaults=defaults)
    assert {name: untouched.options[name] for name in FIELDS} == FIELDS
    for name in FIELDS:
        given = SamplingParams(**{name: NEUTRAL[name]}).spec(seed=1, eos_ids=(), defaults=defaults)
        assert {other: given.options[other] for other in FIELDS} == {**FIELDS, name: NEUTRAL[name]}


def test_an_error_about_an_unknown_default_names_the_nearest_option() -> None:
    with pytest.raises(RequestRejected, match=r"no option top_n; did you mean top_[kp]"):
        SamplingDefaults({"top_n": 1})


def test_str_of_sampling_defaults_shows_non_neutral_values() -> None:
    assert str(SamplingDefaults({"temperature": 0.6, "top_k": 20})) == "temperature 0.6, top_k 20"
    assert str(SamplingDefaults()) == "temperature 1, no filters, no penalties"
