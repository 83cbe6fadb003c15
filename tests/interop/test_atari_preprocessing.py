"""Atari games as they are usually preprocessed; they need the extra `atari`."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from maze.core.utils.config_utils import gym_env_defaults
from maze.maze_cli import main

pytest.importorskip("ale_py")
pytest.importorskip("cv2")
pytestmark = pytest.mark.long


def test_pong_shows_four_grey_frames_and_trains_by_one_command(tmp_path):
    command = [
        *("-cn", "conf_train", "+experiment=atari_ppo", f"hydra.run.dir={tmp_path}", "runner.concurrency=2"),
        *("algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=8", "algorithm.batch_size=8"),
        *("algorithm.rollout_evaluator.n_episodes=1", "wrappers.TimeLimitWrapper.max_episode_steps=20", "verbose=0"),
    ]
    command = [f"+{each}" if each.startswith("wrappers.") else each for each in command]
    assert main(command) == 0
    model = yaml.safe_load((tmp_path / "model.yaml").read_text())
    (block,) = [
        part["block_params"] for name, part in model["model_builder"]["modality_config"].items() if name == "image"
    ]
    assert block["layout"] == "CHW"
    assert block["scale"] == pytest.approx(1 / 255)


def test_the_environment_differs_from_others_in_game_and_wrappers_only():
    from pathlib import Path

    from maze.conf import __file__ as conf
    from maze.core.utils.config_utils import EnvFactory, read_config

    config = read_config(Path(conf).parent / "env" / "atari.yaml")
    assert set(config) == set(gym_env_defaults())
    env = EnvFactory(config, {})()
    env.seed(1)
    observation = env.reset()["observation"]
    assert (observation.shape, observation.dtype) == ((4, 84, 84), np.uint8)
    assert env.action_space["action"].n == 6
    env.close()
