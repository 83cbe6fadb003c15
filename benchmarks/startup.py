"""How long it takes until something happens: imports, and `maze-run` to its first environment step.

Each figure is the best of several fresh processes: a start is either undisturbed or slowed down by something else.

    python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

IMPORT = """
import sys, time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start, "torch" in sys.modules)
"""

FIRST_STEP = """
import sys, time
start = time.perf_counter()
from maze.core.env.maze_env import MazeEnv
original = MazeEnv.step
def step(self, action):
    print("first step after", time.perf_counter() - start, file=sys.stderr, flush=True)
    import os
    os._exit(0)
MazeEnv.step = step
from maze.maze_cli import main
sys.exit(main({arguments}))
"""


def seconds_to_import(module: str) -> tuple[float, bool]:
    """Seconds, and whether torch came along."""
    finished = subprocess.run(
        [sys.executable, "-c", IMPORT.format(module=module)], capture_output=True, text=True, check=True
    )
    seconds, has_torch = finished.stdout.split()
    return float(seconds), has_torch == "True"


def seconds_to_first_step(arguments: Sequence[str]) -> float:
    """Seconds from the start of the interpreter's own work to the first step of an environment."""
    with tempfile.TemporaryDirectory() as directory:
        finished = subprocess.run(
            [sys.executable, "-c", FIRST_STEP.format(arguments=[*arguments, f"hydra.run.dir={directory}/run"])],
            capture_output=True,
            text=True,
            check=False,
        )
    lines = [line for line in finished.stderr.splitlines() if line.startswith("first step after")]
    if not lines:
        raise SystemExit(f"maze-run {' '.join(arguments)} took no step:\n{finished.stderr[-2000:]}")
    return float(lines[0].rsplit(maxsplit=1)[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures into this file")
    options = parser.parse_args()

    figures: dict[str, float] = {}
    for module in ("gymnasium", "maze.core.env", "maze.core.env.maze_env", "maze.core.wrappers.log_stats_wrapper"):
        results = [seconds_to_import(module) for _ in range(options.repeats)]
        figures[f"import {module}"] = min(seconds for seconds, _ in results)
        assert not any(has_torch for _, has_torch in results), f"{module} imports torch"
    rollout = ("env.name=CartPole-v1", "runner=sequential", "runner.n_episodes=1")
    training = ("-cn", "conf_train", "env.name=CartPole-v1", "algorithm=ppo", "runner=dev")
    figures["maze-run, rollout, to the first step"] = min(seconds_to_first_step(rollout) for _ in range(3))
    figures["maze-run, PPO, to the first step"] = min(seconds_to_first_step(training) for _ in range(3))
    for name, seconds in figures.items():
        print(f"{name:<45} {seconds:6.2f} s")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
