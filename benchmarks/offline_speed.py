"""Offline training beside d3rlpy: the same data, networks and batches; updates per CPU second and returns.

    python -m benchmarks.offline_speed --d3rlpy <interpreter of an environment with d3rlpy> --seeds 0 1 2 3 4

d3rlpy 2.8 pins gymnasium 1.0 and needs an environment of its own. CartPole is logged from random actions (CQL),
Pendulum from a noisy heuristic (IQL). Both libraries use two layers of 256 units with ReLU, batches of 256 decisions
and one thread; CQL copies its target networks every 100 updates (d3rlpy's default are 8,000). CPU seconds are those of
the second half of the updates. Returns are means over 20 greedy episodes. For IQL, `bare torch` is an update without a
framework and without autograd (`benchmarks/bare_iql.py`): what eager torch can reach with these networks.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

UNITS, BATCH, TARGET_INTERVAL = [256, 256], 256, 100
PROBLEMS = {"cql": "CartPole-v1", "iql": "Pendulum-v1"}


def logged(name: str, n_decisions: int) -> dict[str, np.ndarray[Any, Any]]:
    """Columns of decisions with their episodes; Pendulum's torques are in [-2, 2]."""
    env, rng = gymnasium.make(name), np.random.default_rng(0)
    columns: dict[str, list[Any]] = {key: [] for key in ("episode", "observation", "action", "reward", "done", "cut")}
    episode, seen = 0, env.reset(seed=0)[0]
    while len(columns["reward"]) < n_decisions:
        if name == "CartPole-v1":
            action: Any = int(rng.integers(2))
        else:
            cosine, sine, speed = seen
            swing = 2.0 * np.sign(speed) if cosine < 0.8 else -10.0 * sine - 2.0 * speed
            action = np.clip([swing + rng.normal(0.0, 1.0)], -2.0, 2.0).astype(np.float32)
        following, reward, terminated, truncated, _ = env.step(action)
        for key, value in zip(columns, (episode, seen, action, reward, terminated, truncated), strict=True):
            columns[key].append(value)
        seen = following
        if terminated or truncated:
            episode, seen = episode + 1, env.reset()[0]
    columns["cut"][-1] = not columns["done"][-1]
    return {key: np.array(values) for key, values in columns.items()}


def greedy_return(name: str, act: Any) -> float:
    """Mean return of 20 episodes."""
    env, returns = gymnasium.make(name), []
    for seed in range(20):
        seen, total, is_over = env.reset(seed=1000 + seed)[0], 0.0, False
        while not is_over:
            seen, reward, terminated, truncated, _ = env.step(act(seen))
            total, is_over = total + float(reward), terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


def by_maze(algorithm: str, data: dict[str, Any], n_updates: int, seed: int) -> tuple[float, float]:
    """Updates per CPU second, and the return."""
    import pandas as pd

    from maze.api.run_context import RunContext

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log.parquet"
        steps = np.concatenate([np.arange(n) for n in np.unique(data["episode"], return_counts=True)[1]])
        table = {"episode_id": data["episode"], "step": steps, "reward": data["reward"], "truncated": data["cut"]}
        values = {"observation.observation": data["observation"], "action.action": data["action"]}
        values = {key: list(array) if array.ndim > 1 else array for key, array in values.items()}
        pd.DataFrame({**table, "done": data["done"] | data["cut"], **values}).to_parquet(path)
        dataset = {
            "_target_": "maze.core.trajectory_recording.datasets.in_memory_dataset.InMemoryDataset",
            "input_data": str(path),
        }
        overrides: dict[str, Any] = {
            "env.name": PROBLEMS[algorithm],
            "runner.dataset": dataset,
            "algorithm.rollout_evaluator": None,
            "algorithm.epoch_length": n_updates // 2,
            "model.policy.networks.0.hidden_units": UNITS,
            "model.policy.networks.0.non_lin": "torch.nn.ReLU",
            "seeding.agent_base_seed": seed,
        }
        if algorithm == "cql":
            overrides |= {"algorithm.tau": 1.0, "algorithm.target_update_interval": TARGET_INTERVAL}
        with RunContext(
            "gym_env", algorithm=algorithm, model="flatten_concat", run_dir=directory, silent=True, overrides=overrides
        ) as run:
            run.train(n_epochs=1)  # builds everything
            begin = time.process_time()
            run.train(n_epochs=1)
            rate = n_updates // 2 / (time.process_time() - begin)

            def act(seen: Any) -> Any:
                return run.compute_action({"observation": seen.astype(np.float32)}, deterministic=True)["action"]

            return rate, greedy_return(PROBLEMS[algorithm], act)


def by_d3rlpy(algorithm: str, data: Any, n_updates: int, seed: int) -> tuple[float, float]:
    """Updates per CPU second, and the return; runs in the other environment."""
    import d3rlpy  # type: ignore[import-not-found]

    d3rlpy.seed(seed)
    actions = data["action"].reshape(len(data["action"]), -1)
    space = d3rlpy.constants.ActionSpace
    dataset = d3rlpy.dataset.MDPDataset(
        observations=data["observation"].astype(np.float32),
        actions=actions,
        rewards=data["reward"].astype(np.float32),
        terminals=data["done"].astype(np.float32),
        timeouts=data["cut"].astype(np.float32),
        action_space=space.DISCRETE if algorithm == "cql" else space.CONTINUOUS,
    )
    encoder = d3rlpy.models.VectorEncoderFactory(UNITS)
    common: dict[str, Any] = {"batch_size": BATCH, "gamma": 0.99}
    if algorithm == "cql":
        common |= {"learning_rate": 3e-4, "encoder_factory": encoder, "target_update_interval": TARGET_INTERVAL}
        config = d3rlpy.algos.DiscreteCQLConfig(alpha=1.0, **common)
    else:
        factories = dict.fromkeys(("actor", "critic", "value"), encoder)
        config = d3rlpy.algos.IQLConfig(
            action_scaler=d3rlpy.preprocessing.MinMaxActionScaler(minimum=[-2.0], maximum=[2.0]),
            **{f"{name}_encoder_factory": factory for name, factory in factories.items()},
            **common,
        )
    algo = config.create(device="cpu:0")
    fit: dict[str, Any] = {"show_progress": False, "logger_adapter": d3rlpy.logging.NoopAdapterFactory()}
    half = n_updates // 2
    algo.fit(dataset, n_steps=half, n_steps_per_epoch=half, **fit)
    begin = time.process_time()
    algo.fit(dataset, n_steps=half, n_steps_per_epoch=half, **fit)
    rate = half / (time.process_time() - begin)
    return rate, greedy_return(PROBLEMS[algorithm], lambda seen: algo.predict(seen[None].astype(np.float32))[0])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d3rlpy", help="interpreter of the environment with d3rlpy")
    parser.add_argument("--algorithms", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--decisions", type=int, default=100_000)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    if options.child:
        (algorithm,), (seed,) = options.algorithms, options.seeds
        print("result", *by_d3rlpy(algorithm, np.load(options.child), options.updates, seed))
        return
    from benchmarks.bare_iql import updates_per_cpu_second

    print(f"{'algorithm':10} {'seed':>4} {'library':10} {'updates/CPU s':>14} {'return':>8}")
    for algorithm in options.algorithms:
        data = logged(PROBLEMS[algorithm], options.decisions)
        for seed in options.seeds:
            results = {"maze": by_maze(algorithm, data, options.updates, seed)}
            if algorithm == "iql":
                rate = updates_per_cpu_second(options.updates // 2, UNITS[0], BATCH)
                results["bare torch"] = (rate, float("nan"))
            if options.d3rlpy:
                results["d3rlpy"] = _in_child(options, algorithm, data, seed)
            for library, (rate, value) in results.items():
                print(f"{algorithm:10} {seed:4} {library:10} {rate:14.1f} {value:8.1f}", flush=True)


def _in_child(options: argparse.Namespace, algorithm: str, data: dict[str, Any], seed: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log.npz"
        np.savez(path, **data)
        command = [options.d3rlpy, __file__, "--child", str(path), "--algorithms", algorithm, "--seeds", str(seed)]
        done = subprocess.run(
            [*command, "--updates", str(options.updates)], stdout=subprocess.PIPE, text=True, check=True
        )
        rate, value = done.stdout.split("result ")[-1].split()
        return float(rate), float(value)


if __name__ == "__main__":
    main()
