"""The table of sampling options, and all that derives from its rows."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest

from sidestream.cli.options import sampling_params
from sidestream.config import MODEL_OPTIONS, SAMPLING_OPTIONS, SamplingParams
from sidestream.errors import RequestRejected
from sidestream.ops.rules import COLUMNS, SamplingTensors, sampling_row
from sidestream.server.fields import _CHAT, _TEXT

_every_option = pytest.mark.parametrize("name", SAMPLING_OPTIONS)


@_every_option
def test_an_option_left_out_has_the_models_default_or_the_neutral_value(name: str) -> None:
    row, unset = SAMPLING_OPTIONS[name], getattr(SamplingParams(), name)
    assert unset is None if name in MODEL_OPTIONS else unset == row.neutral
    assert get_type_hints(SamplingParams)[name] == (row.kind | None if unset is None else row.kind)
    assert SamplingParams().spec(seed=0, eos_ids=()).options[name] == row.neutral


@_every_option
def test_a_value_beyond_an_options_range_is_refused_by_name_and_bound(name: str) -> None:
    row = SAMPLING_OPTIONS[name]
    for value in (row.kind(row.low - 1), row.kind(row.high + 1), "1", True, float("nan")):
        with pytest.raises(RequestRejected, match=rf"^{name} is .+: it must be a (whole )?number in [\[(]{row.low}, "):
            SamplingParams(**{name: value})
    SamplingParams(**{name: row.kind(row.high)})


@_every_option
def test_an_option_is_a_field_of_both_apis_and_an_option_of_commands(name: str) -> None:
    unset = getattr(SamplingParams(), name)
    for fields in (_CHAT, _TEXT):
        assert fields.model_fields[name].default == unset
    assert inspect.signature(sampling_params).parameters[name].default == unset


@_every_option
def test_an_option_reaches_its_column_on_the_device(name: str) -> None:
    row = SAMPLING_OPTIONS[name]
    value = row.kind((row.neutral + row.high) / 2)
    tensors = SamplingTensors.greedy(3, "cpu")
    spec = SamplingParams(**{"temperature": 0.5, name: value}).spec(seed=0, eos_ids=())
    tensors.numbers[1] = tensors.numbers.new_tensor(sampling_row(spec, prompt_len=7))
    assert tensors[name].tolist()[1] == value
    assert tensors.penalised.tolist() == [False, row.penalty, False]
    assert tensors.prompt_len.tolist() == [0, 7, 0]
    assert set(COLUMNS) == {*SAMPLING_OPTIONS, "penalised", "seed", "prompt_len"}
