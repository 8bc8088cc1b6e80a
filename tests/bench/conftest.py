from __future__ import annotations

from command_runner import interrupts_reach_children, runner, tiny

from bench.__main__ import app

__all__ = ["interrupts_reach_children", "run", "tiny"]

run = runner(app, "python -m bench")
