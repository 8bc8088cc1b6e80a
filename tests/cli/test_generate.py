"""One prompt, one answer, from a real engine with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_runner import Run

from proof.tiny_models import tiny_model_dir

ENGINE = ("--kv-memory", "4MiB", "--threads", "1", "--temperature", "0", "--ignore-eos", "--max-tokens", "12")


def answer(run: Run, model: Path, *options: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("generate", model, "--json", *options, *ENGINE).stdout)
    return found


def test_the_text_is_printed_and_json_has_its_figures(run: Run, tiny: Path) -> None:
    plain = run("generate", tiny, "--prompt", "The whale", *ENGINE)
    told = run("generate", tiny, "--prompt", "The whale", "--json", *ENGINE)
    assert plain.exit_code == told.exit_code == 0
    answer = json.loads(told.stdout)
    assert plain.stdout == answer["text"] + "\n"
    assert answer["model"] == tiny.name
    assert len(answer["token_ids"]) == 12
    assert answer["finish_reason"] == "length"
    assert answer["prompt_tokens"] == len("The whale")
    assert {"device", "host", "disk"} <= answer["cached"].keys()  # and tiers that other tests have registered
    assert not any(answer["cached"].values())
    assert 0 < answer["ttft_s"] <= answer["seconds"]


def test_json_reports_the_outcome_of_drafts(run: Run, tiny: Path) -> None:
    asked = ("--prompt", "The whale. The whale. The", "--dtype", "float32")
    plain, drafting = (answer(run, tiny, *asked, *more) for more in ((), ("--speculative", "ngram")))
    assert not {"drafted", "accepted"} & plain.keys()
    assert drafting["drafted"] >= drafting["accepted"] >= 0
    assert drafting["drafted"] > 0
    assert drafting["token_ids"] == plain["token_ids"]


def test_the_prompt_may_come_from_a_file_or_from_stdin(run: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("The whale\n", encoding="utf-8")
    wanted = run("generate", tiny, "--prompt", "The whale", *ENGINE).stdout
    assert run("generate", tiny, "--prompt-file", tmp_path / "prompt.txt", *ENGINE).stdout == wanted
    assert run("generate", tiny, *ENGINE, stdin="The whale\n").stdout == wanted


def test_option_chat_formats_the_prompt_with_the_template(run: Run, tiny: Path) -> None:
    ways = ((), ("--chat",), ("--chat", "--system", "Be brief."))
    plain, asked, told = (answer(run, tiny, "--prompt", "Hi", *more) for more in ways)
    assert plain["prompt_tokens"] < asked["prompt_tokens"] < told["prompt_tokens"]


def test_kv_on_disk_serves_the_next_process(run: Run, tiny: Path, tmp_path: Path) -> None:
    tiers = ("--offload-disk", tmp_path / "kv", "--offload-host", "8MiB")
    first, second = (answer(run, tiny, "--prompt", "Call me Ishmael. " * 8, *tiers) for _ in range(2))
    assert first["cached"]["disk"] == 0
    assert second["cached"]["disk"] > 0
    assert second["token_ids"] == first["token_ids"]


def test_the_timeline_is_written(run: Run, tiny: Path, tmp_path: Path) -> None:
    assert run("generate", tiny, "--prompt", "x", "--timeline", tmp_path / "t.json", *ENGINE).exit_code == 0
    events = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    assert "compute" in {event["args"].get("name") for event in events}


def test_a_prompt_that_cannot_be_read_is_refused(run: Run, tmp_path: Path) -> None:
    for data, options, said in (
        (b"\n", (), "the prompt is empty"),
        (b"caf\xe9", (), "standard input is not UTF-8: byte 3 is 0xe9; convert it"),
        (b"", ("--prompt-file", tmp_path / "none"), f"{tmp_path / 'none'} cannot be read: No such file or directory"),
    ):
        result = run("generate", "no-such-model", *options, stdin=data)
        assert result.exit_code == 2
        assert said in result.output


def test_an_error_about_a_missing_prompt_tells_how_to_give_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream.cli.generate._at_terminal", lambda: True)
    result = run("generate", "no-such-model")
    assert result.exit_code == 2
    assert "no prompt: give --prompt TEXT or --prompt-file FILE, or pipe a text in" in result.output


def test_a_prompt_beyond_the_pool_names_the_pools_size(run: Run, tiny: Path) -> None:
    result = run("generate", tiny, "--prompt", "x" * 200, *ENGINE, "--kv-memory", "96KiB")
    assert result.exit_code == 2
    assert "prompt has 200 tokens, the pool holds 128" in result.output


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_models_sampling_defaults_apply_unless_an_option_is_given(run: Run, tmp_path: Path, command: str) -> None:
    model = tiny_model_dir("llama", tmp_path, seed=1)
    (model / "generation_config.json").write_text(
        '{"eos_token_id": 256, "temperature": 20.0, "top_k": 1}', encoding="utf-8"
    )
    options = ("--kv-memory", "4MiB", "--threads", "1", "--ignore-eos", "--max-tokens", "8")

    def answers(*more: str) -> set[str]:
        drawn = [run(command, model, *options, *more, "--seed", seed, stdin="The whale\n") for seed in (1, 2)]
        assert [one.exit_code for one in drawn] == [0, 0]
        return {one.stdout for one in drawn}

    assert len(answers()) == 1
    assert len(answers("--top-k", "0")) == 2
    assert len(answers("--generation-config", "none", "--temperature", "20")) == 2
