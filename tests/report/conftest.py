"""A browser for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.report.browser import OpenPage, opened, running_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; for a module and no longer, since it keeps an event loop in its thread."""
    with running_browser() as started:
        yield started


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens pages; what their scripts complain of fails the test."""
    errors: list[str] = []
    contexts: list[Any] = []

    def open_one(page: Path | str, **kwargs: Any) -> Page:
        shown = opened(browser, page, errors, **kwargs)
        contexts.append(shown.context)
        return shown

    yield open_one
    for context in contexts:
        context.close()
    assert errors == []
