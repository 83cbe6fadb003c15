"""Errors of users are Maze's own, and also those that code written for Python's errors catches."""

from __future__ import annotations

import pickle

import pytest

from maze.core.errors import ConfigAssertionError, ConfigError, ConfigImportError, ConfigValueError, MazeError
from maze.core.utils.factory import locate
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.perception.blocks import DenseBlock
from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig

FAULTS = [
    (lambda: PPOAlgorithmConfig(lr=-1.0), ValueError, ConfigValueError),
    (lambda: PPOAlgorithmConfig(n_epochs=-1), ValueError, ConfigValueError),
    (lambda: TimeLimitWrapper.wrap(GymMazeEnv("CartPole-v1"), max_episode_steps=-1), ValueError, ConfigValueError),
    (lambda: locate("no_such_package.Class"), ImportError, ConfigImportError),
    (lambda: locate("maze.core.errors.NoSuchError"), ImportError, ConfigImportError),
    (lambda: DenseBlock(["x", "x"], "y", [(2,), (2,)], [3], "torch.nn.ReLU"), AssertionError, ConfigAssertionError),
]


@pytest.mark.parametrize(("fault", "known_as", "kind"), FAULTS)
def test_errors_are_instances_of_their_python_and_maze_classes_after_pickling(fault, known_as, kind):
    for caught_as in (known_as, kind, ConfigError, MazeError):
        with pytest.raises(caught_as) as caught:
            fault()
    copied = pickle.loads(pickle.dumps(caught.value))  # as from a worker process
    assert (type(copied), str(copied)) == (kind, str(caught.value))
