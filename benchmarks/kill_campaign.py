"""Kill runs at random times, resume them, and compare the results with undisturbed runs.

    python benchmarks/kill_campaign.py --kills 200 --seed 0

Each case is a run from the command line that gets SIGTERM, SIGINT or SIGKILL at a random moment (while it is set
up, in an update, an evaluation, a save), is resumed, is perhaps killed again (up to three times), and then runs to its
end. It passes if every file that was left is readable each time, and the final state (weights, optimizers, generators,
environments, buffers) and the best model are bit for bit those of the undisturbed training, or a warning says why not.

Processes and signals are real. Each run is forked from one process that has imported what runs import, which saves
these seconds and nothing else: the child calls ``maze_cli.main`` and ends.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from maze import maze_cli
from maze.core.utils.checkpoint import load_state
from maze.perception.models.space_config import SpacesConfig
from maze.utils.tensorboard_reader import tensorboard_to_pandas

SEEDS = ("seeding.env_base_seed=11", "seeding.agent_base_seed=11")
LEARNING_WRAPPER = "maze.core.wrappers.return_normalization_reward_wrapper.ReturnNormalizationRewardWrapper"
COMMON = (
    *("-cn", "conf_train", "env.name=CartPole-v1", "model=flatten_concat", *SEEDS),
    f"+wrappers={{{LEARNING_WRAPPER}:{{gamma:0.9,epsilon:1.0e-6}}}}",
)
EVALUATED = ("algorithm.rollout_evaluator.n_episodes=3", "algorithm.rollout_evaluator.deterministic=false")
ACTOR_CRITIC = (*EVALUATED, "critic=flatten_concat_shared", "algorithm.n_rollout_steps=20", "algorithm.epoch_length=3")
EPOCHS = "algorithm.n_epochs=5"
TRAININGS: dict[str, tuple[str, ...]] = {
    "a2c": ("algorithm=a2c", *ACTOR_CRITIC, "runner.concurrency=3", "runner.eval_concurrency=2", EPOCHS),
    "ppo": (
        *("algorithm=ppo", *ACTOR_CRITIC, "runner.concurrency=3", "runner.eval_concurrency=2", EPOCHS),
        *("algorithm.batch_size=16", "algorithm.n_optimization_epochs=2"),
    ),
    "impala": (
        *("algorithm=impala", *ACTOR_CRITIC, "algorithm.num_actors=3", "algorithm.actors_batch_size=2", EPOCHS),
        "runner.eval_concurrency=2",
    ),
    "sac": (
        *("algorithm=sac", *EVALUATED, "critic=flatten_concat_state_action", "algorithm.epoch_length=15", EPOCHS),
        *("algorithm.num_actors=2", "algorithm.rollouts_per_iteration=2", "algorithm.n_rollout_steps=2"),
        *("algorithm.batch_size=8", "algorithm.replay_buffer_size=80", "algorithm.initial_buffer_size=20"),
        "runner.eval_concurrency=2",
    ),
    "es": (
        *("algorithm=es", "algorithm.n_rollouts_per_update=6", "algorithm.max_steps=60", "runner.n_eval_rollouts=3"),
        *("runner.shared_noise_table_size=1000000", EPOCHS),
    ),
    "bc": ("algorithm=bc", "algorithm.device=cpu", "algorithm.batch_size=8", "algorithm.n_eval_episodes=2", EPOCHS),
}
MODULES = "modules.txt"
"""What the latest run had imported."""
NOT_COMPARED = ("log_step", "update_statistics", "statistics")
"""Parts of a run's state that hold seconds."""


@dataclass
class Finished:
    """A finished process."""

    status: int
    seconds: float
    was_killed: bool
    output: str


@dataclass
class Tally:
    """Results so far."""

    kills: Counter[str] = field(default_factory=Counter)
    exact: int = 0
    warned: int = 0
    failures: list[str] = field(default_factory=list)


def run(arguments: tuple[str, ...], directory: Path, kill: tuple[int, float] | None = None) -> Finished:
    """Run ``maze-run`` in a process of its own.

    :param arguments: Its arguments.
    :param directory: Where it is run.
    :param kill: Signal, and after how many seconds it is sent.
    """
    log = directory / f"console-{time.monotonic_ns()}.txt"
    start = time.monotonic()
    log.touch()  # it may be killed before it writes anything
    pid = os.fork()
    if pid == 0:
        _become_command(arguments, directory, log)
    was_killed = False
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        elapsed = time.monotonic() - start
        if done:
            return Finished(os.waitstatus_to_exitcode(status), elapsed, was_killed, log.read_text())
        if kill is not None and not was_killed and elapsed >= kill[1]:
            os.kill(pid, kill[0])
            was_killed = True
        if elapsed > 120:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.0005)


def _become_command(arguments: tuple[str, ...], directory: Path, log: Path) -> None:
    """Continues as the process of a command, never to return."""
    status = 70
    try:
        os.chdir(directory)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        status = maze_cli.main(arguments)
        sys.stdout.flush()
        (directory / MODULES).write_text("\n".join(sys.modules))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(status)


def unreadable(directory: Path) -> list[str]:
    """Return the defects of the files of a run."""
    problems = []
    for path in sorted(directory.rglob("*")):
        if not path.is_file() or path.name.startswith(".maze-unfinished"):  # swept up by the next run
            continue
        try:
            if path.suffix == ".pt":
                load_state(path)
            elif path.name == "spaces_config.pkl":
                SpacesConfig.load(path)
            elif "tfevents" in path.name and path.stat().st_size:
                tensorboard_to_pandas(path)
            elif path.suffix in (".yaml", ".json", ".txt") and path.parent.name != ".hydra" and not path.stat().st_size:
                raise ValueError("it is empty")
        except Exception as error:
            problems.append(f"{path}: {type(error).__name__}: {error}")
    return problems


def comparable(value: Any) -> Any:
    """The same for equal numbers of equal types only."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    return repr(value)


def differences(expected: Path, found: Path) -> list[str]:
    """The parts in which two finished runs differ."""
    one, other = load_state(expected / "latest.pt"), load_state(found / "latest.pt")
    parts = [key for key in one if key not in NOT_COMPARED and comparable(one[key]) != comparable(other.get(key))]
    best = [comparable(load_state(directory / "state_dict.pt")) for directory in (expected, found)]
    return parts + ([] if best[0] == best[1] else ["state_dict.pt"])


def case(
    name: str, arguments: tuple[str, ...], reference: Path, seconds: float, rng: random.Random, tally: Tally
) -> None:
    """Kill one run, once or several times, and compare its result."""
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=reference.parent))
    resumed_from: Path | None = None
    outputs, story = [], []
    n_kills = rng.choice((1, 1, 2, 3))
    for number in range(n_kills + 1):
        current = directory / f"{number}"
        command = (*arguments, f"hydra.run.dir={current}")
        if resumed_from is not None:
            command = (*command, f"input_dir={resumed_from}", "resume=true")
        kill = None
        if number < n_kills:
            signum = rng.choice((signal.SIGTERM, signal.SIGINT, signal.SIGKILL))
            kill = (signum, rng.uniform(0.0, seconds))
        finished = run(command, directory, kill)
        outputs.append(finished.output)
        what, when = (kill[0].name, kill[1]) if kill is not None else ("end", finished.seconds)
        story.append(f"{what} at {when:.3f} s: {finished.status}")
        if finished.was_killed and kill is not None:
            tally.kills[kill[0].name] += 1
        problems = unreadable(current) if current.is_dir() else []
        allowed = (0, -kill[0], 128 + kill[0]) if kill is not None else (0,)
        if finished.status not in allowed:
            problems.append(f"status {finished.status}: {finished.output[-1500:]}")
        if problems:
            tally.failures.append(f"{name} ({'; '.join(story)}) {directory}: {problems}")
            return
        if (current / "latest.pt").is_file():
            resumed_from = current
    parts = differences(reference, current)
    if not parts:
        tally.exact += 1
        shutil.rmtree(directory)
    elif any("is not resumed exactly" in output for output in outputs):
        tally.warned += 1
    else:
        tally.failures.append(f"{name} ({'; '.join(story)}) {directory}: {', '.join(parts)} differ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of runs that are killed, at least once each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithms", nargs="*", default=list(TRAININGS), choices=list(TRAININGS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="maze-kills-"))
    rng, tally = random.Random(options.seed), Tally()
    data = root / "data"
    rollout = ("env.name=CartPole-v1", "runner=sequential", "runner.n_episodes=4", *SEEDS, f"hydra.run.dir={data}")
    assert run(rollout, root).status == 0
    references: dict[str, tuple[tuple[str, ...], Path, float]] = {}
    for name in options.algorithms:
        own = (f"runner.dataset.dir_or_file={data / 'trajectory_data'}",) if name == "bc" else ()
        arguments = (*COMMON, *TRAININGS[name], *own)
        reference = root / f"reference-{name}"
        for directory in (root / f"first-{name}", reference):  # the first one finds out what there is to import
            finished = run((*arguments, f"hydra.run.dir={directory}"), root)
            if finished.status != 0:
                print(finished.output)
                return 1
            for module in (root / MODULES).read_text().splitlines():
                with suppress(Exception):
                    importlib.import_module(module)
        references[name] = (arguments, reference, finished.seconds)
        print(f"{name}: {finished.seconds:.2f} s undisturbed", flush=True)
    for number in range(options.kills):
        name = options.algorithms[number % len(options.algorithms)]
        arguments, reference, seconds = references[name]
        case(name, arguments, reference, seconds, rng, tally)
        if (number + 1) % 20 == 0 or number + 1 == options.kills:
            signals = ", ".join(f"{count} {name}" for name, count in sorted(tally.kills.items()))
            print(
                f"{number + 1} runs killed ({signals}): {tally.exact} exact, {tally.warned} with a warning, "
                f"{len(tally.failures)} failures",
                flush=True,
            )
    for failure in tally.failures:
        print(f"FAILED {failure}")
    if not tally.failures:
        shutil.rmtree(root)
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
