"""The engine and its loop. Only this package uses the scheduler, the executor and the transfers together."""

from sidestream.engine.build import build_engine
from sidestream.engine.engine import Engine
from sidestream.engine.output_stream import Handle, Sink, TokenColumns

__all__ = ["Engine", "Handle", "Sink", "TokenColumns", "build_engine"]
