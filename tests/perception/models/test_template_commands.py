"""Template models from the command line, up to the pictures in the run directory."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze.core.env.structured_env import ActorID
from maze.core.utils.config_utils import EnvFactory
from maze.maze_cli import main
from maze.perception.blocks import LSTMLastStepBlock
from maze.perception.models.space_config import SpacesConfig

TINY = (
    *("runner.concurrency=2", "algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=4"),
    *("algorithm.rollout_evaluator.n_episodes=1",),
)


class BrightSpotEnv(gym.Env):
    """An image with a bright half; the action names the half."""

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0.0, 1.0, (1, 16, 16), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._n_steps = 0
        return self._image(), {}

    def step(self, action):
        self._n_steps += 1
        reward = float(action == self._half)
        return self._image(), reward, False, self._n_steps >= 8, {}

    def _image(self):
        self._half = int(self.np_random.integers(2))
        image = np.zeros((1, 16, 16), np.float32)
        image[:, :, self._half * 8 : self._half * 8 + 8] = 1.0
        return image


@pytest.fixture(scope="module", autouse=True)
def _image_env():
    gym.register("BrightSpotTest-v0", entry_point=BrightSpotEnv)
    yield
    del gym.registry["BrightSpotTest-v0"]


def train(directory: Path, *arguments: str) -> Path:
    assert main(["-cn", "conf_train", *TINY, f"hydra.run.dir={directory}", *arguments]) == 0
    return directory


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("env", "model"),
    [
        ("CartPole-v1", "vector_obs"),
        ("CartPole-v1", "vector_obs_rnn"),
        ("BrightSpotTest-v0", "pixel_obs"),
        ("BrightSpotTest-v0", "pixel_obs_rnn"),
    ],
)
def test_a_template_model_trains_and_leaves_its_pictures(env, model, tmp_path):
    run = train(tmp_path / "run", f"env.name={env}", "algorithm=a2c", f"model={model}", "critic=template_state")
    for name in ("policy_0.pdf", "critic_0.pdf"):
        assert (run / name).read_bytes().startswith(b"%PDF")
    steps = (4,) if model.endswith("rnn") else ()
    shape = (4,) if env == "CartPole-v1" else (1, 16, 16)
    observation_space = SpacesConfig.load(run / "spaces_config.pkl").observation_spaces_dict[0]
    assert observation_space["observation"].shape == (*steps, *shape)


@pytest.mark.parametrize(
    "arguments",
    [
        ("algorithm=ppo", "model=vector_obs"),  # with the default critic
        ("algorithm=a2c", "model=vector_obs_rnn", "wrappers=vector_obs", "runner.normalization_samples=50"),
        (
            "algorithm=a2c",
            "model=vector_obs",
            "critic=template_state",
            "model.model_builder.shared_embedding_keys=[hidden]",
        ),
        ("algorithm=ppo", "model=flatten_concat_shared_embedding"),
    ],
)
def test_other_combinations_train(arguments, tmp_path):
    run = train(tmp_path / "run", "env.name=CartPole-v1", *arguments)
    assert (run / "state_dict.pt").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model=flatten_concat", "critic=template_state"), "model.critic.networks: missing"),
        (("model=vector_obs", "critic=template_state_action"), "needs a state critic"),
        (("model=flatten_concat_shared_embedding", "critic=flatten_concat_shared"), "has its own critic"),
        (
            ("model=vector_obs", "+model.model_builder.observation_modality_mapping.screen=feature"),
            "observation_modality_mapping: observation 'screen' is unknown",
        ),
    ],
)
def test_combinations_that_do_not_fit_are_explained(arguments, message, capfd):
    assert main(["-cn", "conf_train", *TINY, "env.name=CartPole-v1", "algorithm=a2c", *arguments]) != 0
    assert message in capfd.readouterr().err


def test_a_recurrent_model_sees_the_last_steps_in_their_order():
    stack = {
        "maze.core.wrappers.observation_stack_wrapper.ObservationStackWrapper": {
            "stack_config": [{"observation": "observation", "stack_steps": 4}]
        }
    }
    config = {"_target_": "maze.core.wrappers.maze_gym_env_wrapper.GymMazeEnv", "env": "CartPole-v1"}
    env = EnvFactory(config, stack)()
    env.seed(0)
    first = env.reset()["observation"]
    second = env.step(env.action_space.sample())[0]["observation"]
    np.testing.assert_array_equal(second[:3], first[1:])
    block = LSTMLastStepBlock("observation", "out", (4, 4), 3, 1, False, torch.nn.Tanh)
    whole, latest = torch.as_tensor(second)[None], torch.as_tensor(second)[None].clone()
    latest[:, :3] = 0.0
    assert not torch.equal(block({"observation": whole})["out"], block({"observation": latest})["out"])
    assert env.actor_id() == ActorID(0, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("env=dispatching", "model=auto"),
        ("env=dispatching",),
        ("env=pick_and_place", "model=auto"),
        ("env=cutting_2d", "wrappers=cutting_2d", "model=auto"),
        ("env=tutorial_cutting_2d_struct_masked", "wrappers=tutorial_cutting_2d", "model=auto"),
        ("env.name=BrightSpotTest-v0",),
    ],
    ids=" ".join,
)
def test_no_environment_needs_a_line_of_model_configuration(arguments, tmp_path, capsys):
    directory = train(tmp_path / "run", *arguments, "algorithm=a2c")
    pictures = {path.stem.rpartition("_")[0] for path in directory.glob("*.pdf")}
    assert pictures == {"policy", "critic"}
    assert (directory / "model.yaml").is_file()
    assert ("hands over to model=auto" in capsys.readouterr().out) == ("model=auto" not in arguments)
