"""The snippets with a RunContext that the documentation shows, as written; only what takes time is overridden."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from maze.api import run_context
from maze.api.run_context import RunContext
from maze.core.agent.heuristic_lunar_lander_policy import HeuristicLunarLanderPolicy
from maze.core.rollout.parallel_rollout_runner import ParallelRolloutRunner
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.models.policies import ProbabilisticPolicyComposer
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from tests.api.shorter import SHORTER

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*The environment CartPole-v0 is out of date"),
    pytest.mark.filterwarnings("ignore:.*(LunarLander-v2|Pendulum-v0)"),
]

TRAINED_FILES = {
    *("state_dict.pt", "latest.pt", "spaces_config.pkl", "hydra_config.yaml", "command.txt", "versions.json"),
    *(".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"),
}
CUTTING = {
    "env": "tutorial_cutting_2d_struct_masked",
    "wrappers": "tutorial_cutting_2d",
    "model": "tutorial_cutting_2d_struct_masked",
}
FLATTEN_CONCAT = "maze.perception.models.built_in.flatten_concat.FlattenConcatPolicyNet"

MODULES: dict[str, dict[str, Any]] = {
    "first_example": {"algorithm": "a2c", "overrides": {"env.name": "CartPole-v0"}},
    "basic_tutorial": {
        "env": "tutorial_cutting_2d_basic",
        "wrappers": "tutorial_cutting_2d_basic",
        "model": "tutorial_cutting_2d_basic",
        "algorithm": "ppo",
    },
    "events_tutorial": {
        "env": "tutorial_cutting_2d_events",
        "wrappers": "tutorial_cutting_2d_events",
        "model": "tutorial_cutting_2d_events",
        "algorithm": "ppo",
    },
    "first_training_run": {"env": "gym_env", "overrides": {"env.name": "CartPole-v0"}},
    "another_environment": {"env": "gym_env", "overrides": {"env.name": "LunarLander-v2"}},
    "provided_components": {
        "env": "gym_env",
        "overrides": {"env.name": "LunarLander-v2"},
        "wrappers": "vector_obs",
        "model": "vector_obs",
    },
    "cutting": CUTTING,
    "cutting_with_ppo": {**CUTTING, "algorithm": "ppo"},
    "overridden_values": {"algorithm": "ppo", "overrides": {"env.name": "CartPole-v0", "algorithm.lr": 0.0001}},
    "experiment": {"experiment": "cartpole_ppo_wrappers"},
    **{
        algorithm: {
            "algorithm": algorithm,
            "overrides": {"env.name": "CartPole-v0"},
            "model": "vector_obs",
            "critic": "template_state",
        }
        for algorithm in ("a2c", "ppo", "impala")
    },
    "sac": {
        "algorithm": "sac",
        "overrides": {"env.name": "Pendulum-v0"},
        "model": "vector_obs",
        "critic": "template_state_action",
    },
    "es": {"algorithm": "es", "overrides": {"env.name": "CartPole-v0"}, "model": "vector_obs"},
}


def shorter(overrides: dict[str, Any], algorithm: str, wrappers: Any = None) -> dict[str, Any]:
    further: dict[str, Any] = {"runner.normalization_samples": 50} if wrappers == "vector_obs" else {}
    if str(wrappers).startswith("tutorial"):
        further = {"wrappers.maze.core.wrappers.time_limit_wrapper.TimeLimitWrapper.max_episode_steps": 5}
    return {**SHORTER[algorithm], **further, **overrides}


def written_files(directory: str | Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in Path(directory).rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", MODULES)
def test_snippet_with_names_of_modules(name: str, tmp_path: Path) -> None:
    arguments = dict(MODULES[name])
    is_experiment = "experiment" in arguments
    algorithm = "ppo" if is_experiment else arguments.get("algorithm", "es")
    wrappers = "vector_obs" if is_experiment else arguments.get("wrappers")
    arguments["overrides"] = shorter(arguments.get("overrides", {}), algorithm, wrappers)
    rc = RunContext(**arguments)
    rc.train(n_epochs=1)
    assert written_files(rc.run_dir) >= TRAINED_FILES
    assert Path.cwd() == tmp_path
    rc.close()


def test_the_first_example_continues_with_single_actions() -> None:
    # seeds, because poles that are pushed to one side by chance fall before ten steps are over
    seeds = {"seeding.env_base_seed": 1, "seeding.agent_base_seed": 1}
    rc = RunContext(algorithm="a2c", overrides=shorter({"env.name": "CartPole-v0", **seeds}, "a2c"))
    rc.train(n_epochs=5)
    cartpole_env = gym.make("CartPole-v0")
    env = GymMazeEnv(env=cartpole_env)
    env.seed(1)
    obs = env.reset()
    for _ in range(10):
        action = rc.compute_action(obs)
        obs, _rewards, _dones, _info = env.step(action)
    assert env.get_env_time() == 10


@pytest.mark.slow
def test_an_earlier_run_is_resumed_with_another_learning_rate(capfd: pytest.CaptureFixture[str]) -> None:
    overrides = shorter({"env.name": "LunarLander-v2"}, "ppo")
    rc = RunContext(env="gym_env", overrides=overrides, algorithm="ppo")
    rc.train(n_epochs=1)
    first = rc.policy.state_dict()

    rc = RunContext(
        env="gym_env",
        run_dir=rc.run_dir,
        overrides={**overrides, "algorithm.lr": 0.0001, "verbose": 2},
        algorithm="ppo",
    )
    rc.train(n_epochs=1)
    assert f"input_dir: {rc.run_dir}" in capfd.readouterr().out
    assert rc.runner.trainer.config.lr == 0.0001
    assert first["policies"].keys() == rc.policy.state_dict()["policies"].keys()


def test_grid_search() -> None:
    rc = RunContext(
        algorithm="ppo",
        overrides=shorter(
            {"env.name": "CartPole-v0", "algorithm.n_epochs": 1, "algorithm.lr": [0.0001, 0.0005, 0.001]}, "ppo"
        ),
        multirun=True,
    )
    rc.train()
    assert [result.overrides for result in rc.results] == [
        {"algorithm.lr": 0.0001},
        {"algorithm.lr": 0.0005},
        {"algorithm.lr": 0.001},
    ]
    assert all(written_files(directory) >= TRAINED_FILES for directory in rc.run_dir)


def a2c_config() -> A2CAlgorithmConfig:
    return A2CAlgorithmConfig(
        n_epochs=1,
        epoch_length=1,
        patience=15,
        critic_burn_in_epochs=0,
        n_rollout_steps=4,
        lr=0.0005,
        gamma=0.98,
        gae_lambda=1.0,
        policy_loss_coef=1.0,
        value_loss_coef=0.5,
        entropy_coef=0.00025,
        max_grad_norm=0.0,
        device="cpu",
        rollout_evaluator=RolloutEvaluator(
            eval_env=SequentialVectorEnv([lambda: GymMazeEnv("CartPole-v0")]),
            n_episodes=1,
            model_selection=None,
            deterministic=True,
        ),
    )


def composed_policy(overrides_only: bool) -> dict[str, Any]:
    networks = [{"_target_": FLATTEN_CONCAT, "non_lin": "torch.nn.Tanh", "hidden_units": [222, 222]}]
    if overrides_only:
        policy: Any = {
            "_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer",
            "networks": networks,
            "substeps_with_separate_agent_nets": [],
            "agent_counts_dict": {0: 1},
        }
    else:
        env = GymMazeEnv("CartPole-v0")
        policy = ProbabilisticPolicyComposer(
            action_spaces_dict=env.action_spaces_dict,
            observation_spaces_dict=env.observation_spaces_dict,
            distribution_mapper=DistributionMapper(action_space=env.action_space, distribution_mapper_config={}),
            networks=networks,
            substeps_with_separate_agent_nets=[],
            agent_counts_dict={0: 1},
        )
    return {"overrides": {**SHORTER["es"], "model.policy": policy}}


OBJECTS: dict[str, Callable[[], dict[str, Any]]] = {
    "algorithm_beside_modules": lambda: {
        "algorithm": a2c_config(),
        "overrides": {"env.name": "CartPole-v0", "runner.concurrency": 2},
        "model": "vector_obs",
        "critic": "template_state",
    },
    "environment": lambda: {"env": lambda: GymMazeEnv("CartPole-v0"), "overrides": SHORTER["es"]},
    "mapping_among_overrides": lambda: composed_policy(overrides_only=True),
    "policy_composer_among_overrides": lambda: composed_policy(overrides_only=False),
    "algorithm": lambda: {"algorithm": a2c_config(), "overrides": {"runner.concurrency": 2}},
}


@pytest.mark.parametrize("name", OBJECTS)
def test_snippet_with_objects(name: str) -> None:
    rc = RunContext(**OBJECTS[name]())
    rc.train(n_epochs=1)
    assert written_files(rc.run_dir) >= TRAINED_FILES
    rc.close()


def test_an_algorithm_among_overrides_chooses_its_runner_like_the_argument() -> None:
    rc = RunContext(overrides={"algorithm": a2c_config(), "runner.concurrency": 2})
    rc.train(n_epochs=1)
    assert rc.runner.trainer.config.lr == 0.0005


def test_acting_in_an_environment_and_evaluation() -> None:
    env_factory = lambda: GymMazeEnv("CartPole-v0")  # noqa: E731 (as documented)
    rc = run_context.RunContext(env=env_factory, overrides=SHORTER["es"])
    rc.train(n_epochs=1)
    env = env_factory()
    obs = env.reset()
    for _ in range(5):
        action = rc.compute_action(obs)
        obs, _rewards, _dones, _info = env.step(action)
    stats = rc.evaluate(n_episodes=2)
    assert any(key.output_name == "mean" for key in stats)


@pytest.mark.slow
def test_sac_from_demonstrations(tmp_path: Path) -> None:
    env = GymMazeEnv("LunarLander-v2")
    runner = ParallelRolloutRunner(
        n_episodes=2, max_episode_steps=0, n_processes=2, record_trajectory=True, record_event_logs=True
    )
    runner.run_with(env=env, wrappers={}, agent=HeuristicLunarLanderPolicy())
    rc = RunContext(
        algorithm="sacfd",
        overrides=shorter(
            {
                "env.name": "LunarLander-v2",
                "runner.initial_demonstration_trajectories.input_data": f"{tmp_path}/trajectory_data",
            },
            "sacfd",
        ),
        model="flatten_concat",
        critic="flatten_concat_state_action",
    )
    rc.train(n_epochs=1)
    assert written_files(rc.run_dir) >= TRAINED_FILES
