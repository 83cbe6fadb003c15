"""Dispatching learned from a log: vehicles choose in turn among masked orders, and their number of decisions differs.

    python -m benchmarks.offline_dispatching --algorithms cql iql --decisions 30000 --updates 3000 --seeds 0 1 2

The log is that of vehicles that take the nearest order, or with probability epsilon any allowed action. The learned
policy, which is greedy, and the heuristic play the same episodes; the table has the mean returns, and the difference
with its standard error.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.planning import problem_of
from maze.api.run_context import RunContext
from maze.core.agent.action_distribution import ExploringPolicy
from maze.core.trajectory_recording.datasets.logged_steps import LoggedSteps
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord


def episode(env: Any, act: Callable[..., Any], seed: int) -> list[tuple[int, SpacesRecord]]:
    """Records of an episode."""
    env.seed(seed)
    observation, done, records = env.reset(), False, []
    while not done:
        actor = env.actor_id()
        action = act(observation, actor_id=actor)
        begun = env.get_env_time()
        following, reward, done, info = env.step(action)
        records.append((begun, SpacesRecord(actor, observation, action, float(reward), done, info)))
        observation = following
    return records


def returns_of(env: Any, act: Callable[..., Any], n_episodes: int) -> np.ndarray:
    """Returns of episodes that are the same for all policies."""
    return np.array([sum(record.reward for _, record in episode(env, act, 10_000 + e)) for e in range(n_episodes)])


def unexplained_spread(episodes: list[list[tuple[int, SpacesRecord]]], gamma: float) -> float:
    """Standard deviation of the discounted rest of the return after a decision, that observation and action leave open.

    Least squares with all orders, the sorted distances, the time left, and the chosen order with its squares.
    """
    features, rests = [], []
    for records in episodes:
        rest, later = 0.0, [begun for begun, _ in records[1:]] + [records[-1][0] + 1]
        for (begun, record), following in zip(reversed(records), reversed(later), strict=True):
            rest = record.reward + gamma ** (following - begun) * rest
            orders, time_left = record.observation["orders"], record.observation["time_left"]
            chosen = np.vstack([orders, np.zeros((1, orders.shape[1]))])[int(record.action["order"])]
            features.append(
                np.concatenate([orders.ravel(), np.sort(orders[:, 1]), time_left, chosen, chosen**2, [1.0]])
            )
            rests.append(rest)
    matrix, target = np.array(features), np.array(rests)
    fitted, *_ = np.linalg.lstsq(matrix, target, rcond=None)
    return float((target - matrix @ fitted).std())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["cql", "iql"])
    parser.add_argument("--epsilon", type=float, default=0.2)
    parser.add_argument("--decisions", type=int, default=30_000)
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--overrides", nargs="*", default=[], help="name=number of the algorithm, e.g. alpha=0.1")
    options = parser.parse_args()
    make, heuristic, _ = problem_of("dispatching")
    env = make()

    nearest = partial(heuristic.compute_action, maze_state=None, env=env)
    base = returns_of(env, nearest, options.episodes)
    print(f"heuristic {base.mean():.2f}", flush=True)
    changes = {f"algorithm.{name}": float(value) for name, value in (each.split("=") for each in options.overrides)}
    for seed in options.seeds:
        behaviour = ExploringPolicy(heuristic, options.epsilon, env.action_spaces_dict)
        behaviour.seed(seed)
        explore = partial(behaviour.compute_action, maze_state=None, env=None)
        episodes: list[list[tuple[int, SpacesRecord]]] = []
        while sum(map(len, episodes)) < options.decisions:
            episodes.append(episode(env, explore, seed * 10**6 + len(episodes)))
        log = LoggedSteps.of_episodes(episodes)
        gamma = float(changes.get("algorithm.gamma", 0.98))
        print(
            f"seed {seed}: log of {log.n_episodes} episodes, mean return {log.returns().mean():.2f}; observation and "
            f"action leave {unexplained_spread(episodes, gamma):.2f} of the rest of the return open (standard "
            f"deviation), in {sum(map(len, episodes))} decisions",
            flush=True,
        )
        for algorithm in options.algorithms:
            begin = time.process_time()
            overrides: dict[str, Any] = {
                "runner.dataset": log,
                "algorithm.rollout_evaluator": None,
                "algorithm.epoch_length": options.updates,
                "algorithm.gamma": 0.98,
                "seeding.agent_base_seed": seed,
                **changes,
            }
            with tempfile.TemporaryDirectory() as directory, RunContext(
                make, algorithm=algorithm, model="auto", run_dir=directory, silent=True, overrides=overrides
            ) as run:  # fmt: skip
                run.train(n_epochs=1)
                greedy = partial(run.compute_action, deterministic=True)
                learned = returns_of(env, greedy, options.episodes)
            difference = learned - base
            error = difference.std(ddof=1) / len(difference) ** 0.5
            spent = time.process_time() - begin
            result = f"{learned.mean():.2f}, difference {difference.mean():+.2f} ± {error:.2f}"
            print(f"{algorithm} {result}, {spent:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main()
