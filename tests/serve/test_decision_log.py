"""The decision log: bitwise replay, rotation, full disks."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from maze.core.errors import CheckpointError, ConfigError
from maze.core.trajectory_recording.datasets.decision_data import decoded, encoded, log_files, read_lines
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.wrapper import ObservationWrapper
from maze.serve.bundle import PolicyBundle
from maze.serve.client import PolicyClient
from maze.serve.decision_log import DecisionLog, read_rng, replay, written_rng
from maze.serve.served import Settings, as_json
from maze.serve.server import main
from tests.security.attack import mutated_json
from tests.serve.serving import always, cartpole, cartpole_observations, exported, pendulum, served, stacked


@given(
    arrays.arrays(
        st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_]),
        arrays.array_shapes(min_dims=0, max_dims=3, max_side=12),
    )
)
def test_arrays_come_back_bit_for_bit(array: np.ndarray[Any, Any]) -> None:
    again = decoded(json.loads(as_json(encoded(array))))
    assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_generators_come_back_in_the_middle_of_a_number() -> None:
    rng = np.random.default_rng(5)
    rng.random(3)
    rng.integers(10, dtype=np.uint32)  # leaves half of a number behind
    again = read_rng(json.loads(json.dumps(written_rng(rng))))
    assert [again.integers(10, dtype=np.uint32) for _ in range(5)] == [
        rng.integers(10, dtype=np.uint32) for _ in range(5)
    ]
    assert again.random() == rng.random()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Log of a server with two policies: single decisions, batches, sessions, sampled actions, a shadow."""
    directory = tmp_path_factory.mktemp("log")
    observations = cartpole_observations(30)
    bundles = {"cartpole": cartpole(), "stacked": stacked(), "shadow": always(1)}
    with served(bundles, shadows=("shadow",), log=DecisionLog(directory, {})) as (url, _), PolicyClient(url) as client:
        client.act_many(observations)
        client.act_many(observations, deterministic=False)
        for observation in observations[:5]:
            client.act(observation, deterministic=False, seed=3, ranked=2)
        for policy in ("cartpole", "stacked"):
            with client.session(policy=policy) as one, client.session(policy=policy) as other:
                for observation in observations[:12]:
                    one.act(observation, deterministic=False)
                    other.act(observation)
                one.reset()
                one.act(observations[0], deterministic=False)
    return directory


N_DECIDED = 30 + 30 + 5 + 2 * 25


def test_entries_of_any_content_are_refused_or_replayed(log: Path, tmp_path: Path) -> None:
    bundles = [PolicyBundle(content) for content in (cartpole(), stacked(), always(1))]
    header, *lines = log_files(log)[0].read_bytes().splitlines()
    file, n_refused = tmp_path / "decisions-000001.jsonl", 0
    for number in range(200):
        chooser = random.Random(number)
        entry = mutated_json(chooser, json.loads(chooser.choice(lines)))
        file.write_bytes(b"\n".join([header, json.dumps(entry).encode(), b""]))
        with np.errstate(all="ignore"):
            try:
                replay(tmp_path, bundles)
            except CheckpointError:
                n_refused += 1
    assert n_refused > 30


def test_a_log_is_replayed_bit_for_bit(log: Path) -> None:
    bundles = [PolicyBundle(content) for content in (cartpole(), stacked(), always(1))]
    result = replay(log, bundles)
    # the shadow of the same spaces decided along with both policies
    assert (result.n_decisions, result.n_prepared) == (2 * N_DECIDED, 2 * N_DECIDED)
    assert (result.n_different, result.n_of_others, result.n_not_by_policy) == (0, 0, 0)
    alone = replay(log, bundles[:1])
    assert alone.n_decisions == 30 + 30 + 5 + 25
    assert alone.n_of_others == 2 * N_DECIDED - alone.n_decisions


def test_one_changed_bit_is_found(log: Path, tmp_path: Path) -> None:
    bundles = [PolicyBundle(content) for content in (cartpole(), stacked(), always(1))]
    lines = log_files(log)[0].read_bytes().split(b"\n")
    place = next(index for index, line in enumerate(lines) if b'"rng":{' in line)
    entry = json.loads(lines[place])
    entry["rows"][0]["rng"]["state"] = f"{int(entry['rows'][0]['rng']['state'], 16) ^ (0xFFFF << 96):x}"
    changed_rng = [*lines[:place], json.dumps(entry).encode(), *lines[place + 1 :]]
    entry = json.loads(lines[1])
    entry["rows"][4]["observation"][2] += 1e-6
    changed_observation = [lines[0], json.dumps(entry).encode(), *lines[2:]]
    entry = json.loads(lines[1])
    entry["actions"]["action"]["values"][4] ^= 1
    changed_action = [lines[0], json.dumps(entry).encode(), *lines[2:]]
    for content, says in (
        (changed_observation, "network's input `observation` differs"),
        (changed_action, "the log has"),
    ):
        path = tmp_path / "decisions-000001.jsonl"
        path.write_bytes(b"\n".join(content))
        result = replay(path, bundles)
        assert result.n_different == 1
        assert says in result.first_difference
        assert result.first_difference.startswith("decisions-000001.jsonl:2")
    path.write_bytes(b"\n".join(changed_rng))
    assert replay(path, bundles).n_decisions == 2 * N_DECIDED


def test_the_command_replays(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, content in (("cartpole", cartpole()), ("stacked", stacked()), ("pendulum", pendulum())):
        files.append(tmp_path / f"{name}.maze")
        files[-1].write_bytes(content)
    assert main([*map(str, files), "--replay", str(log)]) == 0
    assert "0 differ" in capsys.readouterr().out
    assert main([str(files[2]), "--replay", str(log)]) == 1
    assert "no decision of these bundles" in capsys.readouterr().err
    assert main([str(files[0]), "--replay", str(tmp_path / "nothing")]) == 1
    assert "not a decision log" in capsys.readouterr().err


def test_repeated_answers_and_the_fallback_are_in_the_log_and_not_replayed(tmp_path: Path) -> None:
    settings = Settings(on_drift="fallback", fallback=lambda entries, actor: {"action": 1})
    log = DecisionLog(tmp_path, {})
    with served({"p": always(0)}, settings=settings, log=log) as (url, _), PolicyClient(url) as client:
        session = client.session()
        for value in (0.0, 50.0, 0.0):
            session.act([value] * 4)
    result = replay(tmp_path, [PolicyBundle(always(0))])
    assert (result.n_decisions, result.n_prepared, result.n_not_by_policy) == (2, 2, 1)
    kinds = [line["kind"] for _, line in read_lines(tmp_path)]
    assert kinds == ["decided", "fallback", "decided"]


def test_a_log_of_policies_with_different_code_is_replayed(tmp_path: Path) -> None:
    provided = {"Halved.observation": lambda entries, actor: {"observation": 0.5 * entries["observation"]}}
    bundles = {"plain": always(0), "own": exported(Halved(GymMazeEnv("CartPole-v1")))}
    log = DecisionLog(tmp_path, {})
    settings = Settings(provided=provided)
    with served(bundles, settings=settings, log=log) as (url, _), PolicyClient(url) as client:
        for name in bundles:
            client.act([0.0] * 4, policy=name)
    result = replay(tmp_path, list(map(PolicyBundle, bundles.values())), provided)
    assert (result.n_decisions, result.n_prepared, result.n_different) == (2, 2, 0)


class Halved(ObservationWrapper[Any]):
    """Halve observations, as code that a bundle cannot hold."""

    def observation(self, observation: Any) -> Any:
        return {"observation": 0.5 * observation["observation"]}


def test_a_log_does_not_reveal_identifiers_of_sessions(log: Path, tmp_path: Path) -> None:
    with served({"p": always(0)}, log=DecisionLog(tmp_path, {})) as (url, _), PolicyClient(url) as client:
        session = client.session()
        session.act([0.0] * 4)
    assert session.id not in log_files(tmp_path)[0].read_text()


# -- files ------------------------------------------------------------------------------------------------------------


def test_log_files_rotate_and_the_oldest_are_deleted(tmp_path: Path) -> None:
    writer = DecisionLog(tmp_path, {"a": 1}, file_bytes=1000, n_files=3)
    for n in range(300):
        writer.write(b'{"n": %d, "x": "%s"}' % (n, b"x" * 50))
    writer.close()
    files = log_files(tmp_path)
    assert len(files) == 3
    assert all(path.stat().st_size < 1100 for path in files)
    numbers = [line["n"] for _, line in read_lines(tmp_path)]
    assert numbers == list(range(numbers[0], 300))
    again = DecisionLog(tmp_path, {}, file_bytes=1000, n_files=3)  # another server goes on behind
    again.write(b'{"n": 300}')
    again.close()
    assert [line["n"] for _, line in read_lines(tmp_path)][-2:] == [299, 300]
    assert writer.n_lost == again.n_lost == 0


def test_the_log_goes_on_after_its_directory_was_moved(tmp_path: Path) -> None:
    writer = DecisionLog(tmp_path / "log", {}, file_bytes=10)
    writer.write(b'{"n": 1}')
    _until(lambda: log_files(tmp_path / "log"))
    (tmp_path / "log").rename(tmp_path / "before")
    writer.write(b'{"n": 2}')
    writer.close()
    assert writer.n_lost == 0
    assert [line["n"] for name in ("before", "log") for _, line in read_lines(tmp_path / name)] == [1, 2]


def test_two_servers_share_a_directory(tmp_path: Path) -> None:
    writers = [DecisionLog(tmp_path, {}, file_bytes=100) for _ in range(2)]

    def n_written() -> int:
        return sum(len(path.read_bytes().splitlines()) - 1 for path in log_files(tmp_path))

    for n in range(3):
        for index, writer in enumerate(writers):
            writer.write(b'{"n": %d, "x": "%s"}' % (2 * n + index, b"x" * 100))
            _until(lambda: n_written() + writers[0].n_lost + writers[1].n_lost == 2 * n + index + 1)  # noqa: B023
    for writer in writers:
        writer.close()
    assert [writer.n_lost for writer in writers] == [0, 0]
    assert sorted(line["n"] for _, line in read_lines(tmp_path)) == list(range(6))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_directory_that_is_not_writable_is_refused_at_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="the directory is not writable"):
        DecisionLog(tmp_path, {})


def test_a_full_disk_is_one_warning_and_decisions_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_full = True
    real = DecisionLog._open

    class Full:
        """A file that accepts half of a write, as on a nearly full disk, and then fails."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, content: bytes) -> int:
            if is_full and len(content) < 100:
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(self.file.write(content[: len(content) // 2] if is_full else content))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    monkeypatch.setattr(DecisionLog, "_open", lambda self: Full(real(self)))
    with served({"p": always(0)}, log=(writer := DecisionLog(tmp_path, {}))) as (url, _), PolicyClient(url) as client:
        for _ in range(3):
            for _ in range(10):
                assert client.act([0.0] * 4).action == 0
            _until(lambda: writer.n_lost >= 10)
        is_full = False
        n_lost = writer.n_lost
        assert client.act([0.0] * 4).action == 0
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "No space left" in warnings[0].getMessage()
    assert n_lost >= 10
    kept = list(read_lines(tmp_path))
    assert len(kept) + writer.n_lost == 31, "no half line stands in the way of the next one"


def _until(holds: Any) -> None:
    import time

    deadline = time.monotonic() + 10.0
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert holds()


def test_a_slow_disk_loses_log_lines_and_uses_no_more_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = DecisionLog(tmp_path, {}, queue_bytes=1000)
    with writer._lock:  # the thread does not get to write meanwhile
        for _ in range(100):
            writer.write(b"x" * 100)
        assert writer.n_lost == 90
    writer.close()
    assert caplog.text.count("slower than the decisions") == 1


def test_a_log_that_was_cut_off_is_read_and_a_damaged_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "decisions-000001.jsonl"
    head = b'{"format": "maze-decisions-1"}\n'
    path.write_bytes(head + b'{"n": 1}\n{"n": 2')
    assert [line for _, line in read_lines(tmp_path)] == [{"n": 1}]
    path.write_bytes(head + b'{"n": 1\n{"n": 2}\n')
    with pytest.raises(CheckpointError, match=r"000001\.jsonl:2"):
        list(read_lines(tmp_path))
    path.write_bytes(b'{"n": 1}\n')
    with pytest.raises(CheckpointError, match="not a decision log of this version"):
        list(read_lines(tmp_path))
    path.write_bytes(head + b'{"kind": "decided", "bundle": "%s", "step": "0", "rows": []}\n' % b"0")
    assert replay(tmp_path, []).n_decisions == 0
    path.write_bytes(head + b'{"kind": "decided"}\n')
    with pytest.raises(CheckpointError, match="not an entry of a decision log"):
        replay(tmp_path, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        DecisionLog(tmp_path / "file" / "log", {})
