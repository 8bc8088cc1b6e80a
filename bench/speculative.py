"""Speculative decoding: tokens per second with drafts, divided by tokens per second without drafts; tokens per step;
and a check that tokens and accept lengths are equal with asynchronous and synchronous execution.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.steps import StepClock
from proof.report import Figure, at_least, at_most
from sidestream.cli.prompt_runs import ChildEngine
from sidestream.config import SamplingParams, SpeculativeConfig
from sidestream.errors import SidestreamError
from sidestream.llm import LLM
from sidestream.runner.executor import Executor, LaunchedStep, PreparedStep
from sidestream.runner.forward import ForwardOutput
from sidestream.runner.mailbox import Delivered
from sidestream.runner.step_inputs import StepInputs
from sidestream.types import BatchPlan
from sidestream_kv.device.kinds import CUDA
from sidestream_kv.types import Fence, LayerGates

_DRAFTS = 4
_SEVERAL = 8  # number of requests in the comparison of accept lengths, and lower bound of max_running
# Number of turns that each engine has in a round on a GPU, if all requests run at once. A turn takes only a fifth of a
# second, and the host may be slow for a longer time than one turn.
_TURNS = 3


def measure(
    model: str,
    *,
    head: Path | None,
    draft_model: str | None,
    device: str,
    batch: Sequence[int] | None,
    output_tokens: int,
    rounds: int,
    on_progress: Callable[[str], None],
) -> list[Figure]:
    """Run the same prompts on engines that differ only in their proposer. On a CPU, only the equality of tokens and
    accept lengths has bounds.

    The prompts are tasks about topics outside the training set of the shipped head.
    """
    from sidestream.models.catalog import resolve, shipped_head

    path, on_gpu, batches = resolve(model), device == CUDA, batch or (1, 8)
    prompts = _held_out(path, max(*batches, _SEVERAL))
    proposers = _proposers(head or shipped_head(path), None if draft_model is None else resolve(draft_model))
    options: dict[str, Any] = {
        "device": device,
        "kv_memory": "1GiB",
        "prefix_cache": False,
        "max_running": max(*batches, _SEVERAL),
        "generation_config": "none",
    }
    groups = [prompts[:size] for size in batches]
    on_progress("steps without drafts")
    figures = _steps(str(path), options, "plain", None, groups, output_tokens, on_gpu=on_gpu)
    for name, config in proposers.items():
        on_progress(f"accept lengths of {name}")
        figures += _equalities(str(path), options, name, config, prompts[:_SEVERAL], output_tokens)
        on_progress(f"steps of {name}")
        figures += _steps(str(path), options, name, config, groups, output_tokens, on_gpu=on_gpu)
    idle_shares = [
        figure.value
        for figure in figures
        if figure.name.startswith("idle_share_") and not figure.name.endswith("_plain")
    ]
    figures.append(Figure("speculative_idle_share_max", max(idle_shares), "share", at_most(0.03) if on_gpu else None))
    speeds = _speeds(
        str(path),
        options,
        proposers,
        prompts,
        batches,
        output_tokens,
        rounds=rounds,
        on_gpu=on_gpu,
        on_progress=on_progress,
    )
    return figures + _speedups(speeds, list(proposers), batches, on_gpu=on_gpu)


def _proposers(head: Path | None, draft_model: str | None) -> dict[str, dict[str, Any]]:
    """Options of SpeculativeConfig by the proposer's name in the figures."""
    proposers: dict[str, dict[str, Any]] = {"ngram": {"proposer": "ngram", "max_drafts": _DRAFTS}}
    if head is not None:
        proposers["mtp"] = {"proposer": "mtp", "max_drafts": _DRAFTS, "head": str(head.resolve())}
    if draft_model is not None:
        proposers["draft"] = {"proposer": "draft", "max_drafts": _DRAFTS, "model": draft_model}
    return proposers


def _speeds(
    path: str,
    options: dict[str, Any],
    proposers: dict[str, dict[str, Any]],
    prompts: list[list[int]],
    batches: Sequence[int],
    output_tokens: int,
    *,
    rounds: int,
    on_gpu: bool,
    on_progress: Callable[[str], None],
) -> dict[tuple[str, int], list[float]]:
    """Tokens per second of each turn, by proposer ("plain": without drafts) and batch size. The engines alternate."""
    speeds: dict[tuple[str, int], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as ends:
        # One process per engine: the compute threads of two engines in one process slow each other down.
        engines = {"plain": ends.enter_context(ChildEngine(path, dict(options)))}
        engines |= {
            name: ends.enter_context(ChildEngine(path, {**options, "speculative": config}))
            for name, config in proposers.items()
        }
        for number in range(1, rounds + 1):
            for batch in batches:
                on_progress(f"round {number} of {rounds}, {batch} at once")
                groups = [prompts[at : at + batch] for at in range(0, max(batch, _SEVERAL - batch + 1), batch)]
                for _ in range(_TURNS if on_gpu and len(groups) == 1 else 1):
                    for name, engine in engines.items():
                        seconds = sum(
                            engine.generate(group, max_tokens=output_tokens, at_once=True).seconds for group in groups
                        )
                        speeds[name, batch].append(batch * len(groups) * output_tokens / seconds)
    return speeds


def _speedups(
    speeds: dict[tuple[str, int], list[float]], proposers: Sequence[str], batches: Sequence[int], *, on_gpu: bool
) -> list[Figure]:
    figures: list[Figure] = []
    for name in proposers:
        ratios = {
            batch: median(a / b for a, b in zip(speeds[name, batch], speeds["plain", batch], strict=True))
            for batch in batches
        }
        figures += [Figure(f"speedup_b{batch}_{name}", ratio, "ratio") for batch, ratio in ratios.items()]
        figures.append(Figure(f"speedup_min_{name}", min(ratios.values()), "ratio", at_least(0.97) if on_gpu else None))
        if name == "mtp" and on_gpu:
            figures.append(Figure("speedup_b1", ratios[min(batches)], "ratio", at_least(1.8)))
    return figures + [
        Figure(f"plain_tokens_per_s_b{batch}", median(speeds["plain", batch]), "tokens/s") for batch in batches
    ]


def _held_out(path: str, count: int) -> list[list[int]]:
    """Prompts about different topics, formatted with the model's chat template if it has one. Topics repeat if there
    are too few.
    """
    from sidestream.text import sample_tasks
    from sidestream.tokenizer import Tokenizer

    tokenizer, tasks = Tokenizer.load(path), sample_tasks(held_out=True)
    chosen = [tasks[17 * at % len(tasks)] for at in range(count)]
    if not tokenizer.has_chat_template:
        return [tokenizer.encode(task) for task in chosen]
    return [tokenizer.chat([{"role": "user", "content": task}]) for task in chosen]


def _equalities(
    path: str, options: dict[str, Any], name: str, config: dict[str, Any], prompts: list[list[int]], output_tokens: int
) -> list[Figure]:
    """Compare tokens and accept lengths of asynchronous and synchronous execution, with a fixed number of drafts. Also
    count the tokens per step.

    Runs in float32, where rounding hardly depends on the number of rows in a matrix product. Accept lengths are
    compared step by step, except for a request's last steps, whose number of drafts depends on the steps in flight.
    """
    fixed, params = (
        SpeculativeConfig(**config, adaptive=False),
        SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True),
    )
    options = {**options, "max_running": _SEVERAL}  # fewer graphs to capture
    waits = steps = 0
    with LLM(path, **{**options, "dtype": "float32"}) as llm:
        plain = [output.token_ids for output in llm.generate(prompts, params)]
    tokens, lengths = [], []
    for asynchronous in (True, False):
        with LLM(path, **{**options, "dtype": "float32"}, speculative=fixed, asynchronous=asynchronous) as llm:
            seen = _accept_lengths(llm)
            tokens.append([output.token_ids for output in llm.generate(prompts, params)])
            lengths.append(dict(seen))
            if asynchronous:
                waits = sum(count for reason, count in llm.engine.parts.device.host_waits().items() if reason != "step")
                steps = llm.engine.num_steps
    every = [length for of_request in lengths[0].values() for length in of_request.values()]
    alike = all(
        {at: length for at, length in of_request.items() if at < max(of_request) - _DRAFTS}
        == {at: length for at, length in lengths[1][request].items() if at < max(of_request) - _DRAFTS}
        for request, of_request in lengths[0].items()
    )
    return [
        Figure(f"tokens_per_step_{name}", sum(every) / len(every), "tokens"),
        Figure(f"tokens_identical_{name}", float(tokens[0] == tokens[1] == plain), "share", at_least(1)),
        Figure(f"accept_lengths_identical_{name}", float(alike), "share", at_least(1)),
        Figure(f"host_waits_per_step_{name}", waits / steps, "waits/step", at_most(0)),
    ]


def _steps(
    path: str,
    options: dict[str, Any],
    name: str,
    config: dict[str, Any] | None,
    asked: Sequence[list[list[int]]],
    output_tokens: int,
    *,
    on_gpu: bool,
) -> list[Figure]:
    """Step times with default options, for each number of concurrent requests. There are two runs.

    The first run measures the engine thread's time to launch a step with drafts, and the part of this time after the
    forward pass was enqueued (for publishing the accept lengths, and for handing the step over to its reader).

    The second run has a StepClock, which itself takes some engine-thread time. It measures the time from the end of one
    step on the device to the end of the next step, and the device's idle time between the two. Only steps in which all
    requests have drafts are counted; without `config` (no drafts), steps in which all requests decode.
    """
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    speculative = None if config is None else SpeculativeConfig(**config)
    figures = []
    launching: list[float] = []
    dispatching: list[float] = []
    with LLM(path, **options, speculative=speculative) as llm:
        parts = llm.engine.parts
        llm.generate(asked[0], params)
        handed_over = _HandedOver(parts.executor)
        for prompts in asked:
            end = f"b{len(prompts)}_{name}"
            handed_over.clear()
            llm.generate(prompts, params)
            figures.append(
                Figure(f"uncaptured_share_{end}", handed_over.uncaptured / handed_over.launched_steps, "share")
            )
            if handed_over.launching:
                launching += handed_over.launching
                dispatching += handed_over.dispatching
                figures.append(Figure(f"launch_us_{end}", 1e6 * median(handed_over.launching), "us"))
        clock = StepClock(parts.device, parts.executor)
        for prompts in asked:
            first, end = len(clock.launched_steps), f"b{len(prompts)}_{name}"
            llm.generate(prompts, params)
            drafts = [
                step.drafts if step.rows == len(prompts) and not step.given else -1 for step in clock.launched_steps
            ]
            least = 0 if config is None else 1
            chosen = [at for at in range(first + 1, len(drafts)) if drafts[at] >= least and drafts[at - 1] >= least]
            if not chosen:
                continue
            lengths, idle = clock.steps(chosen)
            figures.append(Figure(f"step_ms_{end}", 1e3 * median(lengths), "ms"))
            figures.append(Figure(f"idle_share_{end}", sum(idle) / sum(lengths), "share"))
            if config is not None:
                figures.append(
                    Figure(
                        f"drafts_per_row_{end}", sum(drafts[at] for at in chosen) / len(chosen) / len(prompts), "tokens"
                    )
                )
    if config is None:
        return figures
    if not launching or not any(figure.name.startswith("idle_share_") for figure in figures):
        raise SidestreamError(f"no step had drafts of {name}, so there is nothing to measure: raise --output-tokens")
    return [
        *figures,
        Figure(f"launch_us_median_{name}", 1e6 * median(launching), "us"),
        Figure(f"dispatch_us_median_{name}", 1e6 * median(dispatching), "us", at_most(66) if on_gpu else None),
    ]


def _accept_lengths(llm: LLM) -> dict[int, dict[int, int]]:
    """Start to record accept lengths. The returned dictionary grows with each step: the first key is the request id,
    the second key is the request's number of tokens before the step. Only rows with the maximum number of drafts count.
    """
    seen: dict[int, dict[int, int]] = defaultdict(dict)
    count = llm.engine.loop.spec_stats.count

    def count_and_keep(step: LaunchedStep, delivered: Delivered) -> None:
        sampling = (row for row in step.batch.rows if row.samples)
        for row, result in zip(sampling, delivered.rows, strict=True):
            request = llm.engine.parts.scheduler.get(row.request_id)
            if row.drafts == _DRAFTS and request is not None and not isinstance(result, int):
                seen[row.request_id][len(request.tokens) - len(result.token_ids)] = len(result.token_ids)
        count(step, delivered)

    llm.engine.loop.spec_stats.count = count_and_keep  # type: ignore[method-assign]
    return seen


class _HandedOver:
    """Times the launches of an executor on the engine thread.

    launching        seconds of each launch of a step with drafts
    dispatching      seconds of each of these launches after the forward pass was enqueued
    launched_steps   number of all launched steps
    uncaptured       number of steps launched without a CUDA graph
    """

    def __init__(self, executor: Executor) -> None:
        self.launching: list[float] = []
        self.dispatching: list[float] = []
        self.launched_steps = self.uncaptured = 0
        self._enqueued_s = 0.0
        launch, run_eagerly, run = executor.launch, executor._work._run_eagerly, executor._forward.run

        def timed(batch: BatchPlan, *, after: tuple[Fence, ...], gates: LayerGates) -> LaunchedStep:
            self.launched_steps += 1
            begin_s = self._enqueued_s = time.perf_counter()
            step = launch(batch, after=after, gates=gates)
            end_s = time.perf_counter()
            if any(batch.columns.drafts):
                self.launching.append(end_s - begin_s)
                self.dispatching.append(end_s - self._enqueued_s)
            return step

        def counted(batch: BatchPlan, step: PreparedStep) -> tuple[StepInputs, ForwardOutput]:
            self.uncaptured += 1
            return run_eagerly(batch, step)

        executor.launch = timed  # type: ignore[method-assign]
        executor._work._run_eagerly = counted  # type: ignore[method-assign]
        executor._forward.run = self._behind(run)  # type: ignore[method-assign]
        if executor._graphs is not None:
            executor._graphs.replay = self._behind(executor._graphs.replay)  # type: ignore[method-assign]

    def clear(self) -> None:
        """Forget all measurements."""
        self.launching.clear()
        self.dispatching.clear()
        self.launched_steps = self.uncaptured = 0

    def _behind(self, enqueue: Callable[..., ForwardOutput]) -> Callable[..., ForwardOutput]:
        """Wrap the function that enqueues a forward pass, so that the time at its return is recorded."""

        def enqueued(*given: Any, **more: Any) -> ForwardOutput:
            computed = enqueue(*given, **more)
            self._enqueued_s = time.perf_counter()
            return computed

        return enqueued
