from __future__ import annotations

from command_runner import interrupts_reach_children, runner

from proof.__main__ import app

__all__ = ["interrupts_reach_children", "run"]

run = runner(app, "python -m proof")
