"""Start-up times: imports, help, `RunContext`, first environment step, first line.

Each figure is the median of several fresh processes, which take turns where they are compared. `--trainers` looks at
the first line of every trainer where a step of the environment takes a second.

    python benchmarks/startup.py
    python benchmarks/startup.py --trainers
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
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


HELP = "from maze.maze_cli import main; main(['--help'])"
RUN_CONTEXT = """
from maze.api.run_context import RunContext
RunContext(env="CartPole-v1", algorithm="ppo", silent=True)
"""
PEER = "import stable_baselines3"

SLOW_ENVIRONMENT = """
import sys, time
import gymnasium
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv

class Slow(gymnasium.Wrapper):
    def step(self, action):
        print("a step begins", flush=True)
        time.sleep(1.0)
        return self.env.step(action)

def make(name):
    return GymMazeEnv(Slow(gymnasium.make(name)))
"""
TRAININGS = {
    "ppo": ("CartPole-v1", ()),
    "a2c": ("CartPole-v1", ()),
    "impala": ("CartPole-v1", ()),
    "dqn": ("CartPole-v1", ()),
    "es": ("CartPole-v1", ()),
    "bc": ("CartPole-v1", ("runner.dataset.dir_or_file={recorded}/trajectory_data",)),
    "sac": ("Pendulum-v1", ()),
    "sacfd": ("Pendulum-v1", ("runner.initial_demonstration_trajectories.input_data={recorded}/trajectory_data",)),
}
WITH_BYTECODE = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Environment of processes that find modules compiled, as they do from the second start on."""
SAYS_WHAT_IT_DOES = re.compile(r"-> .*(collecting|evaluating|epoch 1)")


def seconds_of(code: str) -> float:
    """Seconds that a fresh interpreter takes for it, its own start included."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True, env=WITH_BYTECODE)
    return time.perf_counter() - start


def seconds_to_first_line(algorithm: str) -> float:
    """Seconds from the first environment step of a training to a line that says what it does; 0: it was there before.

    :param algorithm: Its name.
    """
    name, more = TRAININGS[algorithm]
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "slow_environment.py").write_text(SLOW_ENVIRONMENT, encoding="utf-8")
        command = [sys.executable, "-m", "maze.maze_cli"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([directory, *sys.path[1:]])}
        recorded = f"{directory}/recorded"
        if more:
            arguments = (f"env.name={name}", "runner=sequential", "runner.n_episodes=2", f"hydra.run.dir={recorded}")
            subprocess.run([*command, *arguments], check=True, capture_output=True, env=environment)
        run = [f"hydra.run.dir={directory}/run", f"algorithm={algorithm}", "runner=dev"]
        run += ["env._target_=slow_environment.make", f"env.name={name}"]
        run += [argument.format(recorded=recorded) for argument in more]
        training = subprocess.Popen(
            [*command, "-cn", "conf_train", *run], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment,
        )  # fmt: skip
        assert training.stdout is not None
        says, steps, output = None, None, []
        try:
            for line in training.stdout:
                output.append(line)
                if steps is None and line == "a step begins\n":
                    steps = time.perf_counter()
                if says is None and SAYS_WHAT_IT_DOES.match(line):
                    says = time.perf_counter()
                if says is not None and steps is not None:
                    return max(0.0, says - steps)
        finally:
            training.kill()
            training.wait()
    raise SystemExit(f"algorithm={algorithm} said nothing:\n{''.join(output)[-2000:]}")


def figures_of_starts(repeats: int) -> dict[str, float]:
    """Medians by what was done."""
    figures: dict[str, float] = {}
    for module in ("gymnasium", "maze.core.env", "maze.core.env.maze_env", "maze.core.wrappers.log_stats_wrapper"):
        results = [seconds_to_import(module) for _ in range(repeats)]
        figures[f"import {module}"] = statistics.median(seconds for seconds, _ in results)
        assert not any(has_torch for _, has_torch in results), f"{module} imports torch"
    for code in (HELP, PEER, RUN_CONTEXT):
        seconds_of(code)  # compiles
    figures["maze-run --help"] = statistics.median(seconds_of(HELP) for _ in range(repeats))
    pairs = [(seconds_of(PEER), seconds_of(RUN_CONTEXT)) for _ in range(repeats)]
    figures["stable-baselines3 imported"] = statistics.median(peer for peer, _ in pairs)
    figures["RunContext ready"] = statistics.median(own for _, own in pairs)
    figures["RunContext later than stable-baselines3"] = statistics.median(own - peer for peer, own in pairs)
    rollout = ("env.name=CartPole-v1", "runner=sequential", "runner.n_episodes=1")
    training = ("-cn", "conf_train", "env.name=CartPole-v1", "algorithm=ppo", "runner=dev")
    figures["maze-run, rollout, to the first step"] = statistics.median(
        seconds_to_first_step(rollout) for _ in range(3)
    )
    figures["maze-run, PPO, to the first step"] = statistics.median(seconds_to_first_step(training) for _ in range(3))
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trainers", action="store_true", help="the first line of every trainer, and nothing else")
    parser.add_argument("--json", type=Path, help="also write the figures into this file")
    options = parser.parse_args()

    figures: dict[str, float] = {}
    if options.trainers:
        figures = {f"{name}, first step to first line": seconds_to_first_line(name) for name in TRAININGS}
    else:
        figures = figures_of_starts(options.repeats)
    for name, seconds in figures.items():
        print(f"{name:<45} {seconds:6.2f} s")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
