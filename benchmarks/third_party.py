"""Environments of other packages: one command each, with returns.

Every example is one `maze-run -cn conf_train`. What is printed was reached in the run's own evaluation, whose episodes
training never saw; the number of them is part of the command. Examples whose package is not installed are left out.

    pip install -c constraints.txt -e ".[thirdparty]"
    python benchmarks/third_party.py                # all of them, one after the other
    python benchmarks/third_party.py taxi minigrid  # some
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path


@dataclass(frozen=True)
class Example:
    """An environment, how it is trained, and what has to be reached.

    :param distribution: What is installed, as pip calls it.
    :param module: What is imported.
    :param overrides: What follows `maze-run -cn conf_train`.
    :param at_least: Mean return that has to be reached; `None`: any.
    """

    distribution: str
    module: str
    overrides: tuple[str, ...]
    at_least: float | None = None

    @property
    def command(self) -> str:
        """The whole command."""
        return " ".join(
            ["maze-run -cn conf_train", *(f"'{each}'" if set(each) & set("{[") else each for each in self.overrides)]
        )

    @property
    def is_installed(self) -> bool:
        """Whether the package is there."""
        return util.find_spec(self.module) is not None


_PPO = ("algorithm=ppo", "model=auto")
EXAMPLES = {
    "minigrid": Example(
        "minigrid",
        "minigrid",
        (
            "env.name=MiniGrid-Empty-5x5-v0",
            *_PPO,
            "algorithm.n_epochs=5",
            "algorithm.lr=0.001",
            "algorithm.gamma=0.99",
            "algorithm.gae_lambda=0.95",
            "algorithm.entropy_coef=0.01",
        ),
        at_least=0.9,
    ),
    "highway": Example(
        "highway-env",
        "highway_env",
        (
            "env.name=highway-v0",
            "env.kwargs={config: {simulation_frequency: 5, vehicles_count: 15, duration: 20}}",
            *_PPO,
            "algorithm.n_epochs=5",
            "algorithm.epoch_length=3",
            "algorithm.n_rollout_steps=20",
        ),
    ),
    "pong": Example(
        "ale-py",
        "ale_py",
        (
            "env.name=ale_py:ALE/Pong-v5",
            "env.kwargs={obs_type: grayscale}",
            *_PPO,
            "algorithm.n_epochs=2",
            "algorithm.epoch_length=3",
            "algorithm.n_rollout_steps=50",
            "algorithm.rollout_evaluator.n_episodes=2",
        ),
    ),
    "half_cheetah": Example(
        "mujoco",
        "mujoco",
        (
            "env.name=HalfCheetah-v5",
            *_PPO,
            "algorithm.n_epochs=5",
            "algorithm.gamma=0.99",
            "algorithm.gae_lambda=0.95",
        ),
        at_least=200.0,
    ),
    "frozen_lake": Example(
        "gymnasium",
        "gymnasium",
        ("env.name=FrozenLake-v1", "env.kwargs={is_slippery: false}", *_PPO, "algorithm.n_epochs=3"),
        at_least=1.0,
    ),
    "taxi": Example(
        "gymnasium",
        "gymnasium",
        (
            "env.name=Taxi-v3",
            *_PPO,
            "algorithm.n_epochs=16",
            "algorithm.lr=0.001",
            "algorithm.lr_schedule=linear",
            "algorithm.gae_lambda=0.95",
            "algorithm.entropy_coef=0.05",
            "algorithm.rollout_evaluator.n_episodes=100",
        ),
        at_least=7.0,
    ),
    "blackjack": Example(
        "gymnasium",
        "gymnasium",
        ("env.name=Blackjack-v1", *_PPO, "algorithm.n_epochs=5", "algorithm.rollout_evaluator.n_episodes=1000"),
        at_least=-0.1,
    ),
    "job_shop": Example(
        "JSSEnv",
        "JSSEnv",
        (
            "env.name=jss-v1",
            *_PPO,
            "algorithm.n_epochs=2",
            "algorithm.epoch_length=3",
            "algorithm.n_rollout_steps=50",
            "algorithm.rollout_evaluator.n_episodes=1",
        ),
    ),
    "mixture": Example(
        "gymnasium",
        "mixture_env",
        (
            "env.name=mixture_env:Mixture-v0",
            "env.encode={order: 5, things: 3}",
            *_PPO,
            "algorithm.n_epochs=8",
            "algorithm.epoch_length=10",
            "algorithm.lr=0.003",
            "algorithm.gae_lambda=0",
        ),
        at_least=8.0,
    ),
}


def train(example: Example, directory: Path, further: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """One training in a process of its own.

    :param example: What is trained.
    :param directory: Directory of the run.
    :param further: Overrides beyond those of the example.
    :return: The finished process, with what it printed.
    """
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [
            *(sys.executable, "-m", "maze.maze_cli", "-cn", "conf_train", *example.overrides, *further),
            f"hydra.run.dir={directory}",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )


def row(name: str, example: Example, directory: Path) -> tuple[str, bool]:
    """A line of the table, and whether the goal was reached."""
    start = time.monotonic()
    finished = train(example, directory)
    seconds = time.monotonic() - start
    version = f"{example.distribution} {metadata.version(example.distribution)}"
    if finished.returncode:
        print(finished.stdout[-1000:], finished.stderr[-3000:], file=sys.stderr)
        return f"| {name} | {version} | `{example.command}` | failed with status {finished.returncode} | | |", False
    run = json.loads((directory / "run.json").read_text())
    reached = run["best_score"]
    goal = "" if example.at_least is None else f" (goal: {example.at_least:g})"
    line = (
        f"| {name} | {version} | `{example.command}` | {reached:.3f}{goal} | {run['n_env_steps']:,} | {seconds:.0f} s |"
    )
    return line, example.at_least is None or reached >= example.at_least


def main() -> int:
    """Train the named examples; exit status 1 where one fails or misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", metavar="example", help=f"of {', '.join(EXAMPLES)}; default: all")
    arguments = parser.parse_args()
    if unknown := set(arguments.examples) - set(EXAMPLES):
        parser.error(f"unknown example {', '.join(sorted(unknown))}; there are {', '.join(EXAMPLES)}")
    sys.path.insert(0, str(Path(__file__).parent))
    print("| example | package | command | mean return | steps | time |\n| --- | --- | --- | --- | --- | --- |")
    are_reached = []
    for name in arguments.examples or EXAMPLES:
        if not EXAMPLES[name].is_installed:
            print(f"{name}: {EXAMPLES[name].distribution} is not installed", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix=f"{name}_") as directory:
            line, is_reached = row(name, EXAMPLES[name], Path(directory) / "run")
        are_reached.append(is_reached)
        print(line, flush=True)
    return 0 if all(are_reached) else 1


if __name__ == "__main__":
    sys.exit(main())
