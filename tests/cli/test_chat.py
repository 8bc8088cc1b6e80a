"""A conversation at a (pseudo) terminal and through a pipe, with a real engine behind it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_runner import Run

from sidestream.cli.answer import Answer, printable
from sidestream.types import CachedTokens

pytestmark = pytest.mark.slow

ENGINE = ("--kv-memory", "32MiB", "--threads", "1", "--temperature", "0", "--ignore-eos")
WAIT_S = 600.0  # ends a test that hangs; no claim about speed


class Terminal:
    """Types into a program and reads what it shows."""

    def __init__(self, descriptor: int, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        self._descriptor = descriptor
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def interrupt_at_the_prompt(self) -> None:
        """Ctrl-C, and Enter: readline sleeps through a signal that comes between its prompt and its read, and notices
        it at the next key.
        """
        self.child.send_signal(signal.SIGINT)
        self.type("\n")

    def read_until(self, pattern: str) -> str:
        """What was shown since the last call, up to and with `pattern`."""
        while (found := re.search(pattern, self._shown)) is None:
            if not select.select([self._descriptor], [], [], WAIT_S)[0]:
                raise TimeoutError(f"no {pattern!r} in {self._shown!r}")
            self._shown += os.read(self._descriptor, 4096).decode("utf-8", "replace")
        seen, self._shown = self._shown[: found.end()], self._shown[found.end() :]
        return seen


@contextmanager
def _chatting(model: Path, *options: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sidestream", "chat", str(model), *ENGINE, *options]
    environment = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as child:
        os.close(theirs)
        try:
            yield Terminal(ours, child)
        finally:
            child.kill()
            os.close(ours)


def test_ctrl_c_interrupts_the_answer_and_ctrl_d_ends_the_conversation(tiny: Path) -> None:
    with _chatting(tiny) as terminal:
        assert "Ctrl-C interrupts an answer" in terminal.read_until("> ")
        terminal.type("Tell me everything\n")
        terminal.read_until("everything\r\n.{20}")  # the answer has begun, and would go on for 30,000 tokens
        terminal.child.send_signal(signal.SIGINT)
        assert "interrupted" in terminal.read_until("interrupted\r\n\r\n> ")
        terminal.type("/quti\n")
        assert "did you mean /quit?" in terminal.read_until("\n> ")
        terminal.interrupt_at_the_prompt()
        terminal.read_until(r"Ctrl-D or /quit ends\)\r\n> ")
        terminal.type("/stats\n")
        assert "prompt tokens" in terminal.read_until("device blocks.*\n> ")
        terminal.type("\x04")  # at the prompt: between prompts the terminal itself would take it
        assert terminal.child.wait(WAIT_S) == 0


def test_an_answer_is_followed_by_its_figures_and_reset_forgets(tiny: Path) -> None:
    with _chatting(tiny, "--max-tokens", "24") as terminal:
        terminal.read_until("> ")
        terminal.type("Who are you, and where do you come from?\n")
        first = terminal.read_until(
            r"24 tokens · prompt (\d+), 0 cached · first token \d+ ms · [\d.]+ tokens/s · cut at the limit"
        )
        terminal.type("And then?\n")
        second = terminal.read_until(r"24 tokens · prompt (\d+), \d+ cached \(\d+ device\)")
        terminal.type("/reset\n")
        terminal.read_until("the conversation is cleared")
        terminal.type("And then?\n")
        third = terminal.read_until(r"24 tokens · prompt (\d+),")
        lengths = [int(re.findall(r"prompt (\d+)", text)[-1]) for text in (first, second, third)]
        assert lengths[2] < lengths[0] < lengths[1]
        terminal.type("/quit\n")
        assert terminal.child.wait(WAIT_S) == 0


def test_a_question_that_is_refused_does_not_end_the_conversation(tiny: Path) -> None:
    with _chatting(tiny, "--max-tokens", "4", "--kv-memory", "96KiB") as terminal:
        terminal.read_until("> ")
        terminal.type("x" * 150 + "\n")
        assert "the pool holds 128" in terminal.read_until("the question was dropped")
        terminal.type("Hi\n")
        terminal.read_until("4 tokens")
        terminal.read_until("\n> ")
        terminal.type("\x04")
        assert terminal.child.wait(WAIT_S) == 0


def test_piped_lines_are_questions_and_only_the_answers_are_printed(run: Run, tiny: Path) -> None:
    options = ("chat", tiny, "--max-tokens", "8", "--stop", "\n", *ENGINE)
    both = run(*options, stdin="First\n\nSecond\n")
    assert both.exit_code == 0
    first, second = both.stdout.splitlines()
    assert run(*options, stdin="First\n").stdout == f"{first}\n"
    assert run(*options, stdin="Second\n").stdout != f"{second}\n"  # the second question was asked after the first
    assert run(*options, stdin="First\n/quit\nSecond\n").stdout == f"{first}\n"


def test_a_refused_question_in_a_pipe_is_an_error(run: Run, tiny: Path) -> None:
    result = run("chat", tiny, *ENGINE, "--kv-memory", "96KiB", stdin="x" * 200)
    assert result.exit_code == 2
    assert "the pool holds 128" in result.output


def test_a_model_without_a_chat_template_names_another_command(run: Run, tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    result = run("chat", tmp_path, *ENGINE, stdin="Hi\n")
    assert result.exit_code == 2
    assert "has no chat template: use sidestream generate" in result.output


def test_a_models_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x9b1mc\td\n") == "a[2Jb1mc\td\n"


def test_the_figures_name_the_tiers_that_were_used() -> None:
    answer = Answer()
    answer.token_ids, answer.prompt_tokens, answer.cached = [1, 2, 3], 50, CachedTokens(device=16, disk=32)
    answer.ttft_s, answer.seconds, answer.finish_reason = 0.1, 1.1, "stop"
    assert (
        answer.summary() == "3 tokens · prompt 50, 48 cached (16 device, 32 disk) · first token 100 ms · 2.0 tokens/s"
    )
