"""The OpenAI-compatible HTTP server. Knows an engine only as a `Backend`; needs the extra `server`."""

from sidestream.server.app import create_app
from sidestream.server.backend import Backend
from sidestream.server.options import ServerOptions
from sidestream.server.run import Running, bind, serve

__all__ = ["Backend", "Running", "ServerOptions", "bind", "create_app", "serve"]
