"""Opens pages in a real browser, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

_BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_browser = pytest.mark.skipif(_BROWSER is None, reason="no Chromium on this machine")


def opened(page: Path, script: str = "") -> str:
    """The document as the browser has it after the page's script has run; fails where that script reports an error.

    :param page: The file.
    :param script: Run in the page when it is drawn; what it returns stands in an element `result` at the end.
    """
    if script:
        copy = page.with_name(f"with-script-{page.name}")
        asked = (
            "<script>setTimeout(() => document.body.append(Object.assign(document.createElement('output'), "
            f"{{id: 'result', textContent: (() => {{{script}}})()}})), 1000)</script>"
        )
        copy.write_text(
            page.read_text(encoding="utf-8").replace("</body>\n</html>", f"{asked}</body></html>"), encoding="utf-8"
        )
        page = copy
    assert _BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [
            _BROWSER,
            *flags,
            "--window-size=1280,2000",
            f"--user-data-dir={page.parent / 'browser'}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        check=True,
        timeout=120,
    )
    errors = re.findall(r"CONSOLE.*", done.stderr.decode(errors="replace"))
    assert errors == []
    return done.stdout.decode()


def result_of(document: str) -> str:
    """What the script that was handed to `opened` has returned."""
    found = re.search(r'<output id="result">(.*?)</output>', document, re.DOTALL)
    assert found is not None
    return found[1]
