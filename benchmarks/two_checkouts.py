"""Compare runs and rollouts of this checkout with those of another one, such as an earlier commit.

    git worktree add ../before <commit>
    python benchmarks/two_checkouts.py ../before                   # all
    python benchmarks/two_checkouts.py ../before ppo sac --rounds 11

Both run the same commands with the same installed packages, alternately. What counts is CPU time (user and system, of
the command and of the processes that it starts and waits for). Each command runs shortly and long; the difference is
the work without start-up and end. Printed is the median over rounds of the other one's time by ours: above 1, this
checkout is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

HERE = Path(__file__).resolve().parents[1]
CARTPOLE = ("env.name=CartPole-v1", "model=flatten_concat", "seeding.env_base_seed=1", "seeding.agent_base_seed=1")
TRAIN = ("-cn", "conf_train", *CARTPOLE)
ACTOR_CRITIC = (
    *TRAIN,
    "critic=flatten_concat_shared",
    "algorithm.n_epochs=1",
    "algorithm.rollout_evaluator.n_episodes=1",
)
CANDIDATES = (
    *("-cn", "conf_train", "algorithm.n_epochs=1", "algorithm.rollout_evaluator.n_episodes=1", "runner.concurrency=64"),
    *("seeding.env_base_seed=1", "seeding.agent_base_seed=1"),
)
ROLLOUT = (
    *("policy=random_policy", "runner=sequential", "runner.record_trajectory=false", "runner.record_event_logs=false"),
    *("seeding.env_base_seed=1", "seeding.agent_base_seed=1"),
)


class Work(NamedTuple):
    """A command, and what makes it short and long."""

    arguments: tuple[str, ...]
    key: str
    short: int
    long: int


WORK = {
    "ppo": Work((*ACTOR_CRITIC, "algorithm=ppo"), "algorithm.epoch_length", 2, 40),
    "a2c": Work((*ACTOR_CRITIC, "algorithm=a2c"), "algorithm.epoch_length", 4, 160),
    "impala": Work((*ACTOR_CRITIC, "algorithm=impala"), "algorithm.epoch_length", 4, 400),
    "sac": Work(
        (
            *("-cn", "conf_train", "env.name=Pendulum-v1", "model=flatten_concat", "algorithm=sac"),
            *("critic=flatten_concat_state_action", "algorithm.n_epochs=1", "algorithm.rollout_evaluator.n_episodes=1"),
            *("seeding.env_base_seed=1", "seeding.agent_base_seed=1"),
        ),
        "algorithm.epoch_length",
        4,
        400,
    ),
    # PPO that chooses among candidates, as shipped
    "bin-packing": Work((*CANDIDATES, "+experiment=bin_packing_ppo"), "algorithm.epoch_length", 1, 7),
    "job-shop": Work((*CANDIDATES, "+experiment=job_shop_ppo"), "algorithm.epoch_length", 1, 7),
    "es": Work((*TRAIN, "algorithm=es", "critic=null"), "algorithm.n_epochs", 1, 60),
    "steps": Work((*ROLLOUT, "env.name=CartPole-v1"), "runner.n_episodes", 20, 10_000),
    "sub-steps": Work((*ROLLOUT, "env=cutting_2d"), "runner.n_episodes", 2, 400),
}


def cpu_seconds(checkout: Path, work: Work, amount: int) -> float:
    """CPU time of one command.

    :raises SystemExit: It failed.
    """
    with tempfile.TemporaryDirectory(prefix="two_checkouts_") as directory:
        command = [sys.executable, "-m", "maze.maze_cli", *work.arguments, f"{work.key}={amount}"]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        log = Path(directory) / "log"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [*command, f"hydra.run.dir={directory}/run"], stdout=file, stderr=file, cwd=directory, env=environment
            )
            _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{checkout}: {' '.join(command)} failed:\n{log.read_text(errors='replace')[-3000:]}")
    return used.ru_utime + used.ru_stime


def measured(checkout: Path, work: Work) -> float:
    """CPU seconds of the work alone."""
    return cpu_seconds(checkout, work, work.long) - cpu_seconds(checkout, work, work.short)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="directory of the other checkout")
    parser.add_argument("names", nargs="*", help=f"what is run: {', '.join(WORK)}; all by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the ratios here")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(WORK)):
        parser.error(f"expected {', '.join(WORK)}; found {', '.join(unknown)}")
    other, results = options.other.resolve(), {}
    for name in options.names or WORK:
        pairs = []
        for index in range(options.rounds):
            order = (HERE, other) if index % 2 == 0 else (other, HERE)
            seconds = {checkout: measured(checkout, WORK[name]) for checkout in order}
            pairs.append((seconds[HERE], seconds[other]))
        ratios = sorted(theirs / ours for ours, theirs in pairs)
        results[name] = {"ours": median(a for a, _ in pairs), "other": median(b for _, b in pairs), "ratios": ratios}
        print(
            f"{name:8} {results[name]['ours']:6.2f} s, the other {results[name]['other']:6.2f} s CPU: "
            f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
