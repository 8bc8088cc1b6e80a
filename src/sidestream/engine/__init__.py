"""THE LOOP: the only room that sees the scheduler, the executor and the transfers together."""

from sidestream.engine.build import build_engine
from sidestream.engine.engine import Engine
from sidestream.engine.output_stream import Handle, Sink

__all__ = ["Engine", "Handle", "Sink", "build_engine"]
