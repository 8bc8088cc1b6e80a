from __future__ import annotations

from command_runner import interrupts_reach_children, runner, tiny

from sidestream.cli.app import app

__all__ = ["interrupts_reach_children", "run", "tiny"]

run = runner(app, "sidestream")
