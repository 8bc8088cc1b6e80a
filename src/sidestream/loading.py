"""From a model's name to a running engine in this process: weights, draft model or head, tokenizer, sampling defaults,
check of order.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from sidestream.config import NEUTRAL, EngineConfig, SamplingDefaults
from sidestream.device.choice import torch_device
from sidestream.engine import Engine, build_engine
from sidestream.errors import ConfigError, ModelError, RaceError
from sidestream.garbage import settle_garbage
from sidestream.metrics import Timeline
from sidestream.models import PagedModel, load_model
from sidestream.models.catalog import Progress, resolve, shipped_head
from sidestream.models.draft import attach_draft
from sidestream.models.generation import sampling_defaults
from sidestream.models.loader import config_directory
from sidestream.models.mtp import attach_head
from sidestream.speculate import Proposer
from sidestream.speculate.draft_model import DraftModelProposer
from sidestream.speculate.mtp import MtpProposer
from sidestream.testing.checker import Checker
from sidestream.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Tell = Callable[[str, int, int], None]
"""Is told what the start is at, in words, and how much of that is done, of how much; 0 of 0: unknown."""


def name_of(model: str | Path) -> str:
    """What clients call a model: the name of its directory, or the name that it was asked for by."""
    return Path(model).name if Path(model).is_dir() else str(model)


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
        tell: Tell = lambda what, done, total: None,
    ) -> None:
        """Load `model` (a directory, a hub id or a name of `sidestream models`) and start an engine. Raises
        ConfigError, ModelError for the model's part.
        """
        self.config = config
        device = torch_device(config.device)  # first: without a GPU that was asked for, nothing large need be read
        config.sizes(device.type)
        self.path = resolve(str(model), progress=progress)
        self.sampling_defaults = self._sampling_defaults()
        self._timeline = Timeline() if timeline is not None else None
        self._timeline_path = timeline
        self.tokenizer = Tokenizer.load(self.path)
        draft_path = self._draft_path(progress)
        tell("reading the weights", 0, 0)
        loaded = load_model(
            self.path,
            dtype=config.dtype,
            block_tokens=config.block_tokens,
            device=device,
            max_model_len=config.max_model_len,
        )
        proposer = self._proposer(loaded, draft_path, tell)
        self._checker = Checker() if check_order else None
        self.engine: Engine = build_engine(
            loaded,
            config,
            eos_ids=self.tokenizer.eos_ids,
            timeline=self._timeline,
            tracer=self._checker,
            proposer=proposer,
            defaults=self.sampling_defaults,
            tell=tell,
        )
        self._unsettle_garbage = settle_garbage()

    def close(self, *, drain_s: float = 0.0) -> None:
        """Abort what runs after `drain_s` seconds, bring what is complete to the tiers, end the threads. Idempotent.

        Raises RaceError when the order was checked and was wrong.
        """
        self.engine.close(drain_s=drain_s)
        self._unsettle_garbage()
        if self._timeline is not None and self._timeline_path is not None:
            self._timeline.write(self._timeline_path)
        checker, self._checker = self._checker, None
        if checker is not None:
            if self.engine.health().status != "failed":
                checker.check_idle()
            if checker.findings:
                raise RaceError(
                    f"the order of {len(checker.findings)} accesses was wrong; the first: {checker.findings[0]}"
                )

    def _sampling_defaults(self) -> SamplingDefaults:
        """Read the sampling options of requests that leave them out, and log them."""
        if self.config.generation_config == "none":
            log.info("sampling defaults: %s; generation_config.json is ignored", NEUTRAL)
            return NEUTRAL
        defaults = sampling_defaults(config_directory(self.path))
        from_file = "sampling defaults from generation_config.json: %s; --generation-config none ignores them"
        log.info("sampling defaults: %s" if defaults == NEUTRAL else from_file, defaults)
        return defaults

    def _draft_path(self, progress: Progress | None) -> str | None:
        """Where the draft model is, if there is one; before anything large is read, it is known to have the same
        tokenizer.
        """
        wanted = self.config.speculative
        if wanted is None or wanted.model is None:
            return None
        with _about("the draft model"):
            path = resolve(str(wanted.model), progress=progress)
            theirs = Tokenizer.load(path)
        self.tokenizer.check_equal(theirs, name=str(wanted.model))
        return path

    def _proposer(self, model: PagedModel, draft_path: str | None, tell: Tell) -> Proposer | None:
        """A proposer that needs weights; None: nothing is drafted, or the engine makes its proposer by itself."""
        wanted = self.config.speculative
        if wanted is not None and wanted.proposer == "mtp":
            with _about("the head"):
                return MtpProposer(attach_head(model, wanted.head or shipped_head(self.path) or self.path))
        if draft_path is None:
            return None
        tell("reading the draft model's weights", 0, 0)
        max_model_len = self.config.max_model_len or model.max_model_len
        with _about("the draft model"):
            draft = load_model(
                draft_path,
                dtype=model.layout.dtype,
                block_tokens=model.layout.block_tokens,
                device=torch_device(self.config.device),
                max_model_len=max_model_len,
            )
        num_layers = attach_draft(model, draft, max_model_len=max_model_len, num_tokens=self.tokenizer.vocab_size)
        return DraftModelProposer(draft, num_layers=num_layers, vocab_size=model.vocab_size)


@contextlib.contextmanager
def _about(what: str) -> Iterator[None]:
    """Say in every reason which part it concerns; an error of a hub is a reason too."""
    try:
        yield
    except ConfigError as error:
        raise ModelError(f"{what}: {error}") from error
    except OSError as error:
        raise ModelError(
            f"{what}: it cannot be fetched ({str(error).strip().splitlines()[0]}); check the path or the name"
        ) from error
