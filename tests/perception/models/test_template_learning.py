"""Template models learn: several observations and action heads at once, and what only memory can know."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hydra import compose, initialize_config_module

from maze.maze_cli import maze_run

N_STEPS = 4


class SwitchboardEnv(gym.Env):
    """Each of three action heads has to repeat one of two observations; one point each for a perfect answer."""

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.observation_space = spaces.Dict(
            {"state": spaces.Box(-1.0, 1.0, (3,), np.float32), "screen": spaces.Box(0.0, 1.0, (1, 8, 8), np.float32)}
        )
        self.action_space = spaces.Dict(
            {
                "move": spaces.Discrete(2),
                "use": spaces.MultiBinary(2),
                "steer": spaces.Box(-1.0, 1.0, (1,), np.float32),
            }
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._n_steps = 0
        return self._observe(), {}

    def step(self, action):
        self._n_steps += 1
        points = float(action["move"] == self._half) + float(np.mean(action["use"] == (self._state[:2] > 0)))
        points += 1.0 - min(1.0, abs(float(action["steer"][0]) - float(self._state[2])))
        return self._observe(), points / 3.0, False, self._n_steps >= N_STEPS, {}

    def _observe(self):
        self._half = int(self.np_random.integers(2))
        self._state = self.np_random.uniform(-1.0, 1.0, 3).astype(np.float32)
        screen = np.zeros((1, 8, 8), np.float32)
        screen[:, :, self._half * 4 : self._half * 4 + 4] = 1.0
        return {"state": self._state, "screen": screen}


class RecallEnv(gym.Env):
    """The first observation shows a sign; only the last action, which has to repeat it, earns anything."""

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._n_steps = 0
        self._sign = int(self.np_random.integers(2))
        return np.array([2.0 * self._sign - 1.0, 0.0], np.float32), {}

    def step(self, action):
        self._n_steps += 1
        is_over = self._n_steps >= N_STEPS
        reward = float(is_over and action == self._sign)
        return np.array([0.0, self._n_steps / N_STEPS], np.float32), reward, is_over, False, {}


@pytest.fixture(scope="module", autouse=True)
def _envs():
    for env in (SwitchboardEnv, RecallEnv):
        gym.register(f"{env.__name__}Test-v0", entry_point=env)
    yield
    for env in (SwitchboardEnv, RecallEnv):
        del gym.registry[f"{env.__name__}Test-v0"]


def best_score(*overrides: str) -> float:
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose(
            "conf_train",
            overrides=[
                *("algorithm=ppo", "critic=template_state", "runner.concurrency=16"),
                *("algorithm.n_rollout_steps=32", "algorithm.epoch_length=5", "algorithm.lr=0.001"),
                *("algorithm.patience=0", "algorithm.rollout_evaluator.n_episodes=48"),
                *("seeding.env_base_seed=1", "seeding.agent_base_seed=2"),
                *overrides,
            ],
        )
    score = maze_run(cfg)
    assert score is not None
    return score


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.learning
def test_ppo_learns_dictionary_observations_and_three_kinds_of_heads_beyond_85_percent():
    score = best_score(
        "env.name=SwitchboardEnvTest-v0",
        "model=pixel_obs",
        "algorithm.n_epochs=6",
        "~model.model_builder.observation_modality_mapping.observation",
        "+model.model_builder.observation_modality_mapping.state=feature",
        "+model.model_builder.observation_modality_mapping.screen=image",
        "+model.model_builder.modality_config.feature={block_type: maze.perception.blocks.DenseBlock, "
        "block_params: {hidden_units: [64], non_lin: torch.nn.Tanh}}",
    )
    assert score > 0.85 * N_STEPS  # chance: about half


@pytest.mark.learning
def test_recurrent_model_solves_recall_and_a_feed_forward_model_does_not():
    arguments = ("env.name=RecallEnvTest-v0", "algorithm.n_epochs=6", "algorithm.gamma=1.0")
    assert best_score(*arguments, "model=vector_obs") < 0.8  # chance: half
    # the configuration of the pair (gym_env, vector_obs_rnn) stacks the last four observations
    assert best_score(*arguments, "model=vector_obs_rnn") > 0.95
