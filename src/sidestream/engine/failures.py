"""Handles failures: if a step fails, its requests end; an error of the loop or a lost device ends the engine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from sidestream.engine.inbox import ServingState
from sidestream.engine.output_stream import OutputStreams
from sidestream.engine.parts import Parts
from sidestream.errors import DeviceLost
from sidestream.runner.executor import LaunchedStep
from sidestream.types import RowPlan

logger = logging.getLogger(__name__)


class Failures:
    """Ends samples that cannot continue, so that every client gets a last delta (hazard H22)."""

    def __init__(self, parts: Parts, serving: ServingState, streams: OutputStreams) -> None:
        self._parts, self._serving, self._streams = parts, serving, streams

    def end_step(self, step: LaunchedStep) -> None:
        """End the requests of a step that failed. Requests that were preempted after its launch are computed again."""
        failure = step.fence.failure
        logger.error("a step of %d rows failed: its requests end with an error", step.batch.num_rows, exc_info=failure)
        step.drop()
        for row in step.batch.rows:
            if self._is_current(row):  # rule: failed-step-ends-its-requests
                self._streams.end_sample(row.request_id, "error", f"the forward pass failed: {failure}")

    def _is_current(self, row: RowPlan) -> bool:
        request = self._parts.scheduler.get(row.request_id)
        return request is not None and request.epoch == row.epoch  # rule: failed-step-ends-its-own-requests

    def end_engine(self, error: BaseException) -> None:
        """Refuse new requests, and end all samples with an error, including samples in the inbox."""
        self._serving.fail(error)
        while (message := self._parts.inbox.take()) is not None:
            with contextlib.suppress(Exception):  # only messages with new requests matter here, and those never raise
                message()
        self._streams.fail_all(error)
        self._streams.deliver_outputs()  # rule: failure-of-the-engine-is-delivered

    @contextlib.contextmanager
    def surviving_device_loss(self) -> Iterator[None]:
        """If the body of the `with` statement raises DeviceLost, the engine counts as failed. By then the body must
        have ended everything else, all requests included.
        """
        try:
            yield
        except DeviceLost as error:
            if self._serving.health.status != "failed":  # rule: close-survives-a-lost-device
                logger.critical("the device was lost while the engine closed", exc_info=error)
                self._serving.fail(error)
