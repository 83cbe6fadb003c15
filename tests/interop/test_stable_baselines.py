from __future__ import annotations

import subprocess
import sys

import pytest

from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.no_dict_spaces_wrapper import NoDictSpacesWrapper
from maze.interop import to_gymnasium

sb3 = pytest.importorskip("stable_baselines3")


def plain_env():
    return to_gymnasium(NoDictSpacesWrapper.wrap(GymMazeEnv("CartPole-v1")))


@pytest.mark.slow
def test_a2c_trains_on_an_exported_environment_and_its_policy_runs_in_it():
    env = plain_env()
    model = sb3.A2C("MlpPolicy", env, seed=1, device="cpu")
    model.learn(total_timesteps=200)
    observation, _ = env.reset(seed=2)
    action, _ = model.predict(observation, deterministic=True)
    _, reward, *_ = env.step(action)
    assert reward == 1.0
    assert model.num_timesteps == 200


@pytest.mark.slow
def test_several_exported_environments_with_dictionary_observations_train_side_by_side():
    from stable_baselines3.common.env_util import make_vec_env

    from maze.core.wrappers.no_dict_action_wrapper import NoDictActionWrapper

    envs = make_vec_env(lambda: to_gymnasium(NoDictActionWrapper(GymMazeEnv("CartPole-v1"))), n_envs=2, seed=3)
    model = sb3.PPO("MultiInputPolicy", envs, n_steps=16, batch_size=16, n_epochs=1, seed=1, device="cpu")
    model.learn(total_timesteps=32)
    assert model.num_timesteps == 32


@pytest.mark.slow
def test_a_maze_environment_given_as_it_is_gives_an_error_with_the_line_that_exports_it():
    """In a process of its own, where neither the documented imports nor anything else came before."""
    code = (
        "from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv\n"
        "from stable_baselines3 import A2C\n"
        "from stable_baselines3.common.vec_env import DummyVecEnv\n"
        "from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper\n"
        "env = GymMazeEnv('CartPole-v1')\n"
        "wrapped = TimeLimitWrapper(env)\n"
        "for attempt in (\n"
        "    lambda: A2C('MlpPolicy', env), lambda: DummyVecEnv([lambda: env]), lambda: A2C('MlpPolicy', wrapped)\n"
        "):\n"
        "    try:\n"
        "        attempt()\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("not a Gymnasium environment") == 3
    assert done.stdout.count("from maze.interop import to_gymnasium; env = to_gymnasium(env)") == 3
