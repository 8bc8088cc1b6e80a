"""What doctor finds, and what it says of it. The speeds are measured with little data here."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_runner import Run

from proof.tiny_models import tiny_model_dir
from sidestream.cli import machine, probes
from sidestream.cli.probes import Finding, Status
from sidestream.llm import LLM
from sidestream.models import precision

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_COPY_BYTES", MIB)
    monkeypatch.setattr(machine, "_COPY_S", 0.001)
    monkeypatch.setattr(machine, "DISK_BYTES", 2 * MIB)
    monkeypatch.setattr(probes, "DISK_BYTES", 2 * MIB)
    monkeypatch.setattr(probes, "_SLOW_DISK", 1)
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path / "cache"))


def _named(name: str, disk: Path | None = None) -> Finding:
    return next(finding for finding in probes.findings(disk) if finding.name == name)


def test_json_output_has_every_finding_with_its_figures(run: Run, tmp_path: Path) -> None:
    result = run("doctor", "--json", "--disk", tmp_path)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert report["serves"] is True
    assert {"sidestream", "torch", "transformers", "cpu", "memory", "gpus", "memory lock"} <= found.keys()
    assert found["host to device"]["data"]["bytes_per_s"] > 0
    speeds = {"write_bytes_per_s", "write_synced_bytes_per_s", "read_bytes_per_s"}
    assert set(found["disk speed"]["data"]) == {"direct_io", *speeds}
    assert found["disk space"]["data"]["directory"] == str(tmp_path)
    assert found["gpus"]["data"]["device"] == "cpu"
    assert all(finding["remedy"] for finding in found.values() if finding["status"] != "ok")


def test_plain_output_is_a_table_with_remedies(run: Run, tmp_path: Path) -> None:
    result = run("doctor", "--disk", tmp_path)
    assert "This machine can serve." in result.output
    assert "→ sidestream models prepare" in result.output


def test_measuring_a_disk_leaves_no_file_or_directory(tmp_path: Path) -> None:
    assert _named("disk speed", tmp_path / "not" / "there").status is Status.OK
    assert list(tmp_path.iterdir()) == []


def test_a_disk_directory_that_cannot_be_used_is_a_warning_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    finding = _named("disk", tmp_path / "file")
    assert finding.status is Status.WARN
    assert "--disk" in finding.remedy


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_a_models_cache_is_reported_by_part(run: Run, tmp_path: Path, family: str) -> None:
    directory = tiny_model_dir(family, tmp_path / family, 1)
    result = run("doctor", "--json", "--disk", tmp_path, "--model", directory)
    found = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}["model"]

    with LLM(directory, device="cpu", kv_memory="8MiB") as llm:
        parts = llm.engine.parts
        assert found["data"]["kv_token_bytes"] == parts.layout.token_bytes
        region = parts.state_region
        assert found["data"]["state_bytes"] == (0 if region is None else region.state_bytes)
    assert ("recurrent state" in found["text"]) == (family == "qwen3_next")


@pytest.mark.parametrize("model", ["/nowhere", "smollm2-135m-instruct"])
def test_a_missing_model_is_a_warning_with_a_remedy(run: Run, tmp_path: Path, model: str) -> None:
    result = run("doctor", "--json", "--disk", tmp_path, "--model", model)
    assert result.exit_code == 0
    found = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}["model"]
    assert found["status"] == "warn"
    assert found["remedy"]


def test_a_slow_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes, "_SLOW_DISK", 1 << 60)
    assert _named("disk speed", tmp_path).status is Status.WARN


def test_a_full_disk_is_not_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=MIB))
    assert _named("disk space", tmp_path).status is Status.WARN
    assert "not measured" in _named("disk speed", tmp_path).text


def _versions(replaced: dict[str, str | None]) -> Callable[[str], str]:
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = replaced.get(name, real(name))
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    return version


@pytest.mark.parametrize(
    ("version", "said"), [(None, "not installed, 2.11 or later"), ("2.9.1+cpu", "2.9.1+cpu, 2.11 or later")]
)
def test_a_missing_package_makes_doctor_fail(
    run: Run, monkeypatch: pytest.MonkeyPatch, version: str | None, said: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", _versions({"torch": version}))
    result = run("doctor")
    assert result.exit_code == 1
    assert said in result.output
    assert "pip install 'torch>=2.11'" in result.output
    assert "cannot serve yet" in result.output


def test_a_package_that_cannot_be_imported_makes_doctor_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_import_fault", lambda name: "libtorch.so: cannot open shared object file")
    result = run("doctor")
    assert result.exit_code == 1
    assert "cannot be imported: libtorch.so" in result.output


def test_a_source_tree_that_is_not_installed_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", not_there)
    assert (_named("packages").status, _named("packages").remedy) == (Status.WARN, "pip install -e .")


def test_a_missing_extra_is_a_warning_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = probes.importlib.util.find_spec
    monkeypatch.setattr(probes.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else real(name))
    finding = _named("extra server")
    assert (finding.status, finding.remedy) == (Status.WARN, "pip install 'sidestream[server]'")


@pytest.mark.parametrize(("cores", "said"), [(0.5, "use --threads 1"), (64.0, "some cores are idle")])
def test_more_threads_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch, cores: float, said: str) -> None:
    monkeypatch.setattr(probes.os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(probes, "_cgroup_cores", lambda: cores)
    finding = _named("cpu")
    assert finding.status is Status.WARN
    assert said in finding.remedy


@pytest.mark.parametrize(("over_float32", "dtype"), [(0.5, "bfloat16"), (4.0, "float32")])
def test_doctor_gives_the_served_dtype_and_why(
    monkeypatch: pytest.MonkeyPatch, over_float32: float, dtype: str
) -> None:
    monkeypatch.setattr(precision, "time_over_float32", lambda stored: over_float32)
    finding = _named("dtype")
    assert (finding.status, finding.data["dtype"]) == (Status.OK, dtype)
    assert f"--dtype auto serves a bfloat16 model in {dtype}" in finding.text
    assert "this CPU multiplies" in finding.text
    assert finding.data["instruction_set"]


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "memory_bytes", lambda: (1 << 40, 1 << 30))
    finding = _named("memory")
    assert finding.status is Status.WARN
    assert "lower --kv-memory" in finding.remedy
