"""The commands of `python -m bench`, apart from `serve`. A function declares a command's options and the subject of its
report; `measure` of the module of the same name takes these options and returns the figures.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.options import (
    SHAPE_HELP,
    EitherDevice,
    GpuDevice,
    OutputTokens,
    PromptTokens,
    Requests,
    Shape,
    check_at_least,
    label,
)
from proof.report import Figure, publish, was_given
from sidestream.cli.declare import Command, Option, named
from sidestream.cli.options import DEMO_MODEL, AsJson, Model
from sidestream.cli.progress import Steps
from sidestream.errors import ConfigError
from sidestream_kv.config import unknown_name
from sidestream_kv.device.kinds import CPU, CUDA


@dataclass(frozen=True, slots=True)
class Report:
    """The subject of a command's report.

    model     the model, as the report names it
    bounded   False: drop the bounds, because they do not apply to this device or shape
    served    the loaded model and its options `dtype` and `device`; None: no model is loaded
    options   options of `measure`; None: those of the command
    bench     the benchmark's name; None: the command's
    """

    model: str
    bounded: bool = True
    served: tuple[str, str, str] | None = None
    options: Mapping[str, Any] | None = None
    bench: str | None = None


def _on_gpu(device: str, model: str = "blocks of Qwen3-8B") -> Report:
    return Report(model, bounded=device == CUDA)


def _random(shape: str, *, bounded: bool = True, **more: Any) -> Report:
    return Report(f"{shape}, random weights", bounded, **more)


def _served(model: str, dtype: str = "auto", device: str = CPU, **more: Any) -> Report:
    return Report(model, served=(model, dtype, device), **more)


_COMMANDS: dict[str, Callable[..., None]] = {}


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for name, command in _COMMANDS.items():
        app.command(name, cls=Command)(command)


def _command(*at_least_one: str) -> Callable[[Callable[..., Report]], Callable[..., Report]]:
    """Declare a command, which runs its measurement and prints the figures. The options `at_least_one` must be 1 or
    more. Progress goes to stderr. Exits with 1 if a bound does not hold.
    """

    def declare(command: Callable[..., Report]) -> Callable[..., Report]:
        name = command.__name__.replace("_", "-")

        def run(*, as_json: bool, **given: Any) -> None:
            check_at_least({name: (given[name], 1) for name in at_least_one})
            report = command(**given)
            bench = report.bench or name
            measure = importlib.import_module(f"bench.{bench.replace('-', '_')}").measure
            with Steps() as steps:
                steps.update(f"bench {bench}", note="preparing")
                figures = measure(
                    **(given if report.options is None else report.options),
                    on_progress=lambda text: steps.update(f"bench {bench}", note=text),
                )
            if not report.bounded:
                figures = [Figure(figure.name, figure.value, figure.unit) for figure in figures]
            dtype = None if report.served is None else _dtype(*report.served)
            publish(bench, report.model, figures, as_json=as_json, console=Console(), dtype=dtype)

        own = inspect.signature(command, eval_str=True).parameters.values()
        json = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)
        parameters = [*(each.replace(kind=each.KEYWORD_ONLY) for each in own), json]
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        _COMMANDS[name] = named(run)
        return command

    return declare


def _dtype(model: str, dtype: str, device: str) -> str:
    from sidestream.models import precision_of
    from sidestream.models.catalog import resolve
    from sidestream_kv.device.choice import torch_device

    return precision_of(resolve(model), dtype=dtype, device=torch_device(device)).dtype


@_command()
def prefix(
    model: Model = DEMO_MODEL,
    prompt_tokens: PromptTokens = 2000,
    rounds: Annotated[
        int, Option("Number of prompts; each runs without cached KV, with KV from host memory, and from disk.")
    ] = 5,
) -> Report:
    """TTFT of a long prompt with KV from host memory, or from disk in a new process, divided by TTFT without any KV."""
    return _served(model)


@_command()
def shared(
    model: Model = DEMO_MODEL,
    prompt_tokens: PromptTokens = 2000,
    rounds: Annotated[int, Option("Number of prompts; one engine computes each, another finds it.")] = 3,
) -> Report:
    """TTFT of a long prompt whose KV another engine has put into a shared store, divided by TTFT without any KV."""
    return _served(model)


@_command()
def restart(
    model: Model = DEMO_MODEL,
    prompt_tokens: PromptTokens = 2000,
    rounds: Annotated[int, Option("Number of prompts, and of engines that are killed.")] = 7,
) -> Report:
    """TTFT of the first request of an engine that starts again after kill -9, with a cache process (sidestream cache
    serve), divided by that of an engine that kept running and has the prompt in host memory.
    """
    return _served(model)


@_command()
def decode(
    context: typer.Context,
    model: Model = DEMO_MODEL,
    output_tokens: OutputTokens = 96,
    rounds: Annotated[int, Option("Repetitions; Sidestream and generate alternate.")] = 5,
    dtype: Annotated[str, Option("Data type of both engines.", "TYPE")] = "auto",
    device: Annotated[
        str,
        Option("`cpu`; or `cuda`: step time with random weights, divided by the time to read the weights.", "DEVICE"),
    ] = CPU,
    shape: Annotated[
        str, Option("Model shape on `cuda`: qwen3-8b, llama-3.2-1b, qwen3-0.6b or tiny.", "SHAPE")
    ] = "qwen3-8b",
) -> Report:
    """Tokens per second of one request and of eight concurrent requests, divided by those of transformers' generate."""
    if device not in (CPU, CUDA):
        raise ConfigError(unknown_name("device", device, (CPU, CUDA)))
    on_gpu = device == CUDA
    unused = {"model", "output_tokens", "rounds", "dtype"} if on_gpu else {"shape"}
    for name in sorted(name for name in unused if was_given(context, name)):
        instead = (
            "that device measures a model shape with random weights: give --shape only"
            if on_gpu
            else "that device measures a model: give the model"
        )
        raise ConfigError(
            f"{label(name)} is {context.params[name]!r}, which has no effect with --device {device}: {instead}"
        )
    if on_gpu:
        return engine(["decode"], device, shape)
    options = {"model": model, "output_tokens": output_tokens, "rounds": rounds, "dtype": dtype}
    return _served(model, dtype, options=options)


@_command()
def overhead(
    model: Model = DEMO_MODEL,
    rounds: Annotated[int, Option("Repetitions; runs with and without offload alternate.")] = 9,
) -> Report:
    """Step time with offload, with and without blocks to store, divided by step time without offload; and the number of
    times that the host waits for a transfer.
    """
    return _served(model)


@_command("rounds")
def self_check(
    device: GpuDevice = CUDA,
    shape: Annotated[str | None, Option(SHAPE_HELP, "SHAPE", "qwen3-8b, on a CPU tiny")] = None,
    rounds: Annotated[int, Option("Repetitions; engines with several shares alternate.")] = 5,
) -> Report:
    """Step time with `--self-check 0.01`, divided by step time without; and the differences that the checks found."""
    shape = shape or ("qwen3-8b" if device == CUDA else "tiny")
    options = {"device": device, "shape": shape, "rounds": rounds}
    return _random(shape, bounded=device == CUDA, options=options)


@_command("rounds")
def grammar_steps(
    device: EitherDevice = CPU,
    model: Model = DEMO_MODEL,
    shape: Annotated[str, Option("On `cuda`, the model shape, with random weights.", "SHAPE")] = "qwen3-8b",
    requests: Annotated[int | None, Option("Concurrent requests.", absent="32, on a CPU 8")] = None,
    output_tokens: OutputTokens = 96,
    rounds: Annotated[int, Option("Repetitions; rounds with and without grammars alternate.")] = 9,
) -> Report:
    """Time of a step in which half of the rows have a grammar, divided by the time of a step without grammars."""
    on_gpu = device == CUDA
    requests = requests or (32 if on_gpu else 8)
    check_at_least({"requests": (requests, 2), "output_tokens": (output_tokens, 16)})
    options = {"device": device, "model": model, "shape": shape, "requests": requests}
    options |= {"output_tokens": output_tokens, "rounds": rounds}
    return _random(shape, options=options) if on_gpu else _served(model, options=options)


@_command("rounds")
def lora(
    device: GpuDevice = CUDA,
    shape: Annotated[str | None, Option(SHAPE_HELP, "SHAPE", "qwen3-8b, on a CPU tiny")] = None,
    requests: Annotated[int, Option("Concurrent requests.")] = 32,
    adapters: Annotated[int, Option("Adapters, each used by one request.")] = 8,
    output_tokens: OutputTokens = 96,
    rounds: Annotated[int, Option("Repetitions; engines with and without adapters alternate.")] = 9,
) -> Report:
    """Time of a step whose rows use several LoRA adapters, divided by that of an engine without adapters."""
    shape = shape or ("qwen3-8b" if device == CUDA else "tiny")
    check_at_least({"adapters": (adapters, 1), "requests": (requests, adapters), "output_tokens": (output_tokens, 16)})
    options = {"device": device, "shape": shape, "requests": requests, "adapters": adapters}
    options |= {"output_tokens": output_tokens, "rounds": rounds}
    return _random(shape, bounded=device == CUDA, options=options)


@_command("layers", "tokens", "rounds")
def packed(
    directory: Annotated[Path, typer.Argument(help="Folder for the model, which is made if there is none.")],
    layers: Annotated[int, Option("Layers of the model; Llama 3's 8B has 32.")] = 32,
    tokens: Annotated[int, Option("Tokens that each engine decodes in a round.")] = 16,
    rounds: Annotated[int, Option("Repetitions; the engines alternate.")] = 5,
    threads: Annotated[int, Option("Threads of each engine.")] = 2,
) -> Report:
    """Decode of a model of Llama 3's 8B shape in Q4_K and Q6_K, random weights, beside llama.cpp: needs the package
    llama-cpp-python, whose copy of ggml both then use.
    """
    check_at_least({"tokens": (tokens, 2)})
    return Report(f"Llama 3 8B's shape with {layers} layers, GGUF")


@_command("rounds")
def jump_ahead(
    model: Model = DEMO_MODEL,
    requests: Annotated[int, Option("Concurrent requests.")] = 8,
    rounds: Annotated[int, Option("Repetitions; rounds with and without drafts alternate.")] = 9,
) -> Report:
    """Steps and tokens per second of answers to a schema with long keys, with drafts of what the grammar forces and
    without.
    """
    check_at_least({"requests": (requests, 2)})
    return _served(model)


@_command("walks")
def structured_conformance(
    suite: Annotated[
        Path, typer.Argument(help="Folder with draft7 and draft2020-12: `json/tests` of jsonschema's source archive.")
    ],
    model: Model = DEMO_MODEL,
    walks: Annotated[int, Option("Random answers for each schema.")] = 60,
    seed: Annotated[int, Option("Seed of the answers.")] = 0,
) -> Report:
    """Random answers under the schemas of the JSON Schema Test Suite and others: how many are invalid, which schemas
    are refused, and how long it takes to compile large ones.
    """
    return _served(model)


@_command()
def families(
    table: Annotated[Path | None, Option("Also write the outcome of each kind, as JSON.", "FILE")] = None,
) -> Report:
    """Serve a tiny model of every kind of causal language model in the installed transformers, and compare it with
    transformers' own log-probabilities. About two minutes.
    """
    return Report("tiny models of every kind")


@_command()
def policy(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="Traces: a JSON object with `hash_ids` for each request and line.")
    ] = None,
    share: Annotated[float, Option("Size of the tier, as a share of a trace's distinct blocks.", "SHARE")] = 0.2,
    host_share: Annotated[float, Option("Size of host memory, likewise.", "SHARE")] = 0.02,
) -> Report:
    """Policies of eviction and of writing on simulated tiers, for traces and for made-up agents: the share of blocks
    that are reused, and blocks written for each that is read.
    """
    for name, value in (("share", share), ("host_share", host_share)):
        if not 0 < value <= 1:
            raise ConfigError(f"{label(name)} is {value}: it must be above 0, and at most 1")
    return Report("no model", options={"traces": traces or [], "share": share, "host_share": host_share})


@_command()
def windowed_kv() -> Report:
    """The share of KV that a long sequence holds, in bytes, if layers with a sliding window free what is behind it:
    gpt-oss-20b and Gemma 3 4B.
    """
    return Report("no model", options={})


@_command("users", "rounds", "conversations")
def adversarial(
    model: Model = DEMO_MODEL,
    users: Annotated[int, Option("Users with a common prefix.")] = 50,
    prefix_tokens: Annotated[int, Option("Tokens of the common prefix.")] = 256,
    rounds: Annotated[int, Option("Rounds for each state of the disk, and turns of a conversation.")] = 2,
    conversations: Annotated[int, Option("Conversations that need three host tiers.")] = 60,
) -> Report:
    """Offload on a disk that is healthy, throttled, slower than computing, stalled and gone, beside the same engine
    without offload: throughput and TTFT of users and one-shot prompts, and the time of conversations.
    """
    check_at_least({"prefix_tokens": (prefix_tokens, 16)})
    return _served(model)


@_command()
def tier(
    directory: Annotated[Path, Option("Directory of the file system to measure.", "DIR")] = Path(),
    size: Annotated[str, Option("Bytes of each write and read.", "SIZE")] = "1GiB",
    rounds: Annotated[int, Option("Repetitions; tier and raw I/O alternate.")] = 5,
    entries: Annotated[int, Option("Blocks of the directory that is opened.")] = 1_000_000,
    fio: Annotated[bool, Option("Let fio measure raw I/O.")] = False,
) -> Report:
    """The disk tier beside raw direct I/O on the same file system, the cost of its checksums, and the time to open a
    directory of a million blocks.
    """
    return Report("no model")


@_command()
def soak(
    model: Model = DEMO_MODEL,
    requests: Annotated[int, Option("Number of requests; memory growth is measured from request 200 on.")] = 2000,
) -> Report:
    """Memory growth of the process over many requests."""
    return _served(model)


@_command("turns")
def agent_loop(model: Model = DEMO_MODEL, turns: Annotated[int, Option("Turns of the agent.")] = 30) -> Report:
    """The share of an agent's prompt tokens that come from a cache, over HTTP: each turn is a forced tool call."""
    return _served(model)


@_command("conversations", "turns")
def replicas(
    model: Model = DEMO_MODEL,
    conversations: Annotated[int, Option("Number of conversations; each is a session.")] = 40,
    turns: Annotated[int, Option("Turns of each conversation.")] = 6,
) -> Report:
    """Replicas on Ray Serve: cached prompt tokens of conversations with two replicas, divided by those with one; and
    the outcomes of requests when one of two replicas is killed.
    """
    return _served(model)


@_command("seconds", "output_tokens", "rounds")
def scale(
    ranks: Annotated[
        list[int] | None,
        Option(
            "Number of ranks, including rank 0, which sends the plans; may be given several times.", absent="2, 4, 8"
        ),
    ] = None,
    seconds: Annotated[int, Option("Seconds of sending plans, for each transport.", "S")] = 5,
    output_tokens: OutputTokens = 64,
    rounds: Annotated[int, Option("Repetitions; one rank and two ranks alternate.")] = 3,
) -> Report:
    """Tensor parallelism on this CPU: time to send a step's plan to all ranks, compared with a ring buffer in shared
    memory and with Gloo; CPU time of a rank; and tokens per second of two ranks, divided by those of one rank.
    """
    from bench.scale import SIZES

    sizes = sorted(set(ranks or SIZES))
    check_at_least({"ranks": (sizes[0], 2)})
    options = {"sizes": sizes, "seconds": seconds, "rounds": rounds, "output_tokens": output_tokens}
    return Report("random weights, 100M parameters", options=options)


@_command()
def ranks(
    parts: Annotated[list[str] | None, typer.Argument(help="decode, ttft, resume; default: all.")] = None,
    device: GpuDevice = CUDA,
    shape: Shape = "qwen3-8b",
    tensor_parallel: Annotated[int, Option("Number of ranks to measure.")] = 2,
    over: Annotated[
        int, Option("Number of ranks to compare with, if the model does not fit one; 0: compare with none.")
    ] = 1,
    layers: Annotated[int | None, Option("Only the first N layers, to try the command.", absent="all")] = None,
    kv_memory: Annotated[str | None, Option("KV memory of each rank.", "SIZE", "8GiB; on a CPU 8MiB")] = None,
) -> Report:
    """Tensor parallelism on GPUs: step time, TTFT, and TTFT with KV in host memory, of several ranks, divided by those
    of one rank; and the bandwidth of loads from host memory.
    """
    check_at_least({"tensor_parallel": (tensor_parallel, 2), "over": (over, 0)})
    if over >= tensor_parallel:
        raise ConfigError(f"--over is {over}: give fewer ranks than --tensor-parallel, which is {tensor_parallel}")
    return _random(shape, bounded=device == CUDA and layers is None)


@_command()
def hybrid(
    families: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FAMILY",
            help="Families of tiny hybrid models. Default: qwen3_next, nemotron_h, falcon_h1 and lfm2.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[int, Option("Prompts for each family.")] = 200,
    turns: Annotated[int, Option("Turns of the conversation.")] = 30,
    system_tokens: Annotated[int, Option("Tokens of the system prompt of all turns.")] = 6000,
) -> Report:
    """Models with recurrent state: whether tokens are equal with KV from each tier, and the share of a conversation's
    prompt tokens that come from the cache.
    """
    from proof.tiny_models import HYBRIDS

    chosen = families or ["qwen3_next", "nemotron_h", "falcon_h1", "lfm2"]
    for family in chosen:
        if family not in HYBRIDS:
            raise ConfigError(unknown_name("family", family, sorted(HYBRIDS)))
    options = {"families": chosen, "num_prompts": prompts, "turns": turns, "system_tokens": system_tokens}
    return Report("tiny " + ", ".join(chosen), options=options)


@_command()
def hybrid_engine(
    device: GpuDevice = CUDA,
    shape: Annotated[str, Option("Model shape: qwen3.5-9b or tiny-hybrid.", "SHAPE")] = "qwen3.5-9b",
    block_tokens: Annotated[int | None, Option("Tokens of a block.", absent="64, on a CPU 16")] = None,
) -> Report:
    """Models with recurrent state and random weights: step time without and with drafts, and TTFT with KV in host
    memory.
    """
    return _random(shape, bounded=device == CUDA and shape == "qwen3.5-9b")


@_command()
def windows(
    device: GpuDevice = CUDA,
    shape: Annotated[str, Option("Model shape: gemma3-4b or tiny-windows.", "SHAPE")] = "gemma3-4b",
) -> Report:
    """Models whose layers have sliding windows, with random weights: TTFT with KV in host memory, if loads leave out
    what no window reaches, and if they do not.
    """
    return _random(shape, bounded=device == CUDA and shape == "gemma3-4b")


@_command()
def transfer(
    device: GpuDevice = CUDA,
    mib: Annotated[int, Option("MiB to store and load in each round.")] = 1024,
    rounds: Annotated[int, Option("Repetitions; measurements of the link and of the transfers alternate.")] = 7,
) -> Report:
    """Bandwidth of stores and loads of scattered blocks, divided by that of one large pinned copy."""
    return _on_gpu(device)


@_command()
def interference(
    device: GpuDevice = CUDA,
    rounds: Annotated[int, Option("Repetitions; runs with and without transfers alternate.")] = 7,
) -> Report:
    """Slowdown of a decode step and of a large matrix product during transfers at full rate."""
    return _on_gpu(device)


@_command()
def forward_thread(
    device: GpuDevice = CUDA,
    requests: Annotated[int, Option("Running requests that store and load KV.")] = 1000,
    steps: Annotated[int, Option("Steps of the loop.")] = 400,
    pending: Annotated[int, Option("Pending transfers in the second measurement.")] = 100_000,
) -> Report:
    """Engine-thread time that transfers take in each step, and the longest time that they block the thread."""
    return _on_gpu(device)


@_command("requests", "output_tokens", "rounds")
def host_time(
    device: GpuDevice = CUDA,
    shape: Shape = "qwen3-0.6b",
    requests: Requests = 256,
    output_tokens: OutputTokens = 128,
    rounds: Annotated[int, Option("Repetitions.")] = 3,
) -> Report:
    """Engine-thread time per step with many running requests and with offload; waits for steps are not counted."""
    return _random(shape, bounded=device == CUDA)


@_command("requests", "prompt_tokens", "output_tokens")
def identity(
    device: GpuDevice = CUDA,
    shape: Shape = "qwen3-0.6b",
    requests: Requests = 8,
    prompt_tokens: PromptTokens = 512,
    output_tokens: OutputTokens = 128,
) -> Report:
    """Compare greedy tokens and log-probabilities: with and without offload, with asynchronous and synchronous
    execution, with CUDA graphs and without.
    """
    return _random(shape)


@_command()
def mailbox(
    device: GpuDevice = CUDA,
    mib: Annotated[int, Option("MiB to store during the measurement.")] = 1024,
    tokens: Annotated[int, Option("Number of timed tokens.")] = 2000,
) -> Report:
    """Time until the host sees a sampled token while blocks are being stored."""
    return _on_gpu(device)


def _part(name: str, summary: str) -> None:
    """Declare one part of `engine` as a command of its own."""

    def part(device: GpuDevice = CUDA, shape: Shape = "qwen3-8b") -> Report:
        return engine([name], device, shape)

    part.__name__, part.__doc__ = name, summary
    _command()(part)


_part("prefill", "Prefill time of a prompt on a GPU, divided by the time of its matrix products alone.")
_part("ttft", "TTFT without cached KV; TTFT with KV in host memory, divided by the time to load that KV.")
_part("resume", "Slowdown of decoding requests while the KV of a long request is loaded.")
_part("async", "Tokens per second of asynchronous execution, divided by those of synchronous execution; equal tokens.")


@_command()
def engine(
    parts: Annotated[
        list[str] | None,
        typer.Argument(help="decode, prefill, ttft, resume, async; default: all these. invariant, kernels."),
    ] = None,
    device: GpuDevice = CUDA,
    shape: Shape = "qwen3-8b",
) -> Report:
    """Step time, prefill time and TTFT of an engine on a GPU, divided by the shortest time that the hardware allows."""
    options = {"parts": parts, "device": device, "shape": shape}
    return _random(shape, bounded=device == CUDA and shape == "qwen3-8b", options=options, bench="engine")


@_command()
def disk_ttft(
    device: GpuDevice = CUDA,
    shape: Shape = "qwen3-8b",
    directory: Annotated[Path, Option("Directory of the file system to measure.", "DIR")] = Path(),
    rounds: Annotated[int, Option("Number of prompts.")] = 7,
) -> Report:
    """TTFT with KV on disk, divided by the time to read that KV with nothing else."""
    return _random(shape, bounded=False)


@_command()
def disaggregated(
    device: GpuDevice = CUDA,
    shape: Shape = "qwen3-8b",
    prompts: Annotated[int, Option("Long prompts in each phase.")] = 10,
    interval_s: Annotated[float, Option("Mean time between two long prompts.", "S")] = 0.7,
) -> Report:
    """Gaps and TTFT while long prompts arrive, computed on a second GPU, beside one engine that does both."""
    return _random(shape, bounded=False)


@_command()
def throughput(device: GpuDevice = CUDA, shape: Shape = "qwen3-8b") -> Report:
    """Tokens per second with offload, divided by tokens per second without offload: for requests that reuse no KV, and
    for conversations whose KV is four times the size of the device's pool.
    """
    return _random(shape, bounded=device == CUDA and shape == "qwen3-8b")


@_command()
def host_tier(
    device: GpuDevice = CUDA,
    shape: Shape = "qwen3-8b",
    host: Annotated[str, Option("Memory of the host tier.", "SIZE")] = "40GiB",
    rounds: Annotated[int, Option("Number of times that the host memory is pinned.")] = 5,
) -> Report:
    """Time until all memory of the host tier is pinned, and the share of prompt tokens that the first conversations
    find there.
    """
    return _random(shape, bounded=device == CUDA and shape == "qwen3-8b")


@_command()
def speculative(
    model: Model = DEMO_MODEL,
    head: Annotated[
        Path | None,
        Option(
            "MTP head for the model; with a head, the proposer mtp is measured, too.",
            "PATH",
            "the shipped head of the demo model",
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        Option("Smaller model with the same tokenizer; with it, the proposer draft is measured, too.", "MODEL"),
    ] = None,
    device: EitherDevice = CPU,
    batch: Annotated[
        list[int] | None, Option("Concurrent requests; may be given several times.", absent="1, 8")
    ] = None,
    output_tokens: OutputTokens = 96,
    rounds: Annotated[int, Option("Repetitions; runs with and without drafts alternate.")] = 3,
) -> Report:
    """Speculative decoding: tokens per second with drafts, divided by tokens per second without; tokens per step; and
    whether tokens in float32 are equal with and without drafts.
    """
    from sidestream_kv.device.choice import torch_device

    torch_device(device)
    return _served(model, device=device)
