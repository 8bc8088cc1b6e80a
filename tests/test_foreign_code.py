"""A checkpoint's own Python never runs, whatever the command, and whatever standard input answers."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import sidestream
from bench import baseline
from bench.__main__ import app as bench_app
from proof.tiny_models import tiny_model_dir
from sidestream import LLM, AsyncLLM, SpeculativeConfig
from sidestream.cli.app import app
from sidestream.errors import ModelError
from sidestream.models import kv_token_bytes, load_model
from sidestream.models.distil import load_teacher
from sidestream.models.loader import weights_digest
from sidestream.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

SOURCE = Path(sidestream.__file__).parent
TRAP = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class TrapConfig(LlamaConfig):
    model_type = "trap"
class TrapModel(LlamaForCausalLM):
    config_class = TrapConfig
class TrapTokenizer(PreTrainedTokenizerFast):
    pass
def generate(*args, **kwargs):
    pass
"""
TRAPPED_MODEL = {"AutoConfig": "trap.TrapConfig", "AutoModelForCausalLM": "trap.TrapModel"}
TRAPPED_TOKENIZER = {"AutoTokenizer": ["trap.TrapTokenizer", "trap.TrapTokenizer"]}
OWN_CODE = "needs code of its own (auto_map in config.json), which Sidestream never runs"


@pytest.fixture(autouse=True)
def yes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input answers yes to every question."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def set_trap(directory: Path, marker: Path) -> None:
    """Put code into every place where transformers looks for it."""
    for place in (directory, directory / "custom_generate"):
        place.mkdir(exist_ok=True)
        for name in ("trap.py", "generate.py"):
            (place / name).write_text(TRAP.format(marker=str(marker)))


@pytest.fixture
def trapped(tmp_path: Path, marker: Path) -> Path:
    """A complete model of a type that its own code defines."""
    directory = tiny_model_dir("llama", tmp_path / "trapped", 0)
    set_trap(directory, marker)
    edit_json(directory / "config.json", model_type="trap", auto_map=TRAPPED_MODEL)
    return directory


@pytest.fixture
def trapped_tokenizer(tmp_path: Path, marker: Path) -> Path:
    """A directory whose own code defines the tokenizer."""
    directory = tiny_model_dir("llama", tmp_path / "trapped_tokenizer", 0)
    set_trap(directory, marker)
    edit_json(directory / "tokenizer_config.json", tokenizer_class="TrapTokenizer", auto_map=TRAPPED_TOKENIZER)
    edit_json(directory / "config.json", model_type="trap")
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("model") / "llama", 0)


def test_transformers_runs_the_traps_code_when_allowed(trapped: Path, marker: Path) -> None:
    """transformers runs it when nothing forbids it; otherwise the tests below would prove nothing."""
    from transformers import AutoConfig

    AutoConfig.from_pretrained(trapped, local_files_only=True)
    assert marker.exists()


async def _start_async(path: str) -> None:
    await AsyncLLM(path).close()


ENTRIES: dict[str, Callable[[str], object]] = {
    "LLM": lambda path: LLM(path).close(),
    "AsyncLLM": lambda path: asyncio.run(_start_async(path)),
    "load_model": lambda path: load_model(path, block_tokens=4),
    "kv_token_bytes": kv_token_bytes,
    "weights_digest": weights_digest,
    "load_teacher": lambda path: load_teacher(path, device=torch.device("cpu")),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_model_that_needs_its_own_code_is_refused_and_does_not_run(trapped: Path, marker: Path, entry: str) -> None:
    with pytest.raises(ModelError) as caught:
        ENTRIES[entry](str(trapped))
    assert f"its model_type 'trap' {OWN_CODE}: choose a model of a type that transformers knows" in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "MODEL", "--port", "0"),
        ("chat", "MODEL"),
        ("generate", "MODEL", "--prompt", "hi"),
        ("models", "train-mtp", "MODEL", "--out", "OUT"),
        ("bench", "prefix", "MODEL"),
        ("bench", "decode", "MODEL"),
        ("bench", "overhead", "MODEL"),
        ("bench", "speculative", "MODEL"),
        ("demo", "MODEL"),
        ("generate", "LLAMA", "--prompt", "hi", "--speculative", "draft", "--draft-model", "MODEL"),
    ],
    ids=" ".join,
)
def test_no_command_runs_the_code_of_a_model(
    trapped: Path, llama: Path, marker: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    given = {"MODEL": str(trapped), "LLAMA": str(llama), "OUT": str(tmp_path / "head.safetensors")}
    group, words = (bench_app, command[1:]) if command[0] == "bench" else (app, command)
    result = CliRunner().invoke(group, [given.get(word, word) for word in words], input="y\n" * 20)
    assert not marker.exists()
    assert result.exit_code == 2, result.output
    assert OWN_CODE in " ".join(result.output.split())


def test_models_prepare_takes_no_directory(trapped: Path, marker: Path) -> None:
    result = CliRunner().invoke(app, ["models", "prepare", str(trapped)], input="y\n" * 20)
    assert result.exit_code == 2
    assert not marker.exists()


@pytest.mark.parametrize(
    ("proposer", "field", "said"),
    [
        ("draft", "model", "the draft model: model trapped: its model_type 'trap' needs"),
        ("mtp", "head", "contains no head"),
    ],
)
def test_a_draft_model_or_a_head_does_not_run_its_code(
    trapped: Path, llama: Path, marker: Path, proposer: Any, field: str, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        LLM(llama, speculative=SpeculativeConfig(proposer=proposer, **{field: str(trapped)}))
    assert not marker.exists()


def test_the_benchmark_baseline_runs_no_code_of_a_model(trapped: Path, marker: Path) -> None:
    """It loads transformers' own model, in a process of its own."""
    with pytest.raises(ValueError, match="trust_remote_code"):
        baseline._set_up({"path": str(trapped), "dtype": "float32"})
    assert not marker.exists()


def test_a_tokenizer_that_needs_code_is_refused_and_does_not_run(trapped_tokenizer: Path, marker: Path) -> None:
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(str(trapped_tokenizer))
    assert (
        "needs code of its own (auto_map in tokenizer_config.json), which Sidestream never runs: add a tokenizer.json"
        in str(caught.value)
    )
    assert not marker.exists()


def test_a_known_type_of_model_is_served_by_transformers_code_not_its_own(tmp_path: Path, marker: Path) -> None:
    """Many checkpoints are older than the support of their model in transformers."""
    directory = tiny_model_dir("llama", tmp_path / "both", 0)
    set_trap(directory, marker)
    edit_json(directory / "config.json", auto_map=TRAPPED_MODEL)
    edit_json(directory / "tokenizer_config.json", auto_map=TRAPPED_TOKENIZER)
    edit_json(directory / "generation_config.json", custom_generate="trap")

    assert Tokenizer.load(str(directory)).encode("a")
    assert load_model(str(directory), block_tokens=4).fingerprint
    assert not marker.exists()


def test_a_chat_template_cannot_reach_python(llama: Path, tmp_path: Path, marker: Path) -> None:
    from sidestream.errors import RequestRejected

    directory = tiny_model_dir("llama", tmp_path / "template", 0)
    reach = "().__class__.__base__.__subclasses__()"
    (directory / "chat_template.jinja").write_text("{% for kind in " + reach + " %}{{ kind }}{% endfor %}")
    with pytest.raises(RequestRejected, match="chat template refuses"):
        Tokenizer.load(str(directory)).chat([{"role": "user", "content": "Hi"}])


def _auto_loaders(tree: ast.AST) -> list[tuple[int, bool]]:
    """Line of every use of `Auto….from_pretrained` or `…().from_pretrained`, and whether it is a call that runs no
    foreign code.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    safe = {id(call.func) for call in calls if "trust_remote_code=False" in map(ast.unparse, call.keywords)}
    return [
        (node.lineno, id(node) in safe)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "from_pretrained"
        and (isinstance(node.value, ast.Call) or ast.unparse(node.value).startswith("Auto"))
    ]


def test_every_call_of_transformers_loaders_forbids_foreign_code() -> None:
    found = {path: _auto_loaders(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCE.rglob("*.py")}
    assert sum(len(uses) for uses in found.values()) >= 4
    assert [f"{path}:{line}" for path, uses in found.items() for line, is_safe in uses if not is_safe] == []
