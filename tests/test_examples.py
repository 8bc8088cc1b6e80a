"""The programs of `examples/`, and the Python of README and docs, run as they stand and print what they promise."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from proof.tiny_models import tiny_model_dir
from sidestream import LLM, ModelError
from sidestream_kv.offload.tiers import stack

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_dir("llama", tmp_path_factory.mktemp("models") / "tiny", seed=1))


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_offloader_races_in_every_schedule_unless_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "two_stream_offloader.py"), run_name="__main__")
    without, race, fixed = capsys.readouterr().out.splitlines()
    assert without.startswith("without the wait: the checker objects to 100 of 100 schedules")
    assert not without.endswith((" after 0", " after 100")), (
        "some orders are right by luck: that is why output alone does not tell"
    )
    assert all(words in race for words in ("`forward 2`", "`copy 0`", "nothing orders"))
    assert race.count("two_stream_offloader.py") == 2
    assert fixed == "with the wait: the checker objects to 0 of 100 schedules, the host's bytes are wrong after 0"


def test_conversations_on_one_event_loop_are_all_answered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    run(monkeypatch, "async_chat.py", tiny)
    defaults, *answers = capsys.readouterr().out.splitlines()
    assert defaults == "sampling defaults: temperature 1, no filters, no penalties"
    assert sorted(answer[: answer.index("?")] for answer in answers) == [
        "How deep do whales dive",
        "Why do whales sing",
    ]


def test_a_prompt_is_reused_from_disk_after_a_restart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: str, tmp_path: Path
) -> None:
    run(monkeypatch, "offload_to_disk.py", tiny, str(tmp_path / "kv"))
    first, second, verdict = capsys.readouterr().out.splitlines()
    assert first.startswith("424 prompt tokens, 0 of them from disk")
    assert second.startswith("424 prompt tokens, 416 of them from disk")
    assert verdict == "the answers are equal"


def test_a_file_of_prompts_is_answered_in_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: str, tmp_path: Path
) -> None:
    prompts = ["Call me Ishmael. Some years ago", "Call me Ishmael. Never mind how long"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    run(monkeypatch, "offline_batch.py", str(tmp_path / "prompts.txt"), tiny)
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert all(answer["answer"] for answer in answers)
    assert answers[1]["reused"] == 16


def test_a_server_answers_over_http_and_reuses_the_prompt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    run(monkeypatch, "serve_and_ask.py", tiny)
    first, second = capsys.readouterr().out.splitlines()
    assert first.removesuffix("0") == second.removesuffix("64")
    assert first.endswith(", cached prompt tokens: 0")
    assert second.endswith(", cached prompt tokens: 64")


def test_an_own_architecture_is_served(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(monkeypatch, "own_model.py", str(tmp_path / "clipped"))
    assert re.fullmatch(r"clipped: \((\d+, ){7}\d+\)", capsys.readouterr().out.strip())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("async_chat.py", ["no-such-model"]),
        ("offline_batch.py", [__file__, "no-such-model"]),
        ("offline_batch.py", ["no-such-file"]),
        ("offline_batch.py", []),
        ("offload_to_disk.py", ["no-such-model"]),
        ("own_model.py", [f"{__file__}/directory"]),
        ("own_tier.py", ["no-such-model"]),
        ("serve_and_ask.py", ["no-such-model"]),
    ],
)
def test_a_wrong_argument_of_an_example_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, arguments: list[str]
) -> None:
    monkeypatch.setattr(stack, "_KINDS", [*stack._KINDS])  # own_tier.py registers a tier in this process
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, name, *arguments)
    assert str(ended.value.code).startswith("error: " if arguments else "usage: python examples/offline_batch.py")
    assert "\n" not in str(ended.value.code)


def python_of(page: str, block: int = 1) -> str:
    """A Python block of a page, the first by default."""
    return (EXAMPLES.parent / page).read_text(encoding="utf-8").split("```python\n")[block].split("```")[0]


def test_the_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path) -> None:
    code = python_of("README.md")
    for shown, small in {"smollm2-135m-instruct": tiny, "4GiB": "16MiB", "kv-cache": str(tmp_path / "kv")}.items():
        assert shown in code
        code = code.replace(shown, small)
    exec(compile(code, "README.md", "exec"), {})
    assert "CachedTokens(device=0, host=0)" in capsys.readouterr().out


def printed_by(code: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    (directory / "script.py").write_text(code, encoding="utf-8")
    runpy.run_path(str(directory / "script.py"))
    return capsys.readouterr().out


def test_the_checker_finds_the_race_of_the_ordering_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = printed_by(python_of("docs/ordering.md"), tmp_path, capsys)
    assert "nothing orders `store` after compute:1" in found


def test_the_ordering_pages_program_is_explored_as_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed = printed_by(python_of("docs/ordering.md", 2), tmp_path, capsys).splitlines()
    page = (EXAMPLES.parent / "docs" / "ordering.md").read_text(encoding="utf-8")
    shown = page.partition("left. The same call gives the same result.\n\n```\n")[2].partition("```")[0].splitlines()
    assert len(printed) == len(shown)
    for ours, theirs in zip(shown, printed, strict=True):
        assert re.fullmatch(".*".join(map(re.escape, ours.split("…"))), theirs)


class _PrivateConfig(LlamaConfig):
    model_type = "private_llama"


class _PrivateForCausalLM(LlamaForCausalLM):
    config_class = _PrivateConfig


def test_an_architecture_without_the_attention_interface_is_refused(tmp_path: Path) -> None:
    AutoConfig.register("private_llama", _PrivateConfig, exist_ok=True)
    AutoModelForCausalLM.register(_PrivateConfig, _PrivateForCausalLM, exist_ok=True)
    directory = tiny_model_dir("llama", tmp_path / "private", seed=1)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "private_llama"}), encoding="utf-8")
    with pytest.raises(ModelError, match="attention code of its own"):
        LLM(directory)


def test_a_toy_engine_on_the_transfer_engine_loads_preempts_and_survives_a_restart(tmp_path: Path) -> None:
    program = (
        "import runpy, sys\n"
        "runpy.run_path(sys.argv[2], run_name='__main__')\n"
        "assert not {'sidestream', 'transformers'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "kv"), str(EXAMPLES / "transfer_engine.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.splitlines() == [
        f"{start} start, request {number}: KV sums to {total}, {loaded} of 6 blocks came from a tier"
        for start, counts in (("first", (0, 6, 6)), ("second", (6, 6, 6)))
        for number, (total, loaded) in enumerate(zip((4800, 42816, 4800), counts, strict=True))
    ]
    assert len((EXAMPLES / "transfer_engine.py").read_text(encoding="utf-8").splitlines()) <= 80
