"""Loading of training runs from Python."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from maze.api.run_context import RunContext
from maze.api.utils import InvalidSpecificationError, RunMode
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from tests.api.shorter import SEEDS, SHORTER


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    rc = RunContext(
        run_dir=str(tmp_path_factory.mktemp("run") / "run"),
        env="Acrobot-v1",
        algorithm="ppo",
        wrappers="vector_obs",
        overrides={**SHORTER["ppo"], **SEEDS, "algorithm.lr": 0.002, "runner.normalization_samples": 20},
        silent=True,
    )
    rc.train(n_epochs=1)
    return rc


def test_a_loaded_run_acts_in_its_environment_as_it_was_trained(trained: RunContext) -> None:
    loaded = RunContext.load(trained.run_dir, silent=True)
    one, other = (rc.evaluate(n_episodes=1, deterministic=True) for rc in (trained, loaded))
    assert one.mean_reward == other.mean_reward
    env = loaded.env_factory()
    env.seed(1)
    observation = env.reset()
    assert observation["observation"].shape == (6,)
    actions = [rc.compute_action(observation, deterministic=True) for rc in (trained, loaded)]
    assert np.array_equal(actions[0]["action"], actions[1]["action"])


def test_environments_of_a_loaded_run_normalize_as_in_training_before_it_is_used(trained: RunContext) -> None:
    observations = []
    for rc in (trained, RunContext.load(trained.run_dir, silent=True)):
        env = rc.env_factory()
        env.seed(1)
        observations.append(env.reset()["observation"])
    assert np.array_equal(*observations)


def test_a_loaded_run_trains_further_from_its_weights_in_a_directory_of_its_own(trained: RunContext) -> None:
    loaded = RunContext.load(trained.run_dir, silent=True)
    assert torch.equal(_first(loaded), _first(trained))
    result = loaded.train(n_epochs=1)
    assert result.path != Path(trained.run_dir)
    algorithm = loaded.runner.trainer.config
    assert (algorithm.lr, algorithm.n_rollout_steps) == (0.002, 4)


def _first(rc: RunContext) -> torch.Tensor:
    return _flat(rc.policy.state_dict())[0]


def _flat(state: object) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [tensor for value in state.values() for tensor in _flat(value)] if isinstance(state, dict) else []


def test_components_and_overrides_take_the_place_of_the_runs_own(trained: RunContext) -> None:
    loaded = RunContext.load(trained.run_dir, algorithm="a2c", overrides=SHORTER["a2c"], silent=True)
    loaded.train(n_epochs=1)
    assert type(loaded.runner.trainer.config).__name__ == "A2CAlgorithmConfig"


def test_a_loaded_run_keeps_lists_components_and_nulls_of_its_algorithm(tmp_path: Path) -> None:
    given = {
        "algorithm.constraints": ["reward >= -1"],
        "algorithm.gamma": 1.0,
        "algorithm.rollout_evaluator": {"n_episodes": 2, "objective": "reward/min"},
    }
    rc = RunContext("CartPole-v1", algorithm="a2c", overrides={**SHORTER["a2c"], **given}, silent=True)
    rc.train(n_epochs=1)
    other = {"algorithm.gamma": 0.5, "algorithm.rollout_evaluator.n_episodes": 3}
    loaded = RunContext.load(rc.run_dir, overrides=other, silent=True)
    loaded.train(n_epochs=1)
    trainer = loaded.runner.trainer
    assert (trainer.config.constraints, trainer.config.gamma) == (["reward >= -1"], 0.5)
    assert (trainer.evaluator.n_episodes, trainer.evaluator.criterion.objective) == (3, "reward/min")

    cloned = tmp_path / "cloned"
    (cloned / ".hydra").mkdir(parents=True)
    (cloned / "state_dict.pt").touch()
    stored = "{env: {_target_: maze.core.wrappers.maze_gym_env_wrapper.GymMazeEnv, env: CartPole-v1}, algorithm: {"
    stored += "eval_every_k_iterations: null, optimizer: {_target_: torch.optim.SGD, lr: 0.5, momentum: 0.25}}}"
    (cloned / ".hydra" / "config.yaml").write_text(stored, encoding="utf-8")
    (cloned / ".hydra" / "hydra.yaml").write_text("hydra: {runtime: {choices: {algorithm: bc}}}", encoding="utf-8")
    for arguments in ({}, {"multirun": True}):
        config = RunContext.load(cloned, silent=True, **arguments).config[RunMode.TRAINING]
        algorithm = (config[0] if arguments else config).algorithm
        assert algorithm.eval_every_k_iterations is None
        assert (algorithm.optimizer._target_, algorithm.optimizer.momentum) == ("torch.optim.SGD", 0.25)


def test_an_environment_that_was_given_as_a_function_has_to_be_given_again(tmp_path: Path) -> None:
    rc = RunContext(env=lambda: GymMazeEnv("CartPole-v1"), algorithm="a2c", overrides=SHORTER["a2c"], silent=True)
    rc.train(n_epochs=1)
    with pytest.raises(InvalidSpecificationError, match=r"load: .*env=\.\.\. as an argument of load"):
        RunContext.load(rc.run_dir)
    loaded = RunContext.load(rc.run_dir, env=lambda: GymMazeEnv("CartPole-v1"), silent=True)
    assert loaded.evaluate(n_episodes=1).mean_reward > 0


def test_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpecificationError, match="is not the directory of a training"):
        RunContext.load(tmp_path)


def test_an_untrusted_run_cannot_name_code(trained: RunContext, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / ".hydra").mkdir(parents=True)
    for name in ("state_dict.pt", "spaces_config.pkl", ".hydra/hydra.yaml"):
        os.link(Path(trained.run_dir) / name, run / name)
    text = (Path(trained.run_dir) / ".hydra" / "config.yaml").read_text(encoding="utf-8")
    target = "maze.perception.models.policies.ProbabilisticPolicyComposer"
    assert target in text
    (run / ".hydra" / "config.yaml").write_text(text.replace(target, "os.system"), encoding="utf-8")
    with pytest.raises(InvalidSpecificationError, match=r"names os\.system"):
        RunContext.load(run, silent=True)
