from __future__ import annotations

import pickle
import pickletools
import sys

import numpy as np
import pytest
from gymnasium import spaces

from maze.core.errors import CheckpointError, ConfigError
from maze.perception.models.space_config import SpacesConfig

EVERYTHING = spaces.Dict(
    {
        "box": spaces.Box(np.array([-np.inf, 0.0], np.float32), np.array([np.inf, 5.0], np.float32)),
        "bytes": spaces.Box(0, 255, (2, 3), np.uint8),
        "discrete": spaces.Discrete(3, start=-1),
        "multi": spaces.MultiDiscrete([[2, 3], [4, 5]]),
        "binary": spaces.MultiBinary((2, 2)),
        "nested": spaces.Dict({"z": spaces.Discrete(2), "a": spaces.MultiBinary(3)}),
    }
)


def config():
    action = spaces.Dict({"action": spaces.Discrete(2)})
    return SpacesConfig({0: action, "second": action}, {0: EVERYTHING, "second": EVERYTHING}, {0: 1, "second": -1})


def test_spaces_survive_the_file(tmp_path):
    path = tmp_path / "spaces_config.pkl"
    config().save(str(path))
    loaded = SpacesConfig.load(str(path))
    assert loaded == config()
    assert list(loaded.observation_spaces_dict[0].spaces) == list(EVERYTHING.spaces)
    for key, space in EVERYTHING.spaces.items():
        assert loaded.observation_spaces_dict[0][key].dtype == space.dtype


def test_the_file_names_no_types(tmp_path):
    path = tmp_path / "spaces_config.pkl"
    config().save(path)
    opcodes = {code.name for code, _, _ in pickletools.genops(path.read_bytes())}
    assert not opcodes & {"GLOBAL", "STACK_GLOBAL", "INST", "REDUCE", "NEWOBJ"}


class Malicious:
    def __reduce__(self):
        return (exec, ("import sys; sys.maze_was_here = True",))


@pytest.mark.parametrize("content", [b"", b"<html>", pickle.dumps({"a": 1}), pickle.dumps(Malicious())])
def test_foreign_files_are_refused_without_running_them(tmp_path, content):
    path = tmp_path / "spaces_config.pkl"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"spaces_config.pkl: not a file of spaces"):
        SpacesConfig.load(path)
    assert not hasattr(sys, "maze_was_here")


def test_a_truncated_file_and_a_missing_one_are_refused(tmp_path):
    path = tmp_path / "spaces_config.pkl"
    with pytest.raises(CheckpointError, match="no such file"):
        SpacesConfig.load(path)
    config().save(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not a file of spaces"):
        SpacesConfig.load(path)


def test_spaces_that_cannot_be_described_are_named(tmp_path):
    with pytest.raises(ConfigError, match="Text"):
        SpacesConfig({0: spaces.Dict({"text": spaces.Text(3)})}, {}, {}).save(tmp_path / "spaces_config.pkl")
    assert not list(tmp_path.iterdir())


def test_spaces_that_are_no_dictionaries_are_named():
    box = spaces.Box(0.0, 1.0, (2,))
    with pytest.raises(ConfigError, match=r"sub-step 'pick': expected a gymnasium.spaces.Dict .* observation"):
        SpacesConfig({"pick": EVERYTHING}, {"pick": box}, {"pick": 1})  # type: ignore[dict-item]
