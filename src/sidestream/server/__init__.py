"""The OpenAI-compatible HTTP server. Knows an engine only as a `FrontEnd`. Needs the packages of the extra `server`.

Names are imported on first use, so the command line can read `ServerOptions` without these packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidestream.server.app import create_app
    from sidestream.server.listen import bind, bind_shared
    from sidestream.server.options import ServerOptions
    from sidestream.server.run import RunningServer, serve
    from sidestream.server.supervisor import Supervisor

__all__ = ["RunningServer", "ServerOptions", "Supervisor", "bind", "bind_shared", "create_app", "serve"]

_MODULES = {
    "RunningServer": "run",
    "ServerOptions": "options",
    "Supervisor": "supervisor",
    "bind": "listen",
    "bind_shared": "listen",
    "create_app": "app",
    "serve": "run",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
