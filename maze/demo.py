"""The demonstration of `make demo`: train on CartPole-v1, roll the policy out, print the location of the results."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path


def maze_run(*arguments: str) -> None:
    """Run the command line in a process; its output goes to the terminal."""
    print(f"\n$ maze-run {' '.join(arguments)}\n", flush=True)
    subprocess.run([sys.executable, "-m", "maze.maze_cli", *arguments], check=True)


def main() -> None:
    """Train PPO with the shipped experiment, roll out the best policy, print further commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("outputs/demo"), help="directory of the results")
    directory: Path = parser.parse_args().directory.absolute()

    run = directory / time.strftime("%Y-%m-%d_%H-%M-%S")
    training, rollouts = run / "training", run / "rollouts"
    start = time.monotonic()
    maze_run("-cn", "conf_train", "+experiment=cartpole_ppo", f"hydra.run.dir={training}")
    print(f"\nTraining took {time.monotonic() - start:.0f} s. Now 50 episodes with the best policy:")
    maze_run(
        "env.name=CartPole-v1",
        "policy=torch_policy",
        f"input_dir={training}",
        "runner.n_processes=2",
        "runner.max_episode_steps=500",
        f"hydra.run.dir={rollouts}",
    )
    print(
        f"\nResults are in {training} (state_dict.pt: the best model) and {rollouts} (trajectories, event logs).\n"
        f"  {Path(sys.executable).parent}/tensorboard --logdir {run}\n"
        f"  {Path(sys.executable).parent}/maze-run --play {training}"
    )


if __name__ == "__main__":
    main()
