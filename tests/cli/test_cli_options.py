"""Options become configs; their defaults are the configs' own."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from sidestream.cli.options import engine_config, options_of, sampling_params
from sidestream.cli.serve import serve
from sidestream.cli.server_options import server_options
from sidestream.config import EngineConfig, SamplingParams, SpeculativeConfig
from sidestream.errors import ConfigError
from sidestream.server import ServerOptions
from sidestream_kv.config import OffloadConfig


def test_without_options_the_configs_have_their_defaults() -> None:
    assert engine_config() == EngineConfig()
    assert sampling_params() == SamplingParams()


def test_the_servers_defaults_are_those_of_its_options() -> None:
    defaults = {name: one.default for name, one in inspect.signature(server_options).parameters.items()}
    assert server_options(**defaults) == ServerOptions()
    serves = inspect.signature(serve).parameters
    assert {name: serves[name].default for name in defaults} == defaults
    assert ServerOptions().address == ("127.0.0.1", 8000)
    assert defaults["max_body"] is None
    assert defaults["allowed_origins"] is None


def test_every_server_option_reaches_its_field() -> None:
    fields = {name.removesuffix("_s").removesuffix("_bytes") for name in ServerOptions.__dataclass_fields__}
    names = {"drain_seconds": "drain"}
    given = {names.get(name, name) for name in inspect.signature(server_options).parameters}
    assert fields - given == {"ssl_keyfile_password", "retry_after"}
    assert given <= fields


def test_every_engine_option_reaches_its_field() -> None:
    sizes = {"block_tokens": 8, "chunk_tokens": 64, "token_budget": 256, "max_running": 4, "max_waiting": 5}
    more = {"max_model_len": 100, "threads": 3, "salt": "s"}
    named = {"generation_config": "none", "repack": False, "kv_cache_dtype": "fp8"}
    config = engine_config(dtype="float32", kv_memory="2GiB", **sizes, **more, **named)
    assert config == EngineConfig("float32", "auto", "2GiB", 8, 64, 256, 4, 5, 100, 3, "s", **named)


def test_every_sampling_option_reaches_its_field() -> None:
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 7, "ignore_eos": True}
    options |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    options |= {"max_tokens": 9, "min_tokens": 2}
    assert sampling_params(**options, stop=["a", "b"]) == SamplingParams(**options, stop=("a", "b"))


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, None),
        ({"speculative": "ngram"}, SpeculativeConfig()),
        ({"speculative": "ngram", "max_drafts": 7}, SpeculativeConfig(max_drafts=7)),
        ({"speculative": "grammar"}, SpeculativeConfig("grammar")),
        ({"speculative": "ngram", "max_draft_slowdown": 0.1}, SpeculativeConfig(max_draft_slowdown=0.1)),
        ({"speculative": "draft", "draft_model": "small"}, SpeculativeConfig("draft", model="small")),
    ],
)
def test_speculation_is_on_if_one_of_its_options_is_given(
    options: dict[str, Any], config: SpeculativeConfig | None
) -> None:
    assert engine_config(**options).speculative == config


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_drafts": 7}, "--max-drafts is 7, but nothing is drafted: give --speculative too"),
        ({"speculative": "gram"}, "no proposer gram; did you mean ngram"),
        ({"speculative": "draft"}, "--speculative draft needs a draft model: give --draft-model"),
        ({"draft_model": "small"}, "--draft-model is small, but nothing is drafted: give --speculative draft too"),
        (
            {"speculative": "ngram", "draft_model": "small"},
            "--draft-model is small, but --speculative is ngram: leave it out, or choose --speculative draft",
        ),
        ({"max_draft_slowdown": 0.1}, "--max-draft-slowdown is 0.1, but nothing is drafted: give --speculative too"),
        ({"speculative": "ngram", "max_draft_slowdown": -1.0}, "max_draft_slowdown is -1.0: give a share of 0 or more"),
        ({"speculative": "ngram", "max_drafts": 0}, "--max-drafts is 0: give 1 to 16, or leave out --speculative"),
    ],
)
def test_inconsistent_speculation_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        engine_config(**options)


def test_offload_is_on_if_host_memory_or_a_disk_is_given() -> None:
    assert engine_config().offload is None
    assert engine_config(offload_host="2GiB").offload == OffloadConfig(host="2GiB")
    assert engine_config(offload_disk=[Path("kv")]).offload == OffloadConfig(disk=(Path("kv"),))
    everything = engine_config(
        offload_host="2GiB", offload_disk=[Path("kv")], offload_disk_capacity="3GiB", load_deadline=4
    ).offload
    assert everything == OffloadConfig("2GiB", (Path("kv"),), "3GiB", 4)


def test_tiers_are_given_as_json_or_in_a_file_that_keeps_their_passwords(tmp_path: Path) -> None:
    text = '{"redis": {"url": "redis://:sesame@host"}}'
    (tmp_path / "tiers").write_text(text)
    for given in (text, str(tmp_path / "tiers")):
        offload = engine_config(offload_tiers=given).offload
        assert offload == OffloadConfig(tiers={"redis": {"url": "redis://:sesame@host"}})
        assert "sesame" not in repr(offload)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("redis://:sesame@host", "--offload-tiers names a file that cannot be read (No such file or directory)"),
        ('{"redis": "redis://:sesame@host"}', "--offload-tiers has no options by name: give {"),
        ('{"redis": {"url": "redis://:sesame@host"}', "--offload-tiers is no JSON"),
    ],
)
def test_tiers_that_are_no_json_are_refused_without_repeating_them(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        engine_config(offload_tiers=given)
    assert "sesame" not in str(refused.value)


def test_a_command_has_its_own_options_and_those_of_its_configs() -> None:
    seen = []

    @options_of(config=engine_config)
    def command(name: str = "x", *, config: EngineConfig) -> None:
        seen.append((name, config))

    names = list(inspect.signature(command).parameters)
    assert names[0] == "name"
    assert {"kv_memory", "offload_disk"} <= set(names)
    assert "config" not in names
    command(
        **{parameter.name: parameter.default for parameter in inspect.signature(command).parameters.values()}
        | {"block_tokens": 32}
    )
    assert seen == [("x", EngineConfig(block_tokens=32))]


def test_an_option_that_a_config_already_has_is_refused() -> None:
    with pytest.raises(TypeError, match="options twice: dtype"):

        @options_of(config=engine_config)
        def command(dtype: str, config: EngineConfig) -> None: ...
