"""The OpenAI-compatible HTTP server. Knows an engine only as a `Backend`; needs the extra `server`."""

from sidestream.server.app import create_app
from sidestream.server.backend import Backend
from sidestream.server.listen import bind, bind_alike
from sidestream.server.options import ServerOptions
from sidestream.server.run import Running, serve
from sidestream.server.supervisor import Supervisor

__all__ = ["Backend", "Running", "ServerOptions", "Supervisor", "bind", "bind_alike", "create_app", "serve"]
