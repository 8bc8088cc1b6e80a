"""`sidestream models`, with a cache of its own and nothing fetched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_runner import Run
from safetensors.torch import load_file
from transformers import DogeConfig

from proof.tiny_models import tiny_model_dir
from sidestream.cli.options import DEMO_MODEL
from sidestream.models import catalog, load_model
from sidestream_kv.device import machine


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path))
    return tmp_path


def _pretend_to_prepare(name: str, *, progress: catalog.Progress | None = None) -> Path:
    model = catalog.CATALOG[name]
    directory = catalog.cache_root() / "models" / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}", encoding="utf-8")
    marker = {"recipe": model.recipe, "files": {"config.json": {"bytes": 2, "sha256": ""}}}
    (directory / catalog.MARKER).write_text(json.dumps(marker), encoding="utf-8")
    return directory


def test_the_list_has_licence_size_and_command(run: Run) -> None:
    shown = run("models").output
    assert DEMO_MODEL in shown
    assert "Apache-2.0" in shown
    assert "93 MB" in shown
    assert f"sidestream models prepare {DEMO_MODEL}" in shown


def test_programs_get_the_list_as_json(run: Run) -> None:
    (row,) = json.loads(run("models", "--json").output)["models"]
    assert (row["name"], row["licence"], row["path"]) == (DEMO_MODEL, "Apache-2.0", None)


def test_a_prepared_model_is_shown_with_its_directory(run: Run, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(catalog, "prepare", _pretend_to_prepare)
    where = str(cache / "models" / DEMO_MODEL)
    first = run("models", "prepare", DEMO_MODEL)
    assert (first.exit_code, first.stdout) == (0, f"{DEMO_MODEL} is now prepared in {where}\n")
    assert "93 MB to fetch" in first.stderr
    assert run("models", "prepare", DEMO_MODEL).stdout == f"{DEMO_MODEL} was already prepared in {where}\n"
    assert json.loads(run("models", "prepare", "--json").stdout) == {"name": DEMO_MODEL, "path": where}
    assert json.loads(run("models", "--json").stdout)["models"][0]["path"] == where


def test_a_model_in_the_catalogue_is_prepared_when_it_is_first_used(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "prepare", _pretend_to_prepare)
    result = run("generate", "--prompt", "x")
    assert f"preparing {DEMO_MODEL}: 93 MB to fetch, once" in result.stderr
    assert result.exit_code == 2  # what was pretended is no model
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_an_unknown_name_is_refused_with_the_known_ones(run: Run) -> None:
    result = run("models", "prepare", "smollm2-135m")
    assert result.exit_code == 2
    assert f"did you mean {DEMO_MODEL}?" in result.output


# ------------------------------------------------------------------ check


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("qwen3_next", tmp_path_factory.mktemp("hybrid"), 0)


def test_a_check_says_what_a_model_needs(run: Run, hybrid: Path) -> None:
    shown = run("models", "check", str(hybrid), "--device", "cpu").output
    assert shown.startswith(f"served: {hybrid}\n  kind         qwen3_next; up to 1,024 tokens\n")
    assert "computes in  float32, as stored" in shown
    assert re.search(r"KV           \d+ bytes a token, so 1 GiB has [\d,]+ tokens", shown)
    assert re.search(r"state        [\d,]+ bytes a request", shown)
    assert re.search(r"cpu memory   [\d.]+ GiB free: room for the KV of [\d,]+ tokens", shown)


def test_a_check_agrees_with_the_loaded_model(run: Run, hybrid: Path) -> None:
    facts = json.loads(run("models", "check", str(hybrid), "--device", "cpu", "--json").output)
    model = load_model(str(hybrid), block_tokens=None)
    assert model.state_layout is not None
    kinds = (facts["kind"], facts["text_of"], facts["quantisation"], facts["dtype"], facts["stored"])
    assert kinds == ("qwen3_next", "", "", "float32", "float32")
    assert facts["weights_bytes"] == sum(tensor.nbytes for tensor in load_file(hybrid / "model.safetensors").values())
    sizes = (facts["token_bytes"], facts["state_bytes"], facts["block_tokens"], facts["max_positions"])
    layout = model.layout
    assert sizes == (layout.token_bytes, model.state_layout.state_bytes, layout.block_tokens, model.max_model_len)


def test_a_check_tells_the_bytes_of_kv_in_float8(run: Run, hybrid: Path) -> None:
    exact, packed = (
        run("models", "check", str(hybrid), "--device", "cpu", "--kv-cache-dtype", form, "--json").output
        for form in ("auto", "fp8")
    )
    assert json.loads(exact)["token_bytes"] == 4 * json.loads(packed)["token_bytes"]
    shown = run("models", "check", str(hybrid), "--device", "cpu", "--kv-cache-dtype", "fp8").output
    assert re.search(r"KV           \d+ bytes a token, so 1 GiB has [\d,]+ tokens, in float8_e4m3fn", shown)


def test_weights_without_room_are_told(run: Run, hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 1000)
    assert "0.00 GiB free: too little for the weights" in run("models", "check", str(hybrid), "--device", "cpu").output


def test_a_model_that_is_not_served_is_an_error_with_the_reason(run: Run, tmp_path: Path) -> None:
    DogeConfig().save_pretrained(tmp_path / "doge")
    result = run("models", "check", str(tmp_path / "doge"), "--device", "cpu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "masks its attention by values" in result.stderr
