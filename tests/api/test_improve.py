"""Improvement of a heuristic: the ladder, its recommendation, and failures of single policies."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from gymnasium import spaces

from maze.api.improve import COST, LEAST_EPISODES, Improvement, Rung
from maze.api.run_context import RunContext
from maze.core.agent.policy import Policy
from maze.core.env.action_conversion import DictActionConversion
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import DictObservationConversion
from maze.core.errors import ConfigError
from maze.evaluation.comparison import RETURN, PlayedEpisodes
from maze.evaluation.gate import read_thresholds
from maze.maze_cli import main

N_EPISODES = 200
PROBLEM = ("env=lost_sales", "env.lead_time=2", "env.max_order=6", "env.max_episode_steps=5")
SEEDS = {"seeding.env_base_seed": 1, "seeding.agent_base_seed": 1}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rung(name: str, returns: Any, late: Any = 0.0) -> Rung:
    """A policy with these returns and values of a KPI in its episodes."""
    measures = {RETURN: np.asarray(returns)[np.newaxis], COST: np.ones((1, len(returns)))}
    measures["late"] = np.full((1, len(returns)), late)
    policy: Any = None
    return Rung(name, policy, lambda: None, PlayedEpisodes(name, measures), 1, 1.0, None, {})


NOISE = np.random.default_rng(1).normal(size=N_EPISODES)
OF_HEURISTIC = 5.0 + np.random.default_rng(2).normal(size=N_EPISODES)


@pytest.mark.parametrize(
    ("differences", "recommended"),
    [
        ([1.0 + NOISE], "policy 0"),  # shown to be better
        ([0.05 + NOISE - NOISE.mean()], "heuristic"),  # better on average, and the interval includes 0
        ([-0.5 + NOISE], "heuristic"),
        ([0.0 * NOISE], "heuristic"),  # equal: the heuristic is cheaper
        ([0.5 + NOISE, 1.0 + NOISE, 0.7 + NOISE], "policy 1"),
        ([0.5 + NOISE, 0.6 + 20.0 * (NOISE - NOISE.mean())], "policy 0"),  # the better mean is not shown
    ],
)
def test_the_best_policy_is_recommended_of_those_shown_to_be_as_good_as_the_heuristic(
    differences: list[Any], recommended: str
) -> None:
    others = [rung(f"policy {index}", OF_HEURISTIC + each) for index, each in enumerate(differences)]
    found = Improvement([rung("heuristic", OF_HEURISTIC), *others], {}, read_thresholds({}, margin=0.0))
    assert found.recommended.name == recommended
    assert found.sentence.startswith(f"Recommended: {'the ' * (recommended == 'heuristic')}{recommended}")
    assert recommended in found.page("")


def test_few_episodes_are_judged_and_a_remark_states_what_they_may_miss() -> None:
    rungs = [rung("heuristic", OF_HEURISTIC[:50]), rung("planned", OF_HEURISTIC[:50] + 1.0)]
    found = Improvement(rungs, {}, read_thresholds({}, margin=0.0))
    assert found.recommended.name == "planned"
    assert "Losses in fewer than 7.1% of the episodes may be missing" in "".join(found.remarks())
    with pytest.raises(ConfigError, match="expected at least 50 to judge return, found 49"):
        _ = Improvement([each.first(49) for each in rungs], {}, read_thresholds({}, margin=0.0)).recommended


def test_a_policy_that_makes_a_kpi_worse_is_not_recommended() -> None:
    rungs = [rung("heuristic", OF_HEURISTIC, 0.1), rung("late policy", OF_HEURISTIC + 1.0, 0.2)]
    assert Improvement(rungs, {}, read_thresholds({}, margin=0.0)).recommended.name == "late policy"
    judged = Improvement(rungs, {}, read_thresholds({}, minimize=["late"], margin=0.0))
    assert judged.recommended.name == "heuristic"
    assert any("late (worse)" in remark for remark in judged.remarks())


def test_the_improve_command_writes_the_stages_and_recommends_only_policies_not_shown_to_be_worse(
    capfd: pytest.CaptureFixture[str],
) -> None:
    seeds = [f"{name}={seed}" for name, seed in SEEDS.items()]
    arguments = ["policy=base_stock", "policy.level=0", "budget=8s", "runner.horizon=4", *seeds]
    assert main(["-cn", "conf_improve", *PROBLEM, *arguments, "hydra.run.dir=found"]) == 0
    printed = capfd.readouterr().out
    returns = pd.read_csv("found/comparison.csv").set_index(["measure", "policy"]).loc[RETURN]
    recommended = re.search(r"Recommended: (?:the )?(rollout of \w+|\w+)", printed)
    assert recommended is not None
    assert not returns.loc[recommended[1], "difference_low"] < 0
    episodes = pd.read_csv("found/episodes.csv").groupby("policy").size()
    assert set(episodes) == {episodes["heuristic"]}
    assert LEAST_EPISODES <= episodes["heuristic"] <= N_EPISODES
    page = Path("found/report.html").read_text(encoding="utf-8")
    assert recommended[0] in page
    assert "ms per decision" in page
    for rung in ("rollout of heuristic", "ppo"):
        assert f"-> {rung}: return" in printed or f"No {rung}: " in printed


class CountDown(CoreEnv):
    """The agent should always choose 1."""

    def reset(self) -> dict[str, Any]:
        self.n_left = 4
        return self.get_maze_state()

    def step(self, maze_action: Any) -> Any:
        self.n_left -= 1
        return self.get_maze_state(), float(maze_action["choice"]), self.n_left == 0, {}

    def get_maze_state(self) -> dict[str, Any]:
        return {"left": np.array([self.n_left], np.float32)}

    def seed(self, seed: int) -> None:
        """Nothing is random."""

    def clone_from(self, env: Any) -> None:
        self.n_left = env.n_left


class WithoutCopies(CountDown):
    def clone_from(self, env: Any) -> None:
        raise NotImplementedError("WithoutCopies cannot be copied.")


class CountDownEnv(MazeEnv[CountDown]):
    def __init__(self, core_env: CountDown | None = None) -> None:
        actions = {"choice": spaces.Discrete(2)}
        observations = {"left": spaces.Box(0, 4, (1,), np.float32)}
        conversions = {0: DictActionConversion(actions)}, {0: DictObservationConversion(observations)}
        super().__init__(core_env or CountDown(), *conversions)


class Zero(Policy):
    def compute_action(self, *args: Any, **kwargs: Any) -> Any:
        return {"choice": 0}


class Broken(Policy):
    def compute_action(self, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("no stock")


@pytest.mark.long
def test_planning_and_learning_improve_a_heuristic_and_the_best_can_be_exported(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with RunContext(CountDownEnv, algorithm="ppo", overrides=SEEDS) as context:
        found = context.improve(Zero, budget_s=20)
    assert found.rungs[0].played.measures[RETURN].mean() == 0.0
    assert found.rungs[1].name == "rollout of heuristic"
    assert found.rungs[1].played.measures[RETURN].mean() > 3.0
    assert found.rungs[1].commands["Plan with it"].startswith("RolloutPolicy(heuristic, horizon=20, scenarios=")
    assert found.recommended.played.measures[RETURN].mean() == max(
        rung.played.measures[RETURN].mean() for rung in found.rungs
    )
    assert found.sentence in capfd.readouterr().out
    trained = next(rung for rung in found.rungs if rung.name == "ppo")
    _, *arguments = shlex.split(trained.commands["Export it to one file"])
    assert main(arguments) == 0


@pytest.mark.long
def test_policy_that_cannot_be_built_is_reported_and_the_others_run() -> None:
    with RunContext(lambda: CountDownEnv(WithoutCopies()), algorithm="ppo", overrides=SEEDS, silent=True) as context:
        found = context.improve(Zero(), budget_s=8)
        again = context.improve(Zero(), budget_s=2)
    assert "copies of the environment" in found.failures["rollout of heuristic"]
    assert [each.name for each in found.rungs] == ["heuristic", "ppo"]
    assert found.policy is found.recommended.policy
    assert "set a larger budget" in again.failures["ppo"]
    assert again.recommended.name == "heuristic"


def test_a_heuristic_that_fails_ends_the_improvement() -> None:
    with (
        RunContext(CountDownEnv, algorithm="ppo", overrides=SEEDS, silent=True) as context,
        pytest.raises(ZeroDivisionError, match="no stock"),
    ):
        context.improve(Broken(), budget_s=12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget_s": "soon"}, "budget: expected seconds, or a time"),
        ({"budget_s": -1}, "budget: expected a number above 0"),
        ({"n_episodes": 20}, "n_episodes: expected at least 200"),
        ({"horizn": 3}, "horizon"),
        ({"budget_s": 1e-4}, "50 episodes of the heuristic take more than"),
        ({"heuristic": None}, "policy: name the heuristic"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"heuristic": Zero(), **arguments}
    with (
        RunContext(CountDownEnv, algorithm="ppo", silent=True) as context,
        pytest.raises(ConfigError, match=message),
    ):
        context.improve(**given)


def test_the_command_needs_a_heuristic(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-cn", "conf_improve", *PROBLEM]) != 0
    assert "policy: name the heuristic" in capfd.readouterr().err
