"""The benchmarks of a GPU, on the CPU and tiny: they measure what they say, and no bound is claimed for a CPU."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from command_runner import Run
from engine_rig import serving

from bench import engine, kernels, ranks, speculative, windows
from proof.report import Figure
from proof.tiny_models import tiny_model_dir
from sidestream.errors import ConfigError
from sidestream.types import StepPlan

pytestmark = pytest.mark.slow

COMMANDS = {
    "transfer": "--mib 8 --rounds 1",
    "interference": "--rounds 1",
    "mailbox": "--mib 16 --tokens 8",
    "forward-thread": "--requests 32 --steps 4 --pending 200",
    "host-time": "--shape tiny --requests 6 --output-tokens 24 --rounds 1",
    "identity": "--shape tiny --requests 3 --prompt-tokens 40 --output-tokens 12",
    "engine": "--shape tiny decode prefill ttft resume async kernels",
    "hybrid-engine": "--shape tiny-hybrid",
    "windows": "--shape tiny-windows",
    "disk-ttft": "--shape tiny --rounds 1",
    "disaggregated": "--shape tiny --prompts 2 --interval-s 0.05",
    "throughput": "--shape tiny",
    "self-check": "--rounds 1",
    "ranks": "--shape tiny-two-heads",
    "host-tier": "--shape tiny --host 16MiB --rounds 1",
}
FIGURES = {
    "transfer": "store_over_link load_over_link two_way_over_link store_64k_over_link load_64k_over_link",
    "interference": "decode_under_transfer matmul_under_transfer",
    "mailbox": "mailbox_ms_p99 foreign_copy_wait_ms",
    "forward-thread": "engine_thread_us_median engine_thread_us_max host_waits pending_submit_us_max",
    "host-time": "host_ms_per_step_6_greedy host_ms_per_step_6_sampled host_cpu_ms_per_step_6_penalised",
    "identity": "requests_identical_again requests_identical_offload_off logprob_distance_max_synchronous",
    "engine": "decode_b1_over_floor idle_share_max ttft_host_over_floor itl_p99_during_resume async_tokens_identical "
    "b4:others prefill_32:others",
    "hybrid-engine": "hybrid_decode_b1_over_floor hybrid_ttft_host_over_floor hybrid_verify_over_plain_step "
    "hybrid_speculative_idle_share",
    "windows": "windows_ttft_host_over_all_layers_128 windows_loaded_share_128",
    "self-check": "self_check_overhead self_check_step_ratio self_check_disagreements",
    "disaggregated": "disaggregated_gap_p99_over_alone disaggregated_ttft_over_one_engine one_engine_gap_max_ms",
    "disk-ttft": "disk_ttft_over_floor ttft_disk_ms_128 ttft_cold_ms_128 disk_read_gb_s",
    "throughput": "throughput_no_reuse throughput_working_set_4x",
    "ranks": "tp2_over_tp1_decode_b1 tp2_over_tp1_ttft_cold_32 tp2_over_tp1_ttft_host_128 tp2_over_tp1_load_gb_s "
    "tp2_idle_share_max tp2_host_waits_besides_commits tp2_resume_ttft_ms",
    "host-tier": "host_tier_ready_s_per_gib round_2_found_in_host",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_benchmark_measures_on_the_cpu_too(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, rounds in ((engine, "_RESUMES"), (ranks, "_ROUNDS"), (windows, "_ROUNDS")):
        monkeypatch.setattr(module, rounds, 2)  # as the others' --rounds
    monkeypatch.setattr(kernels, "activities", lambda _: [torch.profiler.ProfilerActivity.CPU])
    done = run(name, "--device", "cpu", "--json", *COMMANDS[name].split())
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert set(FIGURES[name].split()) <= {name.replace(" ", "") for name in figures}
    bounded = {name for name, figure in figures.items() if figure["bound"] is not None}
    # Tokens are equal on a CPU, too.
    assert bounded == (
        {f"requests_identical_{way}" for way in ("again", "offload_off", "synchronous")}
        if name == "identity"
        else set()
    )
    if name == "self-check":
        assert figures["self_check_disagreements"]["value"] == figures["self_check_mismatches"]["value"] == 0
        assert figures["self_check_tokens"]["value"] > 0
        assert figures["self_check_blocks"]["value"] > 0
    if name == "forward-thread":
        assert figures["host_waits"]["value"] == 0
        assert figures["stored_gib"]["value"] > 0


@pytest.mark.parametrize(
    ("shape", "size", "over"), [("tiny-eight-heads-fp8-blocks", 4, 2), ("tiny-eight-heads-fp8", 2, 0)]
)
def test_ranks_are_compared_with_fewer_ranks_or_with_none(shape: str, size: int, over: int, run: Run) -> None:
    """As on a machine with four GPUs, for a model that does not fit one. Layers are left out, to try it before."""
    given = ("--device", "cpu", "--shape", shape, "--tensor-parallel", str(size), "--over", str(over), "--layers", "1")
    done = run("ranks", "decode", "--json", *given)
    assert done.exit_code == 0, done.stderr
    names = {figure["name"] for figure in json.loads(done.stdout)["figures"]}
    assert {f"tp{size}_decode_b1_ms", f"tp{size}_idle_share_max"} <= names
    ratios = {name for name in names if "_over_" in name}
    assert ("tp4_over_tp2_decode_b1" in ratios) if over else not ratios


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("--over 4 --tensor-parallel 4", "--over is 4: give fewer ranks than --tensor-parallel, which is 4"),
        ("--shape llama-3.1-70b --layers 81", "--layers is 81: give 1 to 80, which llama-3.1-70b has"),
    ],
)
def test_ranks_that_cannot_be_compared_are_refused(given: str, reason: str, run: Run) -> None:
    done = run("ranks", "--device", "cpu", *given.split())
    assert done.exit_code != 0
    assert reason in done.stderr


def test_steps_that_draft_are_measured_and_no_token_depends_on_drafts(tmp_path: Path) -> None:
    model = str(tiny_model_dir("llama", tmp_path / "model", 3))
    options = {"device": "cpu", "kv_memory": "8MiB", "prefix_cache": False, "max_running": 2, "compute_threads": 1}
    config = {"proposer": "draft", "max_drafts": 4, "model": model}
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    measured = [
        *speculative._equalities(model, options, "draft", config, prompts, 24),
        *speculative._steps(
            model, options, "draft", {**config, "adaptive": False}, [prompts[:1], prompts], 24, on_gpu=False
        ),  # however slow
        *speculative._steps(model, options, "plain", None, [prompts], 24, on_gpu=False),
    ]
    figures = {figure.name: figure.value for figure in measured}
    assert figures["tokens_identical_draft"] == figures["accept_lengths_identical_draft"] == 1
    assert figures["host_waits_per_step_draft"] == 0
    assert figures["tokens_per_step_draft"] > 3  # the model itself: all its drafts are right
    assert figures["dispatch_us_median_draft"] > 0
    assert figures["step_ms_b2_draft"] > figures["step_ms_b2_plain"] > 0
    assert 0 < figures["drafts_per_row_b2_draft"] <= 4
    assert (
        figures["uncaptured_share_b1_draft"] == figures["uncaptured_share_b2_plain"] == 1
    )  # nothing is captured on a CPU
    assert 0 < figures["idle_share_b2_draft"] < 1


def test_blocks_of_no_tokens_are_refused(run: Run) -> None:
    done = run("hybrid-engine", "--device", "cpu", "--shape", "tiny-hybrid", "--block-tokens", "0")
    assert done.exit_code != 0
    assert "--block-tokens is 0" in done.stderr


def test_kernels_of_a_step_are_ordered_by_their_time_and_none_is_left_out() -> None:
    seen = [kernels.Kernel(f"k{at}", 4, float(at)) for at in range(20)]
    figures = kernels.longest("b1", seen, 2)
    assert [(each.name, each.value, each.unit) for each in figures[:2]] == [
        ("b1: k19", 9.5, "us, 2.0 calls"),
        ("b1: k18", 9.0, "us, 2.0 calls"),
    ]
    assert (len(figures), figures[-1].name, figures[-1].unit) == (16, "b1: others", "us, 10.0 calls")
    assert sum(each.value for each in figures) == sum(range(20)) / 2


def test_kernels_of_a_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="kernels needs a GPU, and this is the device cpu: leave it out"):
        kernels.activities("cpu")


def test_device_that_is_not_known_names_the_nearest_one(run: Run) -> None:
    done = run("mailbox", "--device", "cud")
    assert done.exit_code != 0
    assert "did you mean cuda" in done.stderr


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (
            ["llama-3.2-1b", "--device", "cuda"],
            "the model is 'llama-3.2-1b', which has no effect with --device cuda: that device measures a model shape",
        ),
        (["--device", "cuda", "--rounds", "2"], "--rounds is 2, which has no effect with --device cuda"),
        (["--device", "cuda", "--output-tokens", "8"], "--output-tokens is 8, which has no effect with --device cuda"),
        (["--device", "cuda", "--dtype", "float32"], "--dtype is 'float32', which has no effect with --device cuda"),
        (["--shape", "tiny"], "--shape is 'tiny', which has no effect with --device cpu: that device measures a model"),
        (["--device", "cud"], "did you mean cuda"),
    ],
)
def test_options_without_effect_on_a_benchmark_of_steps_are_refused(asked: list[str], reason: str, run: Run) -> None:
    done = run("decode", *asked)
    assert done.exit_code != 0
    assert reason in done.stderr


@pytest.mark.parametrize("shape", ["qwen3-8b", "llama-3.2-1b"])
def test_steps_on_a_gpu_have_the_shape_that_was_asked_for(
    shape: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []

    def measure(**asked: object) -> list[Figure]:
        measured.append((asked["device"], asked["shape"], asked["parts"]))
        return [Figure("decode_b1_over_floor", 1.0, "ratio")]

    monkeypatch.setattr(engine, "measure", measure)
    done = run("decode", "--device", "cuda", "--json", *([] if shape == "qwen3-8b" else ["--shape", shape]))
    assert done.exit_code == 0, done.stderr
    assert measured == [("cuda", shape, ["decode"])]
    assert json.loads(done.stdout)["environment"]["model"] == f"{shape}, random weights"


@pytest.mark.parametrize("name", ["host-time", "identity"])
def test_nothing_to_measure_is_refused_before_a_model_is_made(name: str, run: Run) -> None:
    for option in ("--requests", "--output-tokens"):
        done = run(name, "--device", "cpu", "--shape", "tiny", option, "0")
        assert done.exit_code != 0
        assert f"{option} is 0: it must be 1 or more" in done.stderr


def test_synchronous_steps_are_each_committed_before_the_next_is_planned() -> None:
    with serving() as rig:
        scheduler, loop, in_flight = rig.engine.parts.scheduler, rig.engine.loop, list[bool]()
        plan = scheduler.plan

        def noting(**times: float) -> StepPlan:
            in_flight.append(loop.in_flight is not None)
            return plan(**times)

        scheduler.plan = noting  # type: ignore[method-assign]
        for asynchronous in (False, True, False):
            engine._make_asynchronous(rig.engine, asynchronous)
            in_flight.clear()
            rig.expect(rig.submit([3, 5, 8], 8), [3, 5, 8], 8)
            assert any(in_flight) == asynchronous


def test_the_memory_of_an_earlier_engine_is_free_before_the_next_model_is_made() -> None:
    """Two engines of a large model do not fit into a GPU together."""
    held: list[weakref.ref[object]] = []
    freed: list[bool] = []

    def tell(text: str) -> None:
        if text == "making the model":
            freed.extend(ref() is None for ref in held)

    for _ in range(2):
        rig = engine.ModelRig("cpu", "tiny", engine._TINY, tell)
        held.append(weakref.ref(rig.engine))
        rig.close()
        del rig
    assert freed == [True]
