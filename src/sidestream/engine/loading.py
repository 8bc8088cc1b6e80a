"""Loads a model by name, with its tokenizer, sampling defaults and draft model or head, and starts its engine in this
process. With tensor parallelism, it also starts the processes of the other ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sidestream.config import NEUTRAL, EngineConfig, SamplingDefaults
from sidestream.engine import Engine, build_engine
from sidestream.engine.kv_sockets import check_endpoints
from sidestream.errors import (
    ConfigError,
    DeviceLost,
    ModelError,
    ProcessFailed,
    RaceError,
    RequestRejected,
    SidestreamError,
)
from sidestream.grammar import GrammarCompiler
from sidestream.models import PagedModel
from sidestream.models.catalog import Progress, resolve, shipped_head
from sidestream.models.draft import attach_draft
from sidestream.models.generation import sampling_defaults
from sidestream.models.loader import cache_parts, config_directory, default_block_tokens_of, load_for
from sidestream.models.mtp import attach_head
from sidestream.models.replacement import check_replaces, take_weights
from sidestream.processes.child import CLOSE_S
from sidestream.processes.garbage import freeze_gc_heap
from sidestream.processes.progress import start_lines
from sidestream.ranks.worker_pool import RankProcesses, check_ranks, threads_of_rank
from sidestream.speculate import Proposer
from sidestream.speculate.proposer import DraftModelProposer, MtpProposer
from sidestream.tokenizer import Tokenizer
from sidestream_kv.device.choice import torch_device
from sidestream_kv.device.machine import process_age_s
from sidestream_kv.metrics import Timeline
from sidestream_kv.offload.tiers.shared_memory import content_of
from sidestream_kv.offload.tiers.stack import share_of_rank

if TYPE_CHECKING:
    from sidestream_order.checker import Checker

log = logging.getLogger(__name__)

_LIVE_SPANS = 2_000
"""Spans that a timeline without a file keeps for `Timeline.read`."""

OnStage = Callable[[str, int, int], None]
"""`on_stage(stage, done, total)` is called in each stage of the start; `total` is 0 if the progress is unknown."""


@contextlib.contextmanager
def shown_start(
    model: str | Path, progress: Progress | None, on_stage: OnStage | None
) -> Iterator[tuple[Progress | None, OnStage]]:
    """The caller's callbacks; without `on_stage`, callbacks that print lines (`progress.py`)."""
    if on_stage is not None:
        yield progress, on_stage
        return
    with start_lines() as lines:
        lines.update(f"loading {model}")
        yield progress or lines, lines.update


def ignore_stage(stage: str, done: int, total: int) -> None:
    """The default `on_stage`."""


def chosen_config(config: EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
    """`config`, or an EngineConfig of `options`. Raises TypeError when both are given."""
    if config is not None and options:
        raise TypeError(f"give either config or options ({', '.join(options)}), not both")
    return config or EngineConfig(**options)


class LoadedEngine:
    """A loaded model and its running engine.

    path      the model's directory, or its hub id
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        *,
        timeline: str | Path | None = None,
        check_order: bool = False,
        progress: Progress | None = None,
        on_stage: OnStage = ignore_stage,
    ) -> None:
        """Parameters and errors are those of `LLM`."""
        device = torch_device(config.device)  # checked before any weights are read
        config.sizes(device.type)
        check_ranks(config)
        check_endpoints(config.kv_events)
        if config.offload is not None and config.offload.shared_memory is not None:
            share_of_rank(config.offload, 0, config.tensor_parallel)  # refuses several ranks
            content_of(config.offload.shared_memory)  # raises an error if no cache process is there
        self.path = resolve(str(model), progress=progress)
        block_tokens = default_block_tokens_of(self.path, device=device)  # reads the config before all other files
        if config.block_tokens is None:  # checked together with the other sizes, before weights are read
            config = dataclasses.replace(config, block_tokens=block_tokens)
        self.config = config
        self.sampling_defaults = self._sampling_defaults()
        on_stage("reading the tokenizer", 0, 0)
        self._timeline = Timeline(_LIVE_SPANS, on_demand=True) if timeline is None else Timeline()
        self._timeline_path = timeline
        self.tokenizer = Tokenizer.load(self.path)
        draft_path = self._draft_path(progress)
        self._checker: Checker | None = None
        if check_order:
            from sidestream_order.checker import Checker  # the test kit is imported only on request

            self._checker = Checker()
        self._processes: RankProcesses | None = None
        if config.tensor_parallel > 1:
            self.config = config = dataclasses.replace(config, compute_threads=threads_of_rank(config))
            cache_parts(
                self.path,
                dtype=config.dtype,
                kv_cache_dtype=config.kv_cache_dtype,
                block_tokens=config.block_tokens,
                device=device,
                ranks=config.tensor_parallel,
            )  # raises an error for a model that cannot be divided among the ranks, before any process is started
            on_stage("starting the ranks", 0, 0)
            self._processes = RankProcesses(self.path, config)
        try:
            self.engine: Engine = self._build(config, device, draft_path, on_stage)
        except BaseException as error:
            if self._processes is None:
                raise
            reason = self._processes.explain(error)
            self._processes.kill()
            raise reason from (error if reason is not error else None)
        self._unfreeze_gc_heap = freeze_gc_heap()
        self._hangs = False  # as `close` found out
        self.engine.parts.metrics.set("engine_ready_seconds", process_age_s())

    def _build(self, config: EngineConfig, device: torch.device, draft_path: str | None, on_stage: OnStage) -> Engine:
        """Load the model, or this rank's share of it, and start the engine."""
        group = None if self._processes is None else self._processes.group
        on_stage("reading and checking the weights", 0, 0)
        loaded = load_for(self.path, config, device=device, group=group)
        _warn_of_missing_rows(self.tokenizer, loaded.vocab_size)
        if config.num_loras:
            loaded.add_adapters(slots=config.num_loras, rank=config.max_lora_rank)
        proposer = self._proposer(loaded, draft_path, on_stage)
        on_stage("building the engine", 0, 0)
        engine = build_engine(
            loaded,
            config,
            eos_ids=self.tokenizer.eos_ids,
            timeline=self._timeline,
            tracer=self._checker,
            proposer=proposer,
            defaults=self.sampling_defaults,
            ranks=None if self._processes is None else self._processes.transport.ranks,
            group=group,
            grammars=_grammars(self.tokenizer, loaded.vocab_size),
            read_weights=partial(self._read_weights, weakref.ref(loaded), device),  # a closed engine holds no weights
            tell=on_stage,
        )
        if self._processes is not None:
            try:
                self._processes.start_serving()
            except BaseException as error:
                self._processes.transport.ranks.lose(DeviceLost(f"a rank did not start: {error}"))
                engine.close()
                raise
        self._load_adapters(engine, on_stage)
        return engine

    def _load_adapters(self, engine: Engine, on_stage: OnStage) -> None:
        """Load the adapters of the config. If one cannot be loaded, closes the engine and raises ModelError."""
        for number, (name, _, path) in enumerate(one.partition("=") for one in self.config.lora_modules):
            on_stage(f"loading adapter {name}", number, len(self.config.lora_modules))
            try:
                engine.adapters.load(name, path, timeout_s=CLOSE_S)
            except SidestreamError as error:
                engine.close()
                raise ModelError(f"adapter {name}: {error}") from error

    def _read_weights(
        self, model: Callable[[], PagedModel | None], device: torch.device, path: str
    ) -> tuple[Callable[[], None], str]:
        """The function that gives the served model the weights of another checkpoint, and their fingerprint. Raises
        ModelError and ConfigError.
        """
        if (served := model()) is None:
            raise ConfigError("the engine was closed")
        if self.config.speculative is not None and self.config.speculative.proposer == "mtp":
            raise ConfigError("a head for multi-token prediction belongs to its weights: start a new engine")
        if served.adapters is not None:
            raise ConfigError("adapters belong to the weights that the engine has: start a new one")
        other = load_for(resolve(path), self.config, device=device)
        check_replaces(served, other)
        return partial(take_weights, served, other), other.fingerprint

    def close(self, *, drain_s: float = 0.0) -> None:
        """Wait up to `drain_s` seconds for running requests and abort the others. Then store all complete blocks and
        end the engine. Idempotent.

        Afterwards, the memory of the weights is free and, on a GPU, that of KV on device and host, too.

        Raises RaceError if the order checker has findings, and ProcessFailed if the engine hangs.
        """
        if self._hangs:
            return
        self._close_engine(drain_s)
        if self._processes is not None:
            self._processes.close()
        self._unfreeze_gc_heap()
        if self._timeline_path is not None:
            self._timeline.write(self._timeline_path)
        checker, self._checker = self._checker, None
        if checker is not None:
            if self.engine.health().status != "failed":
                checker.check_idle()
            if checker.findings:
                raise RaceError(
                    f"{len(checker.findings)} accesses were in the wrong order; the first: {checker.findings[0]}"
                )

    def _close_engine(self, drain_s: float) -> None:
        """Close the engine on a thread of its own, because a wait for the device may never return."""
        closed: Future[None] = Future()

        def close() -> None:
            try:
                self.engine.close(drain_s=drain_s)
                closed.set_result(None)
            except BaseException as error:
                closed.set_exception(error)

        closing = threading.Thread(target=close, name="sidestream-closing", daemon=True)
        closing.start()
        bound_s = drain_s + CLOSE_S
        if wait([closed], bound_s).done:
            return closed.result()
        hung = self.engine.running_thread or closing
        stack = traceback.format_stack(sys._current_frames().get(hung.ident or 0))
        log.critical("the engine does not close, because thread %s hangs here:\n%s", hung.name, "".join(stack))
        error = ProcessFailed(
            f"the engine did not close within {bound_s:g} s, because thread {hung.name} hangs (the log shows where): "
            "KV that was not stored yet is lost; end this process, which holds the device's memory and the disk tier"
        )
        self._hangs = True
        self.engine.abandon(error)
        if self._processes is not None:
            self._processes.kill()
        self._unfreeze_gc_heap()
        raise error

    def _sampling_defaults(self) -> SamplingDefaults:
        """Read and log the model's sampling defaults."""
        if self.config.generation_config == "none":
            log.info("sampling defaults: %s; generation_config.json is ignored", NEUTRAL)
            return NEUTRAL
        defaults = sampling_defaults(config_directory(self.path))
        from_file = (
            "sampling defaults from generation_config.json: %s; --generation-config none "
            "(in Python generation_config='none') ignores them"
        )
        log.info("sampling defaults: %s" if defaults == NEUTRAL else from_file, defaults)
        return defaults

    def _draft_path(self, progress: Progress | None) -> str | None:
        """Path of the draft model; None: no draft model. Checks that its tokenizer equals the model's, before any
        weights are read.
        """
        wanted = self.config.speculative
        if wanted is None or wanted.model is None:
            return None
        with _about("the draft model"):
            path = resolve(str(wanted.model), progress=progress)
            theirs = Tokenizer.load(path)
        self.tokenizer.check_equal(theirs, name=str(wanted.model))
        return path

    def _proposer(self, model: PagedModel, draft_path: str | None, on_stage: OnStage) -> Proposer | None:
        """The proposer (which drafts tokens), if it has weights: a head or a draft model. None: no drafts, or a
        proposer without weights, which `build_engine` makes.
        """
        wanted = self.config.speculative
        if wanted is not None and wanted.proposer == "mtp":
            with _about("the head"):
                return MtpProposer(attach_head(model, wanted.head or shipped_head(self.path) or self.path))
        if draft_path is None:
            return None
        on_stage("reading the draft model's weights", 0, 0)
        max_model_len = self.config.max_model_len or model.max_model_len
        config = dataclasses.replace(
            self.config,
            dtype=model.layout.compute_dtype,
            block_tokens=model.layout.block_tokens,
            max_model_len=max_model_len,
        )
        with _about("the draft model"):
            draft = load_for(draft_path, config, device=torch_device(self.config.device))
        num_layers = attach_draft(model, draft, max_model_len=max_model_len, num_tokens=self.tokenizer.vocab_size)
        return DraftModelProposer(draft, num_layers=num_layers, vocab_size=model.vocab_size)


def _grammars(tokenizer: Tokenizer, vocab_size: int) -> GrammarCompiler:
    """The compiler of structured outputs. It reads the tokenizer while the engine is built, not while it serves."""
    grammars = GrammarCompiler(tokenizer.to_json(), vocab_size=vocab_size, eos_ids=tokenizer.eos_ids)

    def prepare() -> None:
        with contextlib.suppress(ValueError):  # the first request that needs it gets the error
            grammars.prepare()

    threading.Thread(target=prepare, name="sidestream-grammars", daemon=True).start()
    return grammars


def _warn_of_missing_rows(tokenizer: Tokenizer, num_rows: int) -> None:
    """Log a warning if the tokenizer has token ids that the model has no embedding for."""
    missing = tokenizer.vocab_size - num_rows
    if missing <= 0:
        return
    chat = ""
    if tokenizer.has_chat_template:
        with contextlib.suppress(RequestRejected):
            ids = tokenizer.chat([{"role": "user", "content": "Hello"}])
            chat = "; the chat template writes one of them, so every chat is refused" if max(ids) >= num_rows else ""
    names = ", ".join(repr(name) for name in tokenizer.token_strings(range(num_rows, tokenizer.vocab_size)[:4]))
    log.warning(
        "the tokenizer has %d token ids, the model %d embeddings: a prompt with one of the last %d ids (%s%s) "
        "is refused%s; take the tokenizer that belongs to the weights",
        tokenizer.vocab_size,
        num_rows,
        missing,
        names,
        ", …" if missing > 4 else "",
        chat,
    )


@contextlib.contextmanager
def _about(part: str) -> Iterator[None]:
    """Turn ConfigErrors and download errors into ModelErrors whose message starts with the name of the part."""
    try:
        yield
    except ConfigError as error:
        raise ModelError(f"{part}: {error}") from error
    except OSError as error:
        raise ModelError(
            f"{part}: it cannot be fetched ({str(error).strip().splitlines()[0]}); check the path or the name"
        ) from error
