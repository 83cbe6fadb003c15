"""The command `maze-serve`: files, signals, tokens, exit status."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from maze.serve.client import PolicyClient, ServerError
from maze.serve.server import main
from tests.serve.serving import always, command, pendulum, stacked

OBSERVATION = [0.01, -0.02, 0.03, 0.04]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "policy.maze"
    path.write_bytes(always(0))
    return path


@pytest.fixture(autouse=True)
def root_logger_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command replaces the handlers of the root logger by one for its own error stream."""
    monkeypatch.setattr(logging.root, "handlers", list(logging.root.handlers))
    monkeypatch.setattr(logging.root, "level", logging.root.level)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long
def test_sighup_reads_bundles_and_tokens_again_and_sigterm_drains(bundle: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("first\n")
    log = tmp_path / "log"
    arguments = (str(bundle), "--token-file", str(tokens), "--decision-log", str(log), "--drain", "2")
    with command(*arguments) as (url, process):
        with PolicyClient(url, "first") as client:
            assert client.act(OBSERVATION).action == 0
            bundle.write_bytes(always(1))
            process.send_signal(signal.SIGHUP)
            until(lambda: client.act(OBSERVATION).action == 1)
            bundle.write_bytes(b"damaged")
            tokens.write_text("second\n")
            process.send_signal(signal.SIGHUP)
            headers = {"authorization": "Bearer second"}
            until(lambda: httpx.get(f"{url}/policies", headers=headers).status_code == 200)
            with pytest.raises(ServerError, match="wrong"):
                client.act(OBSERVATION)
        with PolicyClient(url, "second") as client:
            assert client.act(OBSERVATION).action == 1, "the previous bundle continues"
            process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/ready").status_code == 503)
            assert client.act(OBSERVATION).action == 1
        assert process.wait(20) == 0
        messages = [json.loads(line)["message"] for line in process.stderr or ()]
        assert any("was not reloaded" in message for message in messages)
    bundle.write_bytes(always(1))
    assert main([str(bundle), "--replay", str(log)]) == 0


def test_requests_before_sigterm_are_answered(bundle: Path) -> None:
    with command(str(bundle)) as (url, process):
        answered: list[int] = []
        failures: list[Exception] = []

        def ask() -> None:
            with httpx.Client(timeout=20.0) as http:
                try:
                    while True:
                        answer = http.post(f"{url}/act", json={"observation": OBSERVATION})
                        answered.append(answer.json()["action"])
                except httpx.TransportError as error:
                    failures.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: len(answered) > 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        for thread in threads:
            thread.join(20)
        assert set(answered) == {0}
        assert not any(isinstance(error, httpx.TimeoutException) for error in failures)


REFUSED = {
    "no-file": (["nothing.maze"], "nothing.maze cannot be read"),
    "no-bundle": ([__file__], "not a complete policy bundle"),
    "twice": (["policy.maze", "other/policy.maze"], "Two policies have the name 'policy'"),
    "other-machines": (["policy.maze", "--host", "0.0.0.0"], "Set MAZE_SERVE_TOKEN or --token-file, or pass --open"),
    "empty-token": (["policy.maze", "--token-file", os.devnull], "holds no token"),
    "no-token-file": (["policy.maze", "--token-file", "nothing"], "cannot be read"),
    "unknown-weight": (["policy.maze", "--weight", "polcy=1"], "There is no policy 'polcy'"),
    "weight-not-a-number": (["policy.maze", "--weight", "policy=much"], "expected a number"),
    "unknown-shadow": (["policy.maze", "--shadow", "x"], "There is no policy 'x'"),
    "fallback-alone": (["policy.maze", "--fallback", "maze.serve.drift:bins"], "belong together"),
    "fallback-missing": (["policy.maze", "--on-drift", "fallback"], "belong together"),
    "port": (["policy.maze", "--port", "65536"], "--port must lie in [0, 65535]"),
    "limit": (["policy.maze", "--max-body", "0"], "--max-body must be above 0"),
    "options-between": (["a=policy.maze", "--weight", "c=1", "b=policy.maze"], "There is no policy 'c'"),
    "code": (["policy.maze", "--provide", "a"], "is not of the form NAME=VALUE"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_are_refused_with_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MAZE_SERVE_TOKEN", raising=False)
    for path in (tmp_path / "policy.maze", tmp_path / "other" / "policy.maze"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(always(0))
    arguments, says = REFUSED[name]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("maze-serve: ")
    assert says in error
    assert len(error.splitlines()) == 1


def test_several_policies_under_names(tmp_path: Path) -> None:
    for name, content in (("a", always(0)), ("b", always(1)), ("c", stacked()), ("d", pendulum())):
        (tmp_path / f"{name}.maze").write_bytes(content)
    bundles = [
        f"champion={tmp_path}/a.maze",
        f"canary={tmp_path}/b.maze",
        *(f"{tmp_path}/{name}.maze" for name in "cd"),
    ]
    arguments = (*bundles, "--weight", "champion=1", "--weight", "canary=1", "--shadow", "c")
    with command(*arguments) as (url, _), PolicyClient(url) as client:
        found = {policy["name"]: (policy["weight"], policy["shadow"]) for policy in client.policies()}
        assert found == {"champion": (1, False), "canary": (1, False), "c": (0, True), "d": (0, False)}
        assert {client.act(OBSERVATION).action for _ in range(40)} == {0, 1}
        assert len(client.act([0.1, 0.2, 0.3], policy="d").action) == 1
