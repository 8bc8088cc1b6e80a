"""The interface for event loops, with a real tiny model, whose engine runs in a process of its own or on a thread of
this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llm_rig import with_sampling_defaults

from proof.mutations import applied, find
from sidestream import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineConfig,
    EngineStopped,
    ModelError,
    OffloadConfig,
    RaceError,
    RequestRejected,
    SamplingParams,
    SidestreamError,
)
from sidestream.client import process as process_module
from sidestream.config import NEUTRAL
from sidestream.errors import ProcessFailed
from sidestream.processes import child as child_module
from sidestream.types import Delta

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [f"The {name} " * 3 for name in ("whale", "ship", "sea", "crew")]
QUESTION = [{"role": "user", "content": "Why do whales sing?"}]
SIZES: dict[str, Any] = {"kv_memory": "8MiB", "compute_threads": 1}

KINDS = pytest.mark.parametrize("engine_process", [True, False], ids=["process", "thread"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its sampling defaults leave no choice where nothing else is asked for, though the temperature is high."""
    return with_sampling_defaults(tmp_path_factory.mktemp("tiny"), temperature=20.0, top_k=1)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    """What answers are compared with."""
    with LLM(directory, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module", params=[True, False], ids=["process", "thread"])
def model(
    request: pytest.FixtureRequest, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AsyncLLM]:
    """One of each kind for all tests that need none of their own: a process takes seconds to start."""
    offload = OffloadConfig(host="8MiB", disk=tmp_path_factory.mktemp("kv"))
    model = AsyncLLM(directory, **SIZES, offload=offload, engine_process=request.param)
    yield model
    asyncio.run(model.close())


async def news_of(model: AsyncLLM, prompt: Any, params: SamplingParams) -> list[Delta]:
    return [delta async for delta in model.generate(prompt, params)]


def tokens_of(news: list[Delta], index: int = 0) -> tuple[int, ...]:
    return tuple(token for delta in news if delta.index == index for token in delta.token_ids)


def text_of(news: list[Delta]) -> str:
    return "".join(delta.text for delta in news)


# ------------------------------------------------------------------ answers


def test_async_llm_gives_the_same_answers_as_llm(model: AsyncLLM, llm: LLM) -> None:
    async def use() -> list[list[Delta]]:
        return await asyncio.gather(*(news_of(model, prompt, GREEDY) for prompt in PROMPTS))

    for news, output in zip(asyncio.run(use()), llm.generate(PROMPTS, GREEDY), strict=True):
        assert (tokens_of(news), text_of(news)) == (output.token_ids, output.text)
    assert model.max_model_len == llm.engine.checker.bounds.longest
    assert model.sampling_defaults == llm.sampling_defaults != NEUTRAL
    assert model.health().status == "ok"


def test_sampling_defaults_of_the_checkpoint_are_used(model: AsyncLLM) -> None:
    news = asyncio.run(news_of(model, "The whale", SamplingParams(n=4, seed=1, max_tokens=8, ignore_eos=True)))
    answers = {tokens_of(news, index) for index in range(4)}
    assert [len(answer) for answer in answers] == [8]  # one, as top_k 1 leaves no choice
    freely = asyncio.run(
        news_of(model, "The whale", SamplingParams(n=4, seed=1, max_tokens=8, top_k=0, ignore_eos=True))
    )
    assert len({tokens_of(freely, index) for index in range(4)}) == 4


def test_chats_are_tokenized_outside_of_the_event_loop(
    model: AsyncLLM, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: list[threading.Thread] = []
    lay_out = model.tokenizer.chat
    monkeypatch.setattr(
        model.tokenizer, "chat", lambda messages: makers.append(threading.current_thread()) or lay_out(messages)
    )

    async def use() -> list[Delta]:
        return [delta async for delta in model.chat(QUESTION, GREEDY)]

    assert tokens_of(asyncio.run(use())) == llm.chat(QUESTION, GREEDY).token_ids
    assert makers and threading.main_thread() not in makers


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda model: model.generate(None), "^prompt is None"),
        (lambda model: model.generate({"role": "user"}), r"^prompt is .+chat\(\)"),
        (lambda model: model.generate([1, "a"]), "^prompt has 'a', which is not a whole number"),
        (lambda model: model.generate("hi", {"temperature": 0}), r"^params is {'temperature': 0}"),
        (lambda model: model.chat("hi"), "^messages is 'hi'"),
    ],
)
def test_a_wrong_prompt_is_refused_by_name(model: AsyncLLM, ask: Callable[[AsyncLLM], Any], words: str) -> None:
    async def use() -> None:
        with pytest.raises(RequestRejected, match=words):
            await anext(ask(model))

    asyncio.run(use())


def test_work_of_streams_and_engine_thread_can_be_read_while_it_is_done(model: AsyncLLM) -> None:
    async def use() -> None:
        before = await model.recent_spans(0)
        await news_of(model, list(range(1, 70)), GREEDY)
        spans = (await model.recent_spans(before.number)).spans
        assert {name for track, name, _, _ in spans if track == "engine"} == {
            "plan and launch",
            "wait for the step",
            "commit",
        }
        computed = [(start, stop) for track, name, start, stop in spans if track == "compute" and "decode" in name]
        waits = [(start, stop) for _, name, start, stop in spans if name == "wait for the step"]
        # The engine thread stops waiting for a step when the step has ended.
        assert any(start <= stop_of_step <= stop for start, stop in waits for _, stop_of_step in computed)
        values = (await model.metrics_snapshot()).values
        assert values["kv_token_bytes"][()] > 0
        assert values["prefill_measured_tokens_total"][()] >= 64
        assert values["prefill_measured_seconds_total"][()] > 0

    asyncio.run(use())


def test_flush_and_reset_reach_the_engine(model: AsyncLLM) -> None:
    prompt = list(range(1, 70))

    async def cached() -> int:
        return (await news_of(model, prompt, GREEDY))[-1].cached.total

    async def use() -> None:
        await cached()
        assert await cached() > 0
        assert await model.flush()
        assert (await model.metrics_snapshot()).values["transfer_bytes_total"][("disk-write",)] > 0
        assert set(await model.reset_prefix_cache()) == {"device", "host", "disk"}
        assert await cached() == 0
        await model.pause()
        waiting = asyncio.ensure_future(cached())
        assert not (await asyncio.wait([waiting], timeout=0.1))[0]
        await model.resume()
        await waiting
        running = model.generate("hi", SamplingParams(ignore_eos=True), request_name="job")
        await anext(running)
        assert (await model.cancel("job"), await model.cancel("job")) == (1, 0)
        assert [delta async for delta in running][-1].error == "the request was cancelled"

    asyncio.run(use())


def test_prefixes_are_pinned_listed_unpinned_and_dropped(model: AsyncLLM) -> None:
    prompt = list(range(5, 75))

    async def use() -> None:
        await news_of(model, prompt, GREEDY)
        pinned = await model.pin_prefix(prompt, ttl_s=60)
        assert pinned.tokens > 0 and pinned.tiers.keys() == {"device", "host", "disk"}
        assert [one.name for one in await model.cached_prefixes() if one.ttl_s is not None] == [pinned.name]
        with pytest.raises(RequestRejected, match="none of the"):
            await model.pin_prefix(prompt, ttl_s=60, cache_salt="other\ud800")
        assert (await model.unpin_prefix(name=pinned.name), await model.unpin_prefix(prompt)) == (1, 0)
        dropped = await model.drop_prefix(prompt)
        assert dropped["device"] == pinned.tokens // model.block_tokens
        assert (await news_of(model, prompt, GREEDY))[-1].cached.total == 0

    asyncio.run(use())


# ------------------------------------------------------------------ start and end


def is_gone(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every process that the test starts."""
    made: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def watched(*values: Any, **options: Any) -> subprocess.Popen[bytes]:
        made.append(start(*values, **options))
        return made[-1]

    monkeypatch.setattr(child_module.subprocess, "Popen", watched)
    return made


def run_first(monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """Have an engine's process run these lines before it begins."""
    command = child_module.child_command
    monkeypatch.setattr(
        child_module,
        "child_command",
        lambda *values, **options: [*command(*values, **options)[:-1], lines + command(*values, **options)[-1]],
    )


# What a download would tell: a directory needs none.
DOWNLOAD = """
from sidestream.engine import loading
resolve = loading.resolve
def fetch(model, *, progress):
    progress.begin("fetching", 10)
    progress.reached(4)
    progress.reached(10)
    progress.begin("checking", None)
    progress.reached(3)
    return resolve(model)
loading.resolve = fetch
"""


class Downloads:
    def __init__(self) -> None:
        self.reports: list[Any] = []

    def begin(self, stage: str, total_bytes: int | None) -> None:
        self.reports.append((stage, total_bytes))

    def reached(self, done_bytes: int) -> None:
        self.reports.append(done_bytes)


@KINDS
def test_start_reports_progress_and_close_leaves_no_process(
    engine_process: bool,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    started: list[subprocess.Popen[bytes]],
) -> None:
    caplog.set_level(logging.INFO, "sidestream")
    run_first(monkeypatch, DOWNLOAD)
    downloads, stages = Downloads(), list[tuple[str, int, int]]()
    timeline, logged = tmp_path / "timeline.json", "sampling defaults from generation_config.json: temperature 20"

    async def use() -> AsyncLLM:
        async with AsyncLLM(
            directory,
            **SIZES,
            engine_process=engine_process,
            timeline=timeline,
            check_order=True,
            progress=downloads,
            on_stage=lambda *stage: stages.append(stage),
        ) as model:
            assert (await news_of(model, PROMPTS[0], GREEDY))[-1].finish_reason == "length"
            assert (model.engine_pid is None, len(started)) == ((False, 1) if engine_process else (True, 0))
            if model.engine_pid is not None:
                assert not is_gone(model.engine_pid)
        return model

    model = asyncio.run(use())
    assert ("reading and checking the weights", 0, 0) in stages
    assert json.loads(timeline.read_text(encoding="utf-8"))
    if engine_process:
        assert [process.returncode for process in started] == [0]
        assert is_gone(started[0].pid)
        # 0 is reported where the other process has begun a stage
        assert downloads.reports == [("fetching", 10), 0, 4, 10, ("checking", None), 0, 3]
        assert logged in capfd.readouterr().err
    else:
        assert logged in caplog.text

    async def use_again(what: Any) -> None:
        await what()

    calls = (
        lambda: anext(model.generate("hi")),
        lambda: anext(model.chat(QUESTION)),
        model.flush,
        model.reset_prefix_cache,
        lambda: model.pin_prefix("hi", ttl_s=1),
        lambda: model.unpin_prefix("hi"),
        lambda: model.prefetch_prefix("hi"),
        model.cached_prefixes,
        lambda: model.drop_prefix("hi"),
        model.pause,
        model.resume,
        lambda: model.cancel("job"),
        model.__aenter__,
    )
    for call in calls:
        with pytest.raises(EngineStopped, match=r"^this AsyncLLM is closed: make a new one$"):
            asyncio.run(use_again(call))
    asyncio.run(model.close())  # idempotent
    assert model.health().status != "ok"


MUTATION = """
from proof.mutations import applied, find
kept = applied(find("store-copies-every-layer"))  # its end would undo the change
kept.__enter__()
"""


@KINDS
def test_a_wrong_order_of_work_raises_at_close(
    engine_process: bool, directory: Path, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    run_first(monkeypatch, MUTATION.strip() + "\n")

    async def use() -> None:
        model = AsyncLLM(
            directory,
            kv_memory="128KiB",
            compute_threads=1,
            engine_process=engine_process,
            check_order=True,
            offload=OffloadConfig(host="1MiB"),
        )
        await news_of(model, list(range(1, 70)), GREEDY)
        with pytest.raises(RaceError, match=r"the first: early_publish: .* made host slots 0 .* findable"):
            await model.close()
        await model.close()  # judged once

    with contextlib.nullcontext() if engine_process else applied(find("store-copies-every-layer")):
        asyncio.run(use())
    assert all(process.returncode == 0 for process in started)


@KINDS
def test_a_failed_start_raises_its_cause_once_and_leaves_no_process(
    engine_process: bool,
    directory: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    started: list[subprocess.Popen[bytes]],
) -> None:
    def failure_of(model: Path, options: dict[str, Any]) -> SidestreamError:
        with pytest.raises(SidestreamError) as failure:
            AsyncLLM(model, **options, engine_process=engine_process)
        return failure.value

    cases = [(with_sampling_defaults(tmp_path, top_p=1.5), SIZES), (directory, {**SIZES, "kv_memory": "1KiB"})]
    with ThreadPoolExecutor(2 if engine_process else 1) as starts:  # a process takes seconds
        of_model, of_size = starts.map(failure_of, *zip(*cases, strict=True))
    assert (type(of_model), type(of_size)) == (ModelError, ConfigError)
    assert "generation_config.json: top_p is 1.5: it must be a number in (0.0, 1.0]" in str(of_model)
    assert "kv_memory" in str(of_size)
    assert len(started) == 2 * engine_process
    assert all(process.returncode is not None and is_gone(process.pid) for process in started)
    said = capfd.readouterr().err
    assert str(of_model) not in said and str(of_size) not in said


def test_a_process_killed_before_it_reads_its_start_is_an_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_first(monkeypatch, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(ProcessFailed, match="the engine's process ended while it started: it was killed by SIGKILL"):
        AsyncLLM(directory, **SIZES)


NO_THREADS = """
import _thread, sys, threading
def refuse(*arguments):
    raise RuntimeError("can't start new thread")
def import_engine(name, *rest):
    if name == "sidestream.engine.loading":
        threading._start_new_thread = refuse
sys.meta_path.insert(0, type("Finder", (), {"find_spec": staticmethod(import_engine)}))
"""


def test_an_error_about_a_refused_thread_names_system_limits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_first(monkeypatch, NO_THREADS)
    limits = (
        r"the system refused a new thread or process; its limits: .*\d+ threads of this machine \(kernel.threads-max"
    )
    with pytest.raises(SidestreamError, match=limits):
        AsyncLLM(directory, **SIZES)

    def fork(*values: Any, **options: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(child_module.subprocess, "Popen", fork)
    with pytest.raises(ConfigError, match=limits):
        AsyncLLM(directory, **SIZES)


def test_a_tokenizer_that_fails_to_load_ends_the_engine_process(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["sidestream.async_llm"]
    killed: list[str] = []

    class Started:
        info = SimpleNamespace(model="whale")

        def __init__(self, model: str, *_: Any, **__: Any) -> None:
            self._model = model

        def kill(self) -> None:
            killed.append(self._model)

    def fail(path: str) -> Any:
        raise ModelError(f"injected: {path} has no tokenizer")

    monkeypatch.setattr(module, "EngineProcess", Started)
    monkeypatch.setattr(module.Tokenizer, "load", fail)
    with pytest.raises(ModelError, match="injected: whale has no tokenizer"):
        AsyncLLM("a whale", **SIZES)
    assert killed == ["a whale"]


def test_a_stopped_engine_process_stalls_and_close_ends_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_SILENCE_S", 0.5)
    model = AsyncLLM(directory, **SIZES, watchdog_timeout_s=0.2)
    assert model.engine_pid is not None

    async def use() -> None:
        while model.health().status == "stalled":  # the process may be slow
            await asyncio.sleep(0.01)
        os.kill(model.engine_pid, signal.SIGSTOP)
        while model.health().status == "ok":
            await asyncio.sleep(0.01)
        with pytest.raises(EngineStopped, match="the engine is stalled"):
            await model.flush()
        with pytest.raises(ProcessFailed, match=r"it did not answer for 0\.5 s and was killed"):
            await model.close()

    asyncio.run(asyncio.wait_for(use(), 30.0))
    assert model.health().status == "failed"


def test_config_and_options_cannot_both_be_given() -> None:
    with pytest.raises(TypeError, match=r"give either config or options \(kv_memory\), not both"):
        AsyncLLM("whale", config=EngineConfig(), kv_memory="8MiB")
