"""Old import paths of modules that moved: they work for one more release, with a warning. The modules moved to the
packages `sidestream_kv` and `sidestream_order`, or to other packages of `sidestream`. Modules that moved to `proof`,
which is not installed, can be imported in a checkout of the repository.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ROOMS = {"device", "kv", "metrics", "offload"}
_CHECKER = {
    "check_trace",
    "checker",
    "exhaust",
    "explore",
    "findings",
    "guard",
    "leases",
    "memories",
    "order",
    "shadow",
    "steering",
    "tier_conformance",
    "trace",
}
_ELSEWHERE = {
    "sidestream.client.output": "sidestream.client.front_end",
    "sidestream.client.prompts": "sidestream.client.front_end",
    "sidestream.offload.checksums": "sidestream_kv.offload.tiers.stack",
    "sidestream.offload.costs": "sidestream_kv.offload.loads",
    "sidestream.offload.tiers.registry": "sidestream_kv.offload.tiers.stack",
    "sidestream.ops.registry": "sidestream.ops",
    "sidestream.ops.torch_sampling": "sidestream.ops.torch_ops",
    "sidestream.runner.upload": "sidestream.runner.state",
    "sidestream.schedule.validation": "sidestream.schedule.limits",
    "sidestream.server.cancellation": "sidestream.server.middleware",
    "sidestream.server.json_response": "sidestream.server.body",
    "sidestream.text.length_bound": "sidestream.tokenizer",
    "sidestream.chat_template": "sidestream.text.chat_template",
    "sidestream.device.sim": "sidestream_order.sim",
    "sidestream.frames": "sidestream.processes.frames",
    "sidestream.front_end": "sidestream.client.front_end",
    "sidestream.garbage": "sidestream.processes.garbage",
    "sidestream.kv.accesses": "sidestream.runner.accesses",
    "sidestream.loading": "sidestream.engine.loading",
    "sidestream.log_stream": "sidestream.processes.log_stream",
    "sidestream.metrics.progress": "sidestream.processes.progress",
    "sidestream.progress": "sidestream.processes.progress",
    "sidestream.prompts": "sidestream.client.front_end",
    "sidestream.text_bound": "sidestream.tokenizer",
}


def new_name(name: str) -> str | None:
    """The name of the module that was `name` before; None: it has not moved."""
    for old, new in _ELSEWHERE.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    if name == "sidestream.testing":
        return "sidestream_order"
    package, room, *below = [*name.split("."), ""]
    if package == "sidestream" and room in _ROOMS:
        return f"sidestream_kv.{name.partition('.')[2]}"
    if package == "sidestream" and room == "testing":
        return f"{'sidestream_order' if below[0] in _CHECKER else 'proof'}.{name.split('.', 2)[2]}"
    return None


def warn(old: str, new: str) -> None:
    """Say that a name moved."""
    warnings.warn(f"{old} is {new} now: import it from there", DeprecationWarning, stacklevel=3)


class MovedModules(MetaPathFinder, Loader):
    """Finds a module that moved under its old name. Both names are the same module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if new_name(fullname) is None else ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        if (new := new_name(old)) is not None:
            warn(old, new)
            sys.modules[old] = importlib.import_module(new)
