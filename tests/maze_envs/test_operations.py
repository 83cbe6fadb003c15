"""Experiments of the inventory, queueing and packing problems, through the command line, and what they start from."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from maze.core.env.structured_env import ActorID
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.checkpoint import load_state
from maze.maze_cli import main

TINY = (
    *("algorithm.epoch_length=1", "algorithm.n_rollout_steps=4", "algorithm.batch_size=8"),
    *("runner.concurrency=4", "runner.eval_concurrency=2", "algorithm.rollout_evaluator.n_episodes=2"),
)
EXPERIMENTS = {
    "lost_sales_ppo": ("env.max_episode_steps=6",),
    "dual_sourcing_ppo": ("env.max_episode_steps=6",),
    "criss_cross_ppo": ("env.max_episode_steps=6",),
    "extended_network_ppo": ("env.max_episode_steps=6",),
    "bin_packing_ppo": ("env.n_items=6",),
}
RULES = {
    "lost_sales": ("base_stock", "average_cost"),
    "dual_sourcing": ("dual_index", "average_cost"),
    "criss_cross": ("priority", "average_jobs"),
    "extended_network": ("priority", "average_jobs"),
    "bin_packing": ("packing_rule", "excess_percent"),
}


def train(directory, *arguments):
    assert main(["-cn", "conf_train", *arguments, *TINY, f"hydra.run.dir={directory}"]) == 0
    return load_state(directory / "latest.pt")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_is_trained_and_compared_with_heuristics_by_one_command_each(
    experiment, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "run", f"+experiment={experiment}", "algorithm.n_epochs=1", *EXPERIMENTS[experiment])
    rule, kpi = RULES[experiment.removesuffix("_ppo")]
    policies = f"policies=[{rule},{tmp_path / 'run'}]"
    assert main(["-cn", "conf_compare", policies, "runner.n_episodes=3"]) == 0
    assert kpi in capfd.readouterr().out


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "impala"])
def test_centred_rewards_are_resumed_exactly(algorithm, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    training = ["env=lost_sales", f"algorithm={algorithm}", "algorithm.reward_centering=0.5", "algorithm.lr=0.01"]
    seeds = ["seeding.env_base_seed=1", "seeding.agent_base_seed=2"]
    tiny = ["algorithm.epoch_length=2", "algorithm.n_rollout_steps=4", "algorithm.rollout_evaluator.n_episodes=1"]
    if algorithm == "impala":
        tiny += ["algorithm.num_actors=2", "algorithm.actors_batch_size=2"]
    else:
        tiny += ["runner.concurrency=2"]

    def run(name, *more):
        directory = f"hydra.run.dir={tmp_path / name}"
        assert main(["-cn", "conf_train", *training, *tiny, *seeds, directory, *more]) == 0
        return load_state(tmp_path / name / "latest.pt")

    whole, _ = run("whole", "algorithm.n_epochs=3"), run("first", "algorithm.n_epochs=1")
    resumed = run("second", f"input_dir={tmp_path / 'first'}", "resume=true", "algorithm.n_epochs=3")
    assert resumed["parts"]["reward_centering"] == whole["parts"]["reward_centering"]
    for group in whole["model"].values():
        assert group
    assert str(resumed["model"]) == str(whole["model"])


def test_a_run_without_reward_centring_is_not_resumed_with_it(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "run", "env=lost_sales", "algorithm=ppo", "algorithm.n_epochs=1")
    resumed = ["env=lost_sales", "algorithm=ppo", f"input_dir={tmp_path / 'run'}", "resume=true"]
    assert main(["-cn", "conf_train", *resumed, *TINY, "algorithm.n_epochs=2", "algorithm.reward_centering=0.1"]) == 1
    assert "learned without reward_centering, but it is configured" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("env", "rule", "heads"),
    [("lost_sales", "base_stock", ["order"]), ("dual_sourcing", "dual_index", ["express", "regular"])],
)
def test_a_training_run_starts_from_a_cloned_heuristic(env, rule, heads, tmp_path, monkeypatch, capfd):
    from maze_envs.inventory.dual_sourcing import DualIndexPolicy, DualSourcingEnv
    from maze_envs.inventory.lost_sales import BaseStockPolicy, LostSalesEnv

    monkeypatch.chdir(tmp_path)
    warm = (f"policy@warm_start.policy={rule}", "warm_start.n_steps=4000", "warm_start.n_epochs=30")
    fixed = ("algorithm.lr=0", "algorithm.n_epochs=1", "model=auto", "seeding.agent_base_seed=1")
    train(tmp_path / "run", f"env={env}", "algorithm=ppo", *warm, "warm_start.lr=0.005", *fixed)
    demonstrator = BaseStockPolicy(23, 6) if env == "lost_sales" else DualIndexPolicy(4, 7, 2)
    play = LostSalesEnv() if env == "lost_sales" else DualSourcingEnv()
    learned = trained_policy(tmp_path / "run")
    play.seed(5)
    observation, agreed, n_decisions = play.reset(), 0, 0
    for _ in range(200):
        actor: ActorID = play.actor_id()
        action = demonstrator.compute_action(observation, None, None, actor)
        batch = {key: np.asarray(value)[None] for key, value in observation.items()}
        chosen = learned.compute_actions(batch, actor, deterministic=True)
        agreed += sum(int(chosen[head][0] == action[head]) for head in action)
        n_decisions += len(action)
        observation, *_ = play.step(action)
    assert {head for key in play.action_spaces_dict.values() for head in key} == set(heads)
    assert agreed / n_decisions > 0.8


def test_an_algorithm_without_action_probabilities_cannot_start_from_a_heuristic(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    command = ["-cn", "conf_train", "env=lost_sales", "algorithm=dqn", "policy@warm_start.policy=base_stock"]
    assert main(command) == 1
    assert "warm_start.policy: cloning needs a policy with probabilities of actions" in capfd.readouterr().err


def test_a_recurrent_model_does_not_start_from_a_heuristic_that_cannot_be_cloned(tmp_path, monkeypatch, capfd):
    def watch(self, n_steps, policy=None):
        raise AssertionError("It was watched.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RolloutGenerator, "allocate", watch)
    command = ["-cn", "conf_train", "env=lost_sales", "algorithm=ppo", "policy@warm_start.policy=base_stock"]
    assert main([*command, "model=auto", "model.recurrence=carried"]) == 1
    assert "warm_start.policy: cloning needs a policy" in capfd.readouterr().err


def trained_policy(directory):
    from omegaconf import OmegaConf

    from maze.core.rollout.rollout_runner import RolloutRunner

    config = OmegaConf.load(directory / ".hydra" / "config.yaml")
    files = {"state_dict_file": "state_dict.pt", "spaces_dict_file": "spaces_config.pkl"}
    agent = {
        "_target_": "maze.core.agent.serialized_torch_policy.SerializedTorchPolicy",
        "model": OmegaConf.to_container(config.model, resolve=False),
        "device": "cpu",
        **files,
    }
    return RolloutRunner.init_env_and_agent(config.env, {}, 0, agent, str(directory))[1]


def test_environments_are_imported_without_what_draws_them():
    script = """
import importlib, pkgutil, sys, maze_envs
for module in pkgutil.walk_packages(maze_envs.__path__, "maze_envs."):
    if ".conf" not in module.name:
        importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith("maze_envs.")]), "matplotlib" in sys.modules)
"""  # each worker process imports its environment
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    n_modules, draws = done.stdout.split()
    assert int(n_modules) > 30
    assert draws == "False"
