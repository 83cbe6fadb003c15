"""PPO on batched CartPoles: Maze and rejax, which compiles the environment (gymnax) and the learner with JAX.

Both train 256 CartPoles in batches of 32 steps, with 4 minibatches (2,048 steps), 4 epochs and separate networks of two
layers with 64 tanh units. The table shows the CPU microseconds of a step of an environment, on one core, without
compilation and evaluation, and the mean return of 100 episodes with sampled actions after training. The libraries take
turns. Maze writes two checkpoints in the measured half of a run, 4 % of the time with 40 updates and 2 % with 120.

Resets of gymnasium's vector environment are ticks without a step, so that a rollout of Maze takes 33 ticks.

rejax needs an environment of its own:

    python -m venv /tmp/rejax && /tmp/rejax/bin/pip install rejax==0.1.3
    python benchmarks/rejax_speed.py --rejax /tmp/rejax/bin/python
    python benchmarks/rejax_speed.py --rejax /tmp/rejax/bin/python --seeds 1 --updates 20    # quick
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

N_ENVS, N_STEPS, BATCH_SIZE, N_EPOCHS = 256, 32, 2048, 4
N_EPISODES = 100


def by_maze(n_updates: int, seed: int) -> tuple[float, float]:
    """Return CPU microseconds of a step in the second half of a run, and the return after it."""
    import gymnasium
    import numpy as np
    import torch

    from maze.api.run_context import RunContext

    torch.set_num_threads(1)
    overrides = {
        "runner.concurrency": N_ENVS,
        "runner.placement": "batched",
        "algorithm.epoch_length": n_updates // 2,
        "algorithm.n_rollout_steps": N_STEPS,
        "algorithm.batch_size": BATCH_SIZE + BATCH_SIZE // N_STEPS,  # 4 minibatches also with the tick of resets
        "algorithm.n_optimization_epochs": N_EPOCHS,
        "algorithm.lr": 3e-4,
        "algorithm.gamma": 0.99,
        "algorithm.gae_lambda": 0.95,
        "algorithm.entropy_coef": 0.0,
        "algorithm.max_grad_norm": 0.5,
        "algorithm.rollout_evaluator": None,
        "seeding.env_base_seed": seed,
        "seeding.agent_base_seed": seed,
    }
    context: dict[str, Any] = {"env": "CartPole-v1", "algorithm": "ppo", "model": "auto", "overrides": overrides}
    with tempfile.TemporaryDirectory() as directory, RunContext(run_dir=directory, silent=True, **context) as run:
        run.train(n_epochs=1)
        begin = time.process_time()
        run.train(n_epochs=1)
        seconds = time.process_time() - begin
        env, returns = gymnasium.make("CartPole-v1"), []
        for episode in range(N_EPISODES):
            observation, total, is_over = env.reset(seed=1000 + episode)[0], 0.0, False
            while not is_over:
                action = run.compute_action({"observation": observation}, deterministic=False)["action"]
                observation, reward, terminated, truncated, _ = env.step(action)
                total, is_over = total + float(reward), terminated or truncated
            returns.append(total)
    return seconds / (n_updates // 2 * N_STEPS * N_ENVS) * 1e6, float(np.mean(returns))


def serve_rejax(n_updates: int) -> None:
    """Train with each seed that is read from the standard input, and print microseconds and return."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    os.environ["JAX_PLATFORMS"] = "cpu"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import jax  # type: ignore[import-not-found]
    import rejax  # type: ignore[import-not-found]
    from rejax.evaluate import evaluate  # type: ignore[import-not-found]

    n_steps = n_updates * N_STEPS * N_ENVS
    algorithm = rejax.PPO.create(
        env="CartPole-v1",
        num_envs=N_ENVS,
        num_steps=N_STEPS,
        num_epochs=N_EPOCHS,
        num_minibatches=N_ENVS * N_STEPS // BATCH_SIZE,
        total_timesteps=n_steps,
        eval_freq=n_steps,
        skip_initial_evaluation=True,
        learning_rate=3e-4,
        gamma=0.99,
        gae_lambda=0.95,
        ent_coef=0.0,
        max_grad_norm=0.5,
        agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
    ).replace(eval_callback=lambda *_: jax.numpy.zeros(()))
    train = jax.jit(algorithm.train)
    jax.block_until_ready(train(jax.random.PRNGKey(0)))
    while seed := input():
        begin = time.process_time()
        state, _ = jax.block_until_ready(train(jax.random.PRNGKey(int(seed))))
        seconds = time.process_time() - begin
        key = jax.random.PRNGKey(1000 + int(seed))
        _, returns = evaluate(algorithm.make_act(state), key, algorithm.env, algorithm.env_params, N_EPISODES, 500)
        print("result", seconds / n_steps * 1e6, float(returns.mean()), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rejax", help="interpreter of the environment with rejax")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--json", type=Path, help="write figures here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve_rejax(options.updates)
        return
    if options.rejax is None:
        parser.error("--rejax: expected the interpreter of an environment with rejax; see --help.")
    command = [options.rejax, __file__, "--child", "--updates", str(options.updates)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        rows = []
        print(f"{'seed':>4} {'us: rejax':>10} {'Maze':>7} {'ratio':>6} {'return: rejax':>14} {'Maze':>7}")
        for seed in range(options.seeds):
            print(seed, file=child.stdin, flush=True)
            line = next(line for line in child.stdout if line.startswith("result "))
            theirs, their_return = map(float, line.split()[1:])
            ours, our_return = by_maze(options.updates, seed)
            rows.append({"rejax": theirs, "maze": ours, "rejax_return": their_return, "maze_return": our_return})
            figures = f"{theirs:10.2f} {ours:7.2f} {ours / theirs:6.2f} {their_return:14.1f} {our_return:7.1f}"
            print(f"{seed:4} {figures}", flush=True)
        print("", file=child.stdin, flush=True)
    print(f"median of the ratios: {statistics.median(row['maze'] / row['rejax'] for row in rows):.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
