"""Settings that hold for all tests, and what several modules look at."""

from pathlib import Path

import pytest
from hypothesis import settings

# A first call may import half of torch; how long an example takes says nothing on a machine that does other things too.
settings.register_profile("maze", deadline=None)
settings.load_profile("maze")


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a training on CartPole-v1, one epoch of A2C; to be read or copied, not to be written into."""
    from maze.maze_cli import main

    directory = tmp_path_factory.mktemp("trained") / "run"
    few_steps = ("algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=4")
    small = ("runner.concurrency=2", "algorithm.rollout_evaluator.n_episodes=1")
    training = ("-cn", "conf_train", "env.name=CartPole-v1", "algorithm=a2c", *few_steps, *small)
    assert main([*training, f"hydra.run.dir={directory}"]) == 0
    return directory
