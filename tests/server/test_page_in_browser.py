"""The page in a real Chromium: chat, live figures, key, themes, a phone, and a server that restarts.

Needs playwright (extra `dev`) and a Chromium: `apt-get install chromium`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proof.fake_backend import FakeBackend, Script
from proof.tiny_models import tiny_model_dir
from sidestream.server.listen import bind
from sidestream.server.options import ServerOptions
from sidestream.types import CachedTokens

from .serving import serving

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'sidestream[dev]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")]

WAIT_MS = 60_000
_QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
_OFFLINE = "--disable-background-networking --disable-component-update"
NewPage = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=[*_QUIET.split(), *_OFFLINE.split()])
        yield browser
        browser.close()


@pytest.fixture
def new_page(chromium: Any) -> Iterator[NewPage]:
    """Opens a page of a server in a browser of its own. At the end, none may have said anything on its console."""
    contexts, said = [], []

    def open_page(url: str, **options: Any) -> Any:
        context = chromium.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    # The browser itself reports replies like 401, and connections that break.
    assert not [text for text in said if not text.startswith("Failed to load resource")]


def expect(page: Any, selector: str) -> Any:
    return playwright.expect(page.locator(selector))


def ask(page: Any, question: str) -> None:
    """Ask with the keyboard, and wait for the end of the answer."""
    page.fill("#question", question)
    page.press("#question", "Enter")
    expect(page, "#send").to_have_text("Send", timeout=WAIT_MS)


def connected(page: Any) -> None:
    expect(page, "#status").to_have_text("Connected", timeout=WAIT_MS)


def test_an_answer_is_text_with_the_source_of_its_prompt_and_is_kept(new_page: NewPage) -> None:
    html = "<b>Hello</b> <script>alert(1)</script> <img src=x onerror=alert(1)>"
    backend = FakeBackend(Script(html, cached=CachedTokens(device=2, host=10)))
    backend.metrics.inc("prefill_measured_tokens_total", 100)
    backend.metrics.inc("prefill_measured_seconds_total", 50)
    with serving(backend) as served:
        page = new_page(served.running.url)
        connected(page)
        expect(page, ".empty").to_be_visible()
        ask(page, "Hi\nthere")
        expect(page, ".assistant .text").to_have_text(html)
        expect(page, ".source").to_contain_text("2 from the device, 10 from host memory")
        expect(page, ".source").to_contain_text("Saved 12 tokens of prefill, about 6.0 s")
        assert page.locator(".assistant").get_attribute("aria-live") == "polite"
        assert page.locator(".assistant").get_attribute("aria-busy") == "false"
        page.click("#new")
        ask(page, "Another one")
        page.reload()
        expect(page, "#list li").to_have_count(2)
        page.get_by_role("button", name="Hi there", exact=True).click()
        expect(page, ".assistant .text").to_have_text(html)
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete “Hi there”").click()
        expect(page, "#list li").to_have_count(1)
        assert "Another one" in page.locator(".user").inner_text()


def test_a_running_answer_can_be_stopped_and_an_error_is_said(new_page: NewPage) -> None:
    refused = Script(refuse=RuntimeError("no"))
    backend = FakeBackend(lambda prompt: refused if "refuse" in prompt else Script(hold_after=3))
    with serving(backend) as served:
        page = new_page(served.running.url)
        page.fill("#question", "Go on")
        page.keyboard.press("Enter")
        expect(page, ".assistant .text").to_contain_text("Hel")
        assert page.locator(".assistant").get_attribute("aria-busy") == "true"
        page.click("text=Stop")
        expect(page, ".assistant .error").to_have_text("Stopped.")
        backend.wait_until(lambda it: len(it.aborted) == 1)
        page.click("#new")
        ask(page, "refuse")
        expect(page, ".assistant .error").to_contain_text("internal error")


def test_the_figures_are_those_of_the_engine(new_page: NewPage) -> None:
    backend = FakeBackend()
    put, count = backend.metrics.set, backend.metrics.inc
    put("requests_running", 3)
    put("blocks_used", 2)
    put("blocks_free", 6)
    put("kv_memory_bytes", 8 << 20, "blocks")
    put("tier_blocks", 5, "host")
    put("tier_bytes", 5 << 20, "host")
    put("tier_ready_bytes", 50 << 20, "host")
    count("cached_tokens_total", 640, "host")
    count("draft_tokens_total", 10, "ngram")
    count("accepted_tokens_total", 5, "ngram")
    backend.metrics.observe_all("accept_length", {1.0: 3, 3.0: 1}, "ngram")
    with serving(backend) as served:
        page = new_page(served.running.url)
        expect(page, "#running").to_have_text("3")
        expect(page, "#saved-tokens").to_have_text("640")
        expect(page, "#tiers").to_contain_text("2.0 MiB of 8.0 MiB")
        expect(page, "#tiers").to_contain_text("5.0 MiB of 50 MiB")
        expect(page, "#tiers").to_contain_text("Came back: 640 tokens")
        expect(page, "#draft-mean").to_have_text("accept length 1.50")
        expect(page, "#draft-note").to_contain_text("50 % of 10 drafts accepted")
        page.wait_for_timeout(600)
        now = backend.spans.read(0).now_ns
        backend.spans.record("disk-read-0", "read block", now - 100_000_000, now)
        expect(page, "#timeline li").to_have_text(["engine", "compute", "store", "load", "disk read"])
        put("requests_running", 0)
        expect(page, "#running").to_have_text("0")
        put("metrics_age_seconds", 7)
        expect(page, "#status").to_have_text("Engine silent")
        expect(page, "#offline").to_contain_text("figures of 7.0 s ago")


def test_the_page_asks_for_the_key_and_keeps_it_for_the_tab(new_page: NewPage) -> None:
    with serving(FakeBackend(), api_key="secret") as served:
        page = new_page(served.running.url, viewport={"width": 360, "height": 740})
        expect(page, "#key-dialog").to_be_visible()
        expect(page, "#key-wrong").to_be_hidden()
        page.keyboard.press("Escape")
        expect(page, "#status").to_have_text("API key needed")
        assert page.evaluate("() => document.documentElement.scrollWidth") == 360
        page.click("#key")
        page.fill("#key-value", "wrong")
        page.keyboard.press("Enter")
        expect(page, "#key-wrong").to_be_visible()
        page.fill("#key-value", "secret")
        page.keyboard.press("Enter")
        connected(page)
        expect(page, "#key").to_be_hidden()
        ask(page, "Hi")
        expect(page, ".assistant .text").to_have_text("Hello, world")
        page.reload()
        connected(page)
        expect(page, "#key-dialog").to_be_hidden()


def test_the_page_says_that_a_server_has_ended_and_finds_it_again(new_page: NewPage) -> None:
    with serving(FakeBackend()) as served:
        page, port = new_page(served.running.url), served.address[1]
        connected(page)
    expect(page, "#status").to_have_text("Not connected")
    expect(page, "#offline").to_be_visible()
    ask(page, "Is anybody there?")
    expect(page, ".assistant .error").to_contain_text("The connection to the server was lost")
    with serving(FakeBackend(model_name="next"), port=port):
        connected(page)
        expect(page, "#offline").to_be_hidden()
        expect(page, "#model").to_have_text("next")
        ask(page, "And now?")
        expect(page, ".assistant:last-child .text").to_have_text("Hello, world")


def _background(page: Any) -> int:
    """Brightness of the page, 0 to 255."""
    colour = page.locator("main").evaluate("(box) => getComputedStyle(box).backgroundColor")
    return max(map(int, re.findall(r"\d+", colour)[:3]))


def test_the_theme_follows_the_system_until_one_is_chosen(new_page: NewPage) -> None:
    with serving(FakeBackend()) as served:
        page = new_page(served.running.url, color_scheme="dark")
        assert _background(page) < 60
        page.emulate_media(color_scheme="light")
        assert _background(page) > 200
        page.click("#theme")
        expect(page, "#theme").to_have_text("Theme: light")
        page.click("#theme")
        expect(page, "#theme").to_have_text("Theme: dark")
        assert _background(page) < 60
        page.reload()
        expect(page, "#theme").to_have_text("Theme: dark")
        assert _background(page) < 60


def test_on_a_phone_chat_and_figures_have_a_view_each_and_nothing_is_cut(new_page: NewPage) -> None:
    with serving(FakeBackend(Script("word " * 60 + "x" * 300))) as served:
        page = new_page(served.running.url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
        connected(page)
        expect(page, "#live").to_be_hidden()
        ask(page, "A question that is long enough for a second line on a narrow screen")
        assert page.evaluate("() => document.documentElement.scrollWidth") == 360
        page.get_by_role("button", name="Live", exact=True).tap()
        expect(page, "#live").to_be_visible()
        expect(page, "main").to_be_hidden()
        assert page.evaluate("() => document.documentElement.scrollWidth") == 360
        wide = "(boxes) => boxes.filter((box) => box.getBoundingClientRect().right > 360).length"
        assert page.locator("#live *").evaluate_all(wide) == 0
        page.get_by_role("button", name="Conversations").tap()
        page.locator("#list li button").first.tap()
        expect(page, "main").to_be_visible()
        expect(page, "#list").to_be_hidden()


def test_everything_can_be_reached_with_the_keyboard(new_page: NewPage) -> None:
    with serving(FakeBackend()) as served:
        page = new_page(served.running.url, viewport={"width": 1440, "height": 900})
        connected(page)
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        reached = {"question"}
        for _ in range(20):
            reached.add(page.evaluate("() => document.activeElement.id || document.activeElement.tagName"))
            page.keyboard.press("Tab")
        assert {"theme", "new", "messages", "question", "send", "SUMMARY", "pause"} <= reached


@contextmanager
def _process(model: Path, port: int) -> Iterator[None]:
    """`sidestream serve` with a small pool and host memory."""
    sizes = ("--kv-memory", "512KiB", "--offload-host", "8MiB", "--threads", "1", "--api-processes", "1")
    command = [
        sys.executable,
        "-m",
        "sidestream",
        "serve",
        model,
        "--port",
        port,
        "--served-model-name",
        "tiny",
        *sizes,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, env=environment) as child:
        try:
            assert child.stdout is not None and b"is ready" in child.stdout.readline()
            yield
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 0
        finally:
            child.kill()


def test_a_prompt_comes_back_from_host_memory_also_after_a_restart(new_page: NewPage, tmp_path: Path) -> None:
    model = tiny_model_dir("llama", tmp_path, seed=1, max_position_embeddings=1 << 15)
    with bind(ServerOptions(port=0)) as free:
        port = free.getsockname()[1]
    with _process(model, port):
        page = new_page(f"http://127.0.0.1:{port}")
        connected(page)
        page.click("#options summary")
        page.fill("#max-tokens", "4")
        for letter in "abcd":
            page.click("#new")
            ask(page, letter * 400)
        page.get_by_role("button", name="a" * 80, exact=True).click()
        expect(page, ".source").to_contain_text("419 computed")
        ask(page, "b")
        expect(page, ".source >> nth=1").to_contain_text(re.compile(r"4\d\d from host memory"))
        expect(page, "#tiers").to_contain_text(re.compile(r"Host memory.*Came back: 4\d\d tokens"))
        expect(page, "#timeline li").to_have_text(["engine", "compute", "store", "load"])
        expect(page, "#step-note").to_contain_text("of its turn")
    expect(page, "#status").to_have_text("Not connected")
    with _process(model, port):
        connected(page)
        ask(page, "c")
        expect(page, ".source >> nth=2").to_contain_text("computed")
