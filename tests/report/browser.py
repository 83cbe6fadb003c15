"""Opens pages in a real browser, where there is one, and looks for what people and machines would stumble over."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDE, NARROW = 1280, 390
OpenPage = Callable[..., "Page"]
"""Takes what :func:`opened` takes after the browser."""


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Chromium without a window; the test is skipped where there is none."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    playwright_api: Any = pytest.importorskip("playwright.sync_api")
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(
    browser: Browser,
    page: Path | str,
    errors: list[str],
    width: int = WIDE,
    scheme: Any = "light",
    refused: tuple[str, ...] = (),
) -> Page:
    """A page in a browser.

    :param browser: The browser.
    :param page: Its file, or its address.
    :param errors: Gets what the page's script complains of, and what it wanted from elsewhere.
    :param width: Of the window.
    :param scheme: `light` or `dark`.
    :param refused: Words of complaints that are wanted: the browser refuses what it should.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    shown = context.new_page()

    def complain(text: str) -> None:
        if not any(words in text for words in refused):
            errors.append(text)

    address = page if isinstance(page, str) else page.absolute().as_uri()
    own = ("file:", "data:", "about:") if isinstance(page, Path) else (address, "data:", "about:")
    shown.on("console", lambda message: complain(message.text) if message.type in ("error", "warning") else None)
    shown.on("pageerror", lambda error: complain(str(error)))
    shown.on("dialog", lambda dialog: (complain(f"dialog {dialog.message}"), dialog.dismiss()))
    shown.on("request", lambda request: None if request.url.startswith(own) else complain(f"asks for {request.url}"))
    shown.goto(address)
    return shown


def looked_at(page: Page) -> None:
    """Scrolls through a page, so that everything is drawn that is drawn when it comes into view."""
    page.evaluate(
        """async () => {
            for (let y = 0; y < document.documentElement.scrollHeight; y += 600) {
                scrollTo(0, y);
                await new Promise(done => setTimeout(done, 40));
            }
            scrollTo(0, 0);
        }"""
    )


def accessibility_faults(page: Page) -> list[str]:
    """Faults that axe-core calls serious or critical: the rule and where it is broken; frames count as well."""
    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    found = []
    for frame in page.frames:
        frame.evaluate(axe)
        found += frame.evaluate("axe.run(document, {resultTypes: ['violations'], iframes: false})")["violations"]
    return [
        f"{rule['id']}: {node['target']} {node.get('failureSummary', '')[:300]}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


def cut_off(page: Page) -> list[str]:
    """What reaches beyond the window, so that the whole page has to be moved sideways."""
    found: list[str] = page.evaluate(
        """() => document.documentElement.scrollWidth <= innerWidth ? [] : [...document.body.querySelectorAll("*")]
            .filter(each => each.getBoundingClientRect().right > innerWidth + 1)
            .map(each => `${each.tagName} ${each.getAttribute("class")} ${each.textContent.slice(0, 60)}`)"""
    )
    return found
