"""Environment, heuristic, training, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from stockroom.env import StockroomEnv
from stockroom.events import StockroomEvents
from stockroom.heuristic import MostUrgentFirst

from maze.core.agent.random_policy import RandomPolicy
from maze.maze_cli import main
from maze.serve.bundle import PolicyBundle
from maze.utils.check_env import check_env

CONFIG = Path(__file__).resolve().parents[1] / "stockroom" / "conf" / "env" / "stockroom.yaml"
SHORT = (
    *("algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=28", "algorithm.batch_size=28"),
    *("algorithm.rollout_evaluator.n_episodes=1", "runner.concurrency=2", "env.n_days=7"),
)


def make_env(**changes: Any) -> StockroomEnv:
    arguments = yaml.safe_load(CONFIG.read_text())
    arguments.pop("_target_")
    return StockroomEnv(**{**arguments, **changes})


def mean_profit(policy: Any, n_episodes: int = 10) -> float:
    env, profit = make_env(), 0.0
    for seed in range(n_episodes):
        env.seed(seed)
        policy.seed(seed)
        observation, done = env.reset(), False
        while not done:
            action = policy.compute_action(observation, maze_state=None, env=env, actor_id=env.actor_id())
            observation, reward, done, _ = env.step(action)
            profit += 10.0 * reward / n_episodes
    return profit


def test_the_environment_keeps_its_promises() -> None:
    check_env(make_env, raise_on_findings=True)


def test_a_day_by_hand() -> None:
    env = make_env(mean_demand=[1e-9, 1e9])  # no demand for the first, unlimited demand for the second
    env.seed(1)
    env.reset()
    env.core_env.stock = np.array([10, 20])
    observation, reward, done, _ = env.step({"product": 0})
    assert (reward, done, env.actor_id().step_key) == (0.0, False, "lots")
    assert observation["lots_mask"].tolist() == [1, 1, 1, 1, 0, 0]  # 28 units fit on a shelf of 30, 34 do not
    _, reward, _, _ = env.step({"lots": 2})
    (day,) = [event for event in env.get_step_events() if event.interface_method is StockroomEvents.day_over]
    assert (day.sold, env.core_env.stock.tolist()) == (20, [22, 0])
    assert day.profit == pytest.approx(2.0 * 20 - 1.0 * day.lost - 5.0 - 0.2 * 22)  # sold, lost, delivered, kept
    assert reward == pytest.approx(day.profit / 10.0)


def test_what_does_not_fit_goes_back() -> None:
    env = make_env()
    env.seed(1)
    env.reset()
    env.core_env.stock[:] = 30
    env.step({"product": 3})
    env.step({"lots": 1})
    assert [
        event.units for event in env.get_step_events() if event.interface_method is StockroomEvents.invalid_order
    ] == [6]
    assert env.core_env.stock.max() <= 30


def test_the_rule_earns_more_than_chance() -> None:
    assert mean_profit(MostUrgentFirst()) > mean_profit(RandomPolicy(make_env().action_spaces_dict)) + 50.0


def test_a_policy_is_trained_compared_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-cn", "conf_train", "+experiment=stockroom_ppo", *SHORT, "hydra.run.dir=trained"]) == 0
    compare = ["-cn", "conf_compare", "env=stockroom", "env.n_days=7", "runner.n_episodes=3", "hydra.run.dir=compared"]
    assert main([*compare, "policies=[stockroom_rule,random,trained]"]) == 0
    assert main(["--export", "trained", "--out", "policy.maze", "--trust", "stockroom", "--steps", "50"]) == 0
    session = PolicyBundle.load("policy.maze").session(seed=1)
    env = make_env()
    env.seed(1)
    observation, done, n_substeps = env.reset(), False, 0
    while not done:
        observation, _, done, _ = env.step(session.act(observation, actor_id=tuple(env.actor_id())))
        n_substeps += 1
    assert n_substeps == 2 * 28
