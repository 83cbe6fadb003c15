"""Rollout policies from the command line and in evaluations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from maze.api.run_context import RunContext
from maze.api.utils import RunMode
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.maze_cli import main

SHORT = ["runner.max_episode_steps=6"]
BASE_STOCK = "maze_envs.inventory.lost_sales.BaseStockPolicy"
PLANNED = "planned: {base: base_stock, horizon: 4, scenarios: 8}"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Path:
    """The directory that a command writes into."""
    assert main([*arguments]) == 0
    (directory,) = Path("outputs").glob("*/*")
    return directory


def test_a_rollout_names_its_base(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["policy=rollout", "policy.base=base_stock", "policy.horizon=8"]
    run("env=lost_sales", *arguments, "runner=sequential", "runner.n_episodes=1", *SHORT)
    assert "simulated_decisions" in capfd.readouterr().out


@pytest.mark.parametrize("policy", ["rollout", "exploring"])
def test_the_base_may_have_a_named_base_itself(policy: str, capfd: pytest.CaptureFixture[str]) -> None:
    inner = "{base: base_stock, epsilon: 0.1}" if policy == "rollout" else "{base: base_stock, horizon: 4}"
    command = ["env=lost_sales", f"policy={policy}", f"policy.base={inner}", "runner=sequential", "runner.n_episodes=1"]
    run(*command, *SHORT)
    assert "simulated_decisions" in capfd.readouterr().out
    outer = "horizon: 4, " if policy == "rollout" else "epsilon: 0.1, "
    compared = f"policies=[base_stock,{{nested: {{{outer}base: {inner}}}}}]"
    assert main(["-cn", "conf_compare", "env=lost_sales", compared, "runner.n_episodes=2", *SHORT]) == 0
    assert "nested" in capfd.readouterr().out


def test_a_comparison_marks_the_clairvoyant(capfd: pytest.CaptureFixture[str]) -> None:
    policies = f"policies=[base_stock,{{{PLANNED}}},{{hindsight: {{base: base_stock, clairvoyant: true}}}}]"
    directory = run("-cn", "conf_compare", "env=lost_sales", policies, "runner.n_episodes=2", *SHORT)
    assert "hindsight (clairvoyant)" in capfd.readouterr().out
    for name in ("comparison.csv", "episodes.csv", "report.html"):
        text = (directory / name).read_text()
        assert "hindsight (clairvoyant)" in text
        assert "planned (clairvoyant)" not in text


def test_a_what_if_plans_and_marks_the_clairvoyant(capfd: pytest.CaptureFixture[str]) -> None:
    directory = run("env=lost_sales", "policy=base_stock", "policy.level=0", "runner=sequential", "runner.n_episodes=1",
                    "runner.record_trajectory=true", *SHORT)  # fmt: skip
    (episode,) = (directory / "trajectory_data").iterdir()
    for future in ("scenarios: 64", "clairvoyant: true"):
        planned = f"what_if.policy={{base: {{_target_: {BASE_STOCK}, level: 8}}, horizon: 4, {future}}}"
        arguments = [f"trajectory_data={episode}", "env=lost_sales", "what_if.step=2", planned]
        assert main(["-cn", "conf_replay", *arguments]) == 0
        printed = capfd.readouterr().out
        assert "PlanningEvents.simulated_decisions" in printed
        assert ("RolloutPolicy (clairvoyant)" in printed) == ("clairvoyant" in future)


def test_a_what_if_counts_the_planning_events_of_the_recorded_episode(capfd: pytest.CaptureFixture[str]) -> None:
    planned = ["policy=rollout", "policy.base=base_stock", "policy.horizon=2", "policy.scenarios=2"]
    directory = run("env=lost_sales", *planned, "runner=sequential", "runner.n_episodes=1", *SHORT)
    change = ["what_if.step=2", "what_if.action={order: 3}"]
    assert main(["-cn", "conf_replay", f"trajectory_data={directory}", *change]) == 0
    (row,) = re.findall(r"PlanningEvents.simulated_decisions +(\d+) +(\d+)", capfd.readouterr().out)
    assert row == ("4", "4"), "an event for each of the decisions 2 to 5"


def test_the_inspector_shows_the_candidates() -> None:
    directory = run("-cn", "conf_inspect", "env=lost_sales", f"policies=[{{{PLANNED}}}]", *SHORT)
    page = (directory / "episode.html").read_text()
    assert '"scenarios": 8' in page
    assert '"is_base": true' in page


WARM = {"base": "base_stock", "scenarios": 2, "horizon": 2, "candidates": 4}


def test_a_training_run_starts_from_a_clone_of_a_rollout_policy(capfd: pytest.CaptureFixture[str]) -> None:
    warm = [f"warm_start.policy.{name}={value}" for name, value in WARM.items()]
    short = ["algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.rollout_evaluator.n_episodes=1"]
    command = ["env=lost_sales", "algorithm=ppo", "policy@warm_start.policy=rollout", *warm, "warm_start.n_steps=40"]
    run("-cn", "conf_train", *command, "warm_start.n_epochs=1", *short)
    assert "the policy gives the actions of RolloutPolicy a probability of" in capfd.readouterr().out


@pytest.mark.parametrize("option", ["rollout", "exploring"])
def test_a_run_context_clones_policies_whose_base_is_an_option(option: str) -> None:
    overrides: Any = {"policy@warm_start.policy": option, "warm_start.policy.base": "base_stock"}
    cloned: Any = RunContext(env="lost_sales", algorithm="ppo", overrides=overrides).config
    assert cloned[RunMode.TRAINING].warm_start.policy.base["_target_"] == BASE_STOCK


def test_a_run_context_evaluates_a_named_rollout() -> None:
    overrides: Any = {"policy.base": "base_stock", "policy.horizon": 4, "policy.scenarios": 8}
    context = RunContext(env="lost_sales", policy="rollout", overrides=overrides, silent=True)
    frame = context.rollout(n_episodes=1, max_episode_steps=4)
    assert "PlanningEvents" in frame.index.get_level_values("interface")


class _Overflow(gymnasium.Env[Any, Any]):
    """Fail after some steps; copies only, except if `fails` is set."""

    observation_space = spaces.Box(0, 99, (1,), np.float32)
    action_space = spaces.Discrete(2)
    n_steps = 0

    def __init__(self, last: int, fails: bool) -> None:
        self.last, self.fails = last, fails

    def __deepcopy__(self, memo: Any) -> Any:
        twin = _Overflow(self.last, fails=True)
        twin.n_steps = self.n_steps
        return twin

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.n_steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        if self.n_steps > self.last and self.fails:
            raise ValueError("no machine is left")
        return np.full(1, self.n_steps, np.float32), 1.0, self.n_steps == 99, False, {}


def overflow_env(last: int, fails: bool = False) -> GymMazeEnv:
    return GymMazeEnv(lambda: _Overflow(last, fails))


ROLLOUT = ["policy=rollout", "policy.base=random_policy", "policy.scenarios=2"]
SHORT_EVALUATION = "algorithm.rollout_evaluator.n_episodes=1"
FUTURE = "a simulated future of a candidate action"


@pytest.mark.parametrize(
    ("last", "arguments", "messages"),
    [
        (60, [*ROLLOUT, "runner=sequential"], ["after 41 steps of its episode", FUTURE]),
        (60, [*ROLLOUT, "runner=parallel", "runner.n_processes=1"], ["after 41 steps of its episode", FUTURE]),
        (60, [*ROLLOUT, "runner=sequential", "policy.n_processes=2"], ["after 41 steps of its episode", FUTURE]),
        (9, [*ROLLOUT, "runner=sequential"], ["a simulation with random actions"]),
        (60, ["runner=sequential", "runner.best_of=2", "+env.fails=true"], ["one of the plays of an episode"]),
        (60, ["-cn", "conf_train", "algorithm=dcl", SHORT_EVALUATION], ["an episode of algorithm=dcl"]),
        (60, ["-cn", "conf_train", "algorithm=self_labelling", SHORT_EVALUATION], ["a solution that"]),
    ],
)  # fmt: skip
def test_failures_in_simulations_are_distinguished_from_those_of_the_episode(
    last: int, arguments: list[str], messages: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    env = [f"env._target_={__name__}.overflow_env", f"+env.last={last}"]
    assert main([*arguments, *env]) == 1
    printed = capfd.readouterr().err
    error = "\n".join(line for line in printed.splitlines() if "Error: " in line or line.startswith("This happened"))
    assert "no machine is left" in error
    for message in messages:
        assert message in error, error
