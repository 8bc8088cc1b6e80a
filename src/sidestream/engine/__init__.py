"""THE LOOP: the only room that sees the scheduler, the executor and the transfers together."""

from sidestream.engine.build import build_engine
from sidestream.engine.loop import Engine
from sidestream.engine.session import Handle, Sink

__all__ = ["Engine", "Handle", "Sink", "build_engine"]
