"""The curl commands of the guide page on the decision server, and the HTML page of the server in a browser."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

from maze.maze_cli import main
from maze.serve.app import Tokens
from maze.serve.bundle import PolicyBundle
from maze.serve.client import PolicyClient
from maze.serve.server import _parser
from tests.report.browser import NARROW, WIDE, accessibility_faults, cut_off, opened, running_browser
from tests.serve.serving import cartpole, cutting, cutting_env, pendulum, remembering, served, stacked

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guide" / "serving.md").read_text(encoding="utf-8")
BUNDLES = (ROOT / "docs" / "guide" / "production.md").read_text(encoding="utf-8")
SESSIONS = (ROOT / "docs" / "guide" / "client_sessions.md").read_text(encoding="utf-8")
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"


def said_by_curl(number: int, url: str) -> tuple[list[dict[str, Any]], str]:
    """What the commands of a block print: the answers, and all of it."""
    block = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[number]
    finished = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", block.replace("curl ", "curl --silent --show-error --write-out '\\n' ")],
        env={**os.environ, "URL": url, "no_proxy": "*"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")], finished.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_the_commands_with_curl_run_as_written() -> None:
    with served({"policy": cartpole()}) as (url, _):
        answers, printed = said_by_curl(0, url)
    assert [sorted(answer) for answer in answers] == [
        ["action", "bundle", "decision", "policy"],
        ["action", "bundle", "decision", "policy", "ranked"],
        ["bundle", "decisions", "policy"],
        ["action", "bundle", "decision", "policy"],
        ["ended"],
    ]
    assert "maze_decisions_total" in printed


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_episodes_of_recurrent_policies_continue_as_documented() -> None:
    with served({"policy": remembering()}) as (url, _):
        (second, both), _ = said_by_curl(1, url)
    together = both["decisions"]
    assert second["state"]["bundle"] == PolicyBundle(remembering()).sha256
    assert [sorted(each) for each in together] == [["action", "bundle", "decision", "policy", "state"]] * 2
    assert together[0]["state"] != together[1]["state"]


def test_the_episode_of_the_page_on_client_sessions_runs_as_written() -> None:
    listing = re.findall(r"^```text\n(.*?)^```", SESSIONS, re.M | re.S)[0]
    values: dict[str, Any] = {}
    with served({"policy": cartpole()}) as (values["url"], _):
        exec(listing, values)
    assert values["is_over"]
    assert values["answer"].policy == "policy"


def test_sub_steps_of_a_session_are_named_as_written() -> None:
    (listing,) = [block for block in re.findall(r"^```text\n(.*?)^```", SESSIONS, re.M | re.S) if "step_key=0" in block]
    env = cutting_env()
    values: dict[str, Any] = {"PolicyClient": PolicyClient, "selection_observation": env.reset()}
    values["cutting_observation"] = env.step({"piece_idx": 0})[0]
    with served({"cutting": cutting()}) as (values["url"], _):
        exec(listing, values)
    assert set(values["piece"]) == {"piece_idx"}
    assert "piece_idx" not in values["cut"]


def test_the_gates_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_run: Path) -> None:
    monkeypatch.chdir(tmp_path)
    section = BUNDLES.split("## Release gate")[1].split("\n## ")[0]
    file, _ = re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    Path("gate.yaml").write_text(file, encoding="utf-8")
    for name in ("policy", "champion"):
        Path(f"{name}.maze").write_bytes(cartpole())
    shutil.copytree(trained_run, "run")
    commands = re.findall(r"^\$ maze-run (.*)$", section, re.MULTILINE)
    few = ("runner.n_episodes=200", "runner.max_episode_steps=150")
    statuses = [main([*shlex.split(command), *few]) for command in commands]
    assert statuses == [0, 1], "two equal bundles, and an untrained policy beside a heuristic"
    assert Path("gate/gate.md").read_text(encoding="utf-8").startswith("# Gate: passed")


def test_options_and_paths_named_by_the_page_exist() -> None:
    known = {option for action in _parser()._actions for option in action.option_strings}
    named = set(re.findall(r"--[a-z][a-z-]+", " ".join(re.findall(r"maze-serve [^\n]*|`--[^`]*`", PAGE))))
    assert len(named) > 10
    assert named <= known
    with served({"policy": cartpole()}) as (url, _):
        paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    for path in ("/act", "/sessions", "/policies", "/health", "/ready"):
        assert path in paths


# -- the page of the server -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    bundles = {"cartpole": cartpole(), "stacked": stacked(), "remembering": remembering(), "pendulum": pendulum()}
    with served({**bundles, HOSTILE: cartpole()}) as (address, _):
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


def decided(page: Page) -> str:
    """Text of the page after its button was pressed."""
    page.locator("#answer").evaluate("each => each.replaceChildren()")
    page.get_by_role("button", name="Decide").click()
    page.wait_for_selector("#answer *")
    return page.locator("#answer").inner_text()


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_the_bundle_card_can_be_read_and_the_policy_tried_in_a_browser(
    url: str, browser: Browser, width: int, scheme: str, tmp_path: Path
) -> None:
    errors: list[str] = []
    page = opened(browser, url, errors, width, scheme)
    page.wait_for_selector("#cards table")
    with PolicyClient(url) as client:
        action = client.act([0.0] * 4).action
    said = decided(page)
    assert f"action {action}" in said
    assert "most probable actions" in said
    shown = page.locator("#cards").inner_text()
    for text in ("CartPole-v1", "Box, 4, float32", "2 choices", "Not enough observations yet"):
        assert text in shown
    assert accessibility_faults(page) == []
    assert cut_off(page) == []
    page.get_by_label("Observation, as the environment gives it (JSON)").fill("[1, 2")
    assert "The observation is not valid JSON" in decided(page)
    page.get_by_label("Observation, as the environment gives it (JSON)").fill("[1, 2, 3, 4]")
    assert "action" in decided(page)
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert errors == []
    page.context.close()


@pytest.mark.parametrize("name", ["stacked", "remembering", "pendulum"])
def test_recurrent_and_continuous_policies_can_be_tried_in_the_browser(url: str, browser: Browser, name: str) -> None:
    errors: list[str] = []
    page = opened(browser, url, errors, refused=("422",))  # continuous actions cannot be ranked, as the page finds out
    page.wait_for_selector("#cards table")
    page.get_by_label("Policy").select_option(name)
    assert decided(page).startswith("action ")
    assert decided(page).startswith("action ")
    assert errors == []
    page.context.close()


def test_the_page_is_usable_by_keyboard(url: str, browser: Browser) -> None:
    errors: list[str] = []
    page = opened(browser, url, errors)
    page.wait_for_selector("#cards table")
    visited = []
    for _ in range(8):
        page.keyboard.press("Tab")
        focused = "[document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"
        name, outline = page.evaluate(focused)
        assert outline == "solid"
        visited.append(name)
        if name == "sampled":
            page.keyboard.press("Space")
    assert visited[:7] == ["policy", "token", "agent", "observation", "sampled", "seed", "ranked"]
    page.keyboard.press("Shift+Tab")
    page.get_by_label("Observation, as the environment gives it (JSON)").press("Control+Enter")
    page.wait_for_selector("#answer *")
    assert page.locator("#answer").inner_text().startswith("action ")
    assert page.get_by_label("sampled").is_checked()
    assert errors == []
    page.context.close()


def test_texts_from_untrusted_sources_stay_texts(url: str, browser: Browser) -> None:
    errors: list[str] = []
    page = opened(browser, url, errors)
    page.wait_for_selector("#cards table")
    page.get_by_label("Policy").select_option(HOSTILE)
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.title() == f"Policy {HOSTILE}"
    assert page.locator("img").count() == 0
    assert errors == []
    page.context.close()
    headers = httpx.get(url).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


def test_sub_steps_are_chosen_and_a_token_is_required(browser: Browser) -> None:
    errors: list[str] = []
    with served({"cutting": cutting()}, tokens=Tokens(["secret"])) as (url, _):
        page = opened(browser, url, errors, refused=("401", "422"))
        page.wait_for_selector("#problem p")
        assert "A token is required" in page.locator("#problem").inner_text()
        page.get_by_label("Token").fill("secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#cards table")
        for step in ("0", "1"):
            page.get_by_label("Sub-step").select_option(step)
            assert "action" in decided(page) or "mask" in decided(page)
        page.context.close()
    assert errors == []
