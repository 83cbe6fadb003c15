"""Speed of batched simulators and of training with them.

Vectorised simulations (lost sales, the criss-cross network) beside one environment after the other, stepping and
learning with 64 of them and with the settings of their experiments; gymnasium's CartPole in NumPy with 256 members, raw
and as Maze's vector environment with statistics on, and PPO on it (256 x 32 steps, minibatches of 2,048, 4 epochs)
beside stable-baselines3 with 8 environments (128 steps, minibatches of 256, 4 epochs; the same networks). CPU time, the
two sides by turns; medians.

python benchmarks/batched_env.py              # all
python benchmarks/batched_env.py cartpole     # or: simulations
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from training_speed import WORK, stable_baselines3

from maze.api.run_context import RunContext
from maze.core.env.space_values import zeros
from maze.core.utils.config_utils import EnvFactory
from maze.train.parallelization.placement import Batched, InProcess
from maze_envs.inventory.lost_sales import LostSalesEnv
from maze_envs.queueing.network import QueueingEnv

N_ENVS = 64
N_CARTPOLES = 256
SHIPPED = {"lost_sales_ppo": 256 * 128, "criss_cross_ppo": 512 * 256}
"""Experiments, and how many steps an update of theirs has."""


def stepping(env_class: Callable[[], Any], placement: Any, n_ticks: int) -> float:
    """CPU microseconds of a step of one environment, statistics on."""
    env = placement.vector_env(env_class, N_ENVS, "train")
    env.seed(list(range(N_ENVS)))
    env.reset()
    rng = np.random.default_rng(0)
    heads = env.action_spaces_dict[0]
    actions = [{name: rng.integers(0, space.n, N_ENVS) for name, space in heads.items()} for _ in range(20)]
    begun = time.process_time()
    for tick in range(n_ticks):
        env.step(actions[tick % 20])
    return (time.process_time() - begun) / n_ticks / N_ENVS * 1e6


def training(env: Any, n_envs: int, n_updates: int, model: str | None = None, **overrides: Any) -> float:
    """CPU microseconds of a step in a run with PPO and 32 steps for an update."""
    overrides = {
        "runner.concurrency": n_envs,
        "algorithm.epoch_length": n_updates,
        "algorithm.n_rollout_steps": 32,
        "algorithm.n_optimization_epochs": 4,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    return trained(n_updates * 32 * n_envs, env=env, algorithm="ppo", model=model, overrides=overrides)


def simulation_training(env_class: Callable[[], Any], placement: str, n_updates: int) -> float:
    """Its updates and one evaluation included."""
    return training(
        env_class,
        N_ENVS,
        n_updates,
        runner__placement=placement,
        runner__eval_concurrency=8,
        algorithm__batch_size=512,
        algorithm__rollout_evaluator__n_episodes=8,
    )


def shipped_training(experiment: str, steps_of_update: int, placement: str, n_updates: int) -> float:
    """The updates of a shipped experiment with its settings; its evaluations are left out."""
    overrides = {
        "runner.placement": placement,
        "runner.eval_concurrency": 1,
        "algorithm.epoch_length": n_updates,
        "algorithm.rollout_evaluator.n_episodes": 1,
    }
    return trained(n_updates * steps_of_update, experiment=experiment, overrides=overrides)


def trained(n_steps: int, **context: Any) -> float:
    """CPU microseconds of a step in an epoch of so many, without what happens once."""
    with tempfile.TemporaryDirectory() as directory, RunContext(run_dir=directory, silent=True, **context) as rc:
        rc.train(n_epochs=1)
        begun = time.process_time()
        rc.train(n_epochs=1)
        return (time.process_time() - begun) / n_steps * 1e6


def simulations(n_rounds: int) -> dict[str, float]:
    """Vectorised simulations."""
    ratios = {}
    print("CPU microseconds for each step of an environment: one by one, at once, and how many times as fast (medians)")
    for name, env_class in (("lost sales", LostSalesEnv), ("criss-cross", QueueingEnv)):
        rows: dict[str, list[tuple[float, float]]] = {"stepping": [], "PPO training": []}
        for _ in range(n_rounds):
            rows["stepping"].append((stepping(env_class, InProcess(), 60), stepping(env_class, Batched(), 600)))
            rows["PPO training"].append(
                (simulation_training(env_class, "in_process", 4), simulation_training(env_class, "batched", 10))
            )
        for what, pairs in rows.items():
            ratios[f"{name}, {what}"] = show(f"{name:12} {what:13}", pairs)
    for experiment, n_steps in SHIPPED.items():
        # ten take less time at once than two one by one, so that what an epoch costs by itself weighs more there
        sides = (("in_process", 2), ("batched", 10))
        pairs = [
            tuple(shipped_training(experiment, n_steps, placement, n_updates) for placement, n_updates in sides)
            for _ in range(n_rounds)
        ]
        ratios[experiment] = show(experiment, pairs)
    return ratios


def raw_cartpoles() -> tuple[Callable[[np.ndarray], np.ndarray], np.ndarray, Callable[[], Any]]:
    """gymnasium's CartPoles: what steps them and gives what is seen, what is seen first, what follows at the end."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=N_CARTPOLES, vectorization_mode="vector_entry_point")
    return lambda actions: env.step(actions)[0], env.reset(seed=0)[0], lambda: None


def maze_cartpoles() -> tuple[Callable[[np.ndarray], np.ndarray], np.ndarray, Callable[[], Any]]:
    """The same as Maze's vector environment; with the statistics of the epoch."""
    env = Batched().vector_env(EnvFactory("CartPole-v1"), N_CARTPOLES, "train")
    env.seed(list(range(N_CARTPOLES)))
    out = zeros(env.observation_spaces_dict, (N_CARTPOLES,), "observation")
    env.reset(out)
    return (
        lambda actions: env.step({"action": actions}, out)[0][0]["observation"],
        out[0]["observation"],
        env.write_epoch_stats,
    )


def random_actions(n_ticks: int) -> np.ndarray:
    """Episodes of some 20 steps, `[n_ticks, n_envs]`."""
    return np.random.default_rng(0).integers(0, 2, (n_ticks, N_CARTPOLES))


def balancing_actions(n_ticks: int, make: Callable[[], Any]) -> np.ndarray:
    """Those that keep the poles up: episodes of 500 steps."""
    step, seen, _ = make()
    actions = np.zeros((n_ticks, N_CARTPOLES), np.int64)
    for of_tick in actions:
        of_tick[:] = seen @ np.array([0.1, 0.5, 1.0, 1.0], np.float32) > 0
        seen = step(of_tick)
    return actions


def cartpole_stepping(make: Callable[[], Any], actions: np.ndarray) -> float:
    """CPU microseconds of a step of one CartPole, with actions that were chosen before."""
    step, _, end = make()
    begun = time.process_time()
    for of_tick in actions:
        step(of_tick)
    end()
    return (time.process_time() - begun) / actions.size * 1e6


def cartpole_training(n_updates: int) -> float:
    """As stable-baselines3 is trained here, but for the numbers of environments and of steps in a minibatch."""
    return training(
        "CartPole-v1",
        N_CARTPOLES,
        n_updates,
        model="auto",  # two layers of 64 units, tanh
        runner__placement="batched",
        algorithm__batch_size=2048,
        algorithm__lr=3e-4,
        algorithm__gamma=0.99,
        algorithm__gae_lambda=0.95,
        algorithm__entropy_coef=0.0,
        algorithm__max_grad_norm=0.5,
        algorithm__rollout_evaluator__n_episodes=8,
    )


def cartpoles(n_rounds: int) -> dict[str, float]:
    """gymnasium's CartPole in NumPy."""
    work = WORK["ppo"]
    beside = stable_baselines3(work)

    def beside_training(n_updates: int) -> float:
        begun = time.process_time()
        beside(n_updates)
        return (time.process_time() - begun) / (n_updates * work.env_steps) * 1e6

    rows: dict[str, list[tuple[float, float]]] = {"at random": [], "balanced": [], "PPO training": []}
    sides, n_ticks = (raw_cartpoles, maze_cartpoles), 2000
    chosen = {
        "at random": [random_actions(n_ticks) for _ in sides],
        "balanced": [balancing_actions(n_ticks, make) for make in sides],
    }
    for _ in range(n_rounds):
        for what, actions in chosen.items():
            raw, maze = (cartpole_stepping(make, of_side) for make, of_side in zip(sides, actions, strict=True))
            rows[what].append((raw, maze))
        rows["PPO training"].append((beside_training(5), cartpole_training(20)))
    print("CPU microseconds for each step: gymnasium alone or stable-baselines3, Maze, and how many times as fast")
    return {f"CartPole, {what}": show(f"CartPole {what:13}", pairs) for what, pairs in rows.items()}


def show(what: str, pairs: Iterable[tuple[float, ...]]) -> float:
    """Medians, and that of the ratios, which is returned."""
    one, many = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratio = statistics.median(first / second for first, second in pairs)
    print(f"  {what} {one:8.2f} {many:8.2f} {ratio:8.2f}", flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["simulations", "cartpole"], default=["simulations", "cartpole"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the ratios")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = {"simulations": simulations, "cartpole": cartpoles}
    results: dict[str, float] = {}
    for what, measure in parts.items():
        if what in arguments.what:
            results |= measure(arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
