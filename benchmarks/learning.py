"""Learning results of the shipped experiments, several seeds each, through the command line as a user would run them.

Each run is one `maze-run -cn conf_train +experiment=...`; the best policy that it saved and the last one are then
evaluated on 100 fresh episodes (Pong: 10), with the most probable actions and with sampled ones. The table says what
was reached and within how many environment steps; the goal is for the best policy's most probable actions. The last 100
episodes of the training itself, with sampled actions, are what many publish.

    python benchmarks/learning.py                            # all but continuous control and MiniGrid (an hour)
    python benchmarks/learning.py cartpole_ppo --seeds 5     # one experiment
    python benchmarks/learning.py mujoco                     # continuous control: the names that begin so (hours)
    python benchmarks/learning.py minigrid                   # a locked door, and a corridor for which memory is needed
    python benchmarks/learning.py atari                      # Pong from pixels (96 minutes of a core each)
    python benchmarks/learning.py mujoco --results docs/benchmarks/learning.jsonl --tables docs/benchmarks/learning.md

With `--results` each finished training is appended to that file, and those that it has already are not run again, so
that hours can be spread. With `--keep` an interrupted run resumes. `--tables` writes the
tables of a page from it, between its lines `<!-- results: mujoco -->` (names that begin so) and `<!-- end -->`; with
`--seeds 0` nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.page_tables import markdown_table


@dataclass(frozen=True)
class Target:
    """What an experiment has to reach."""

    experiment: str
    env_id: str
    mean_return: float
    max_env_steps: int
    n_seeds: int
    first_seed: int = 0
    """Settings that were tuned on the first seeds are judged by others."""
    variant: str = ""
    """Tells targets of one experiment apart: what is appended to its name."""
    overrides: tuple[str, ...] = ()
    """What follows the experiment in the command."""
    n_evaluation_episodes: int = 100

    @property
    def name(self) -> str:
        """What it is called here."""
        return self.experiment + self.variant


TARGETS = {
    target.name: target
    for target in (
        Target("cartpole_ppo", "CartPole-v1", mean_return=475.0, max_env_steps=100_000, n_seeds=5),
        Target("cartpole_a2c", "CartPole-v1", mean_return=475.0, max_env_steps=500_000, n_seeds=3),
        Target("acrobot_ppo", "Acrobot-v1", mean_return=-100.0, max_env_steps=300_000, n_seeds=3),
        Target("lunar_lander_ppo", "LunarLander-v3", mean_return=200.0, max_env_steps=1_000_000, n_seeds=3),
        Target("pendulum_sac", "Pendulum-v1", mean_return=-200.0, max_env_steps=20_000, n_seeds=3),
        Target(
            "lunar_lander_sac", "LunarLander-v3", mean_return=200.0, max_env_steps=400_000, n_seeds=3, first_seed=10
        ),
        Target(
            "lunar_lander_continuous_sac",
            "LunarLanderContinuous-v3",
            mean_return=200.0,
            max_env_steps=350_000,
            n_seeds=3,
        ),
        Target("cartpole_es", "CartPole-v1", mean_return=500.0, max_env_steps=600_000, n_seeds=3),
        Target("cartpole_dqn", "CartPole-v1", mean_return=475.0, max_env_steps=100_000, n_seeds=5),
        Target(
            "lunar_lander_dqn", "LunarLander-v3", mean_return=200.0, max_env_steps=500_000, n_seeds=3, first_seed=10
        ),
        Target("cartpole_impala", "CartPole-v1", mean_return=475.0, max_env_steps=400_000, n_seeds=3, first_seed=10),
        *(
            Target(experiment, f"{game}-v5", mean_return, max_env_steps, 3, variant=f"_{game}", overrides=overrides)
            for experiment, game, mean_return, max_env_steps, overrides in (
                ("mujoco_ppo", "InvertedPendulum", 950.0, 1_000_000, ("model.initial_std=1",)),
                ("mujoco_ppo", "HalfCheetah", 2_000.0, 1_000_000, ()),
                ("mujoco_ppo", "Hopper", 2_500.0, 1_000_000, ("model.initial_std=1",)),
                ("mujoco_ppo", "Walker2d", 3_000.0, 1_000_000, ()),
                ("mujoco_sac", "HalfCheetah", 6_000.0, 300_000, ()),
                ("mujoco_sac", "Hopper", 2_500.0, 300_000, ()),
            )
        ),
        Target("minigrid_doorkey_ppo", "MiniGrid-DoorKey-5x5-v0", mean_return=0.9, max_env_steps=200_000, n_seeds=3),
        Target("minigrid_memory_ppo", "MiniGrid-MemoryS7-v0", mean_return=0.9, max_env_steps=500_000, n_seeds=3),
        # as many points as the opponent, after three of the experiment's ten million steps
        Target(
            "atari_ppo",
            "ALE/Pong-v5",
            mean_return=0.0,
            max_env_steps=3_100_000,
            n_seeds=2,
            variant="_Pong",
            overrides=("algorithm.n_epochs=32",),
            # most probable actions may send the ball to and fro until the emulator ends the game after 27,000 steps
            n_evaluation_episodes=10,
        ),
        # for comparison: a policy without memory guesses, and reaches the right object half of the time
        Target(
            "minigrid_memory_ppo",
            "MiniGrid-MemoryS7-v0",
            mean_return=0.0,
            max_env_steps=500_000,
            n_seeds=3,
            variant="_feed_forward",
            overrides=("model.recurrence=false",),
        ),
    )
}

WITH_EXTRAS = ("atari", "mujoco", "minigrid")
"""Prefixes of targets that need an extra; they run only when they are named."""


@dataclass(frozen=True)
class Result:
    """One training run and its evaluation."""

    experiment: str
    """Name of the target."""
    seed: int
    env_steps: int
    mean_return: float
    """Of the best policy's most probable actions, as the next two."""
    min_return: float | None
    max_return: float | None
    best_sampled: float | None = None
    last: float | None = None
    """Of the last policy's most probable actions."""
    last_sampled: float | None = None
    in_training: float | None = None
    """Mean of the last 100 episodes of the training."""
    seconds: float | None = None
    """Results that were measured before one of these was kept do not have it."""

    @property
    def is_reached(self) -> bool:
        """Whether the goal is reached."""
        target = TARGETS[self.experiment]
        return self.mean_return >= target.mean_return and self.env_steps <= target.max_env_steps


def train(target: Target, seed: int, directory: Path) -> tuple[list[Path], int, float | None]:
    """One training in a process of its own, from where an earlier one in the directory has stopped.

    :return: The directories of its parts, environment steps used by all of them, seconds (`None`: there were parts).
    """
    parts = [part for part in sorted(directory.glob("part_*")) if (part / "latest.pt").exists()]
    if parts and is_done(parts[-1]):
        return parts, training_steps(parts[-1]), None
    part = directory / f"part_{len(parts):02d}"
    command = [
        *(sys.executable, "-m", "maze.maze_cli", "-cn", "conf_train", f"+experiment={target.experiment}"),
        f"env.name={target.env_id}",
        *target.overrides,
        *(f"seeding.env_base_seed={seed}", f"seeding.agent_base_seed={seed + 1000}", f"hydra.run.dir={part}"),
        *((f"input_dir={parts[-1]}", "resume=true") if parts else ()),
    ]
    start = time.monotonic()
    finished = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {finished.returncode}:\n{finished.stderr[-3000:]}")
    return [*parts, part], training_steps(part), None if parts else time.monotonic() - start


def is_done(directory: Path) -> bool:
    """Whether a run has had all of its epochs."""
    from omegaconf import OmegaConf

    from maze.core.utils.checkpoint import load_state

    config = OmegaConf.load(directory / ".hydra" / "config.yaml")
    return bool(load_state(directory / "latest.pt")["epoch"] >= config.algorithm.n_epochs)


def training_steps(directory: Path) -> int:
    """Environment steps that training took: every step of every rollout, unfinished episodes included."""
    from omegaconf import OmegaConf

    from maze.core.utils.checkpoint import load_state

    config = OmegaConf.load(directory / ".hydra" / "config.yaml")
    if "noise_stddev" in config.algorithm:
        return episode_steps(directory)
    epochs = load_state(directory / "latest.pt")["epoch"]
    if "replay_buffer_size" in config.algorithm:
        per_update = config.algorithm.n_rollout_steps * config.algorithm.rollouts_per_iteration
        return int(config.algorithm.initial_buffer_size + epochs * config.algorithm.epoch_length * per_update)
    if "num_actors" in config.algorithm:
        n_envs = config.algorithm.actors_batch_size * config.algorithm.envs_per_actor
    else:
        n_envs = config.runner.concurrency
    per_update = config.algorithm.n_rollout_steps * n_envs
    return int(epochs * config.algorithm.epoch_length * per_update)


def episode_steps(directory: Path) -> int:
    """Environment steps of all episodes, those of evaluations included, as evolution strategies log them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    tags = [f"{prefix}_BaseEnvEvents/reward/total_step_count" for prefix in ("train", "eval")]
    return int(sum(events.Scalars(tag)[-1].value for tag in tags))


def return_in_training(parts: Sequence[Path], n_episodes: int = 100) -> float:
    """Mean return of the training's last epochs with so many episodes, actions sampled."""
    from maze.report.progress import read_progress

    rows = [values for part in parts for path, *_, values in read_progress(part).rows() if path == "train"]
    total, count = 0.0, 0.0
    for values in reversed(rows):
        n = values.get("BaseEnvEvents/reward/episode_count", 0.0)
        total, count = total + n * values.get("BaseEnvEvents/reward/mean", 0.0), count + n
        if count >= n_episodes:
            break
    return total / count if count else float("nan")


def evaluate(
    directory: Path,
    n_episodes: int,
    file: str = "state_dict.pt",
    deterministic: bool = True,
    seed: int = 987_654,
) -> list[float]:
    """Undiscounted returns of a saved policy in its run's environment, from seeds that training never saw.

    The run's wrappers are around it, but for those that alter rewards or cut episodes off: these are the training's.
    """
    from maze.core.rollout.rollout_runner import RolloutRunner
    from maze.core.utils.stored_config import StoredRun
    from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
    from maze.core.wrappers.wrapper import RewardWrapper
    from maze.core.wrappers.wrapper_factory import WrapperFactory

    run = StoredRun(directory).deployed("cpu", file)
    wrappers = [
        {"_target_": wrapper_type, **arguments}
        for wrapper_type, arguments in WrapperFactory.configured(run.wrappers or {})
        if not issubclass(wrapper_type, RewardWrapper | TimeLimitWrapper)
    ]
    env, policy = RolloutRunner.init_env_and_agent(run.env, wrappers, 0, run.policy, str(directory))
    returns: list[float] = []
    try:
        RolloutRunner.run_interaction_loop(
            env,
            policy,
            n_episodes,
            episode_seeds=[(seed + episode, seed + episode) for episode in range(n_episodes)],
            deterministic=deterministic,
            returns=returns,
        )
    finally:
        env.close()
    return returns


def run_one(target: Target, seed: int, keep: Path | None) -> Result:
    """Train and evaluate one seed."""
    with tempfile.TemporaryDirectory(prefix=f"{target.name}_{seed}_") as name:
        of_seed = keep.absolute() / f"{target.name}_{seed}" if keep else Path(name)
        parts, env_steps, seconds = train(target, seed, of_seed)
        directory = parts[-1]
        n_episodes = target.n_evaluation_episodes
        returns = evaluate(directory, n_episodes)
        others = [
            mean(evaluate(directory, n_episodes, file, deterministic))
            for file, deterministic in (("state_dict.pt", False), ("latest.pt", True), ("latest.pt", False))
        ]
        in_training = return_in_training(parts)
    reached = mean(returns), min(returns), max(returns), *others, in_training
    result = Result(target.name, seed, env_steps, *reached, seconds)
    print(f"  {json.dumps(asdict(result))}", flush=True)
    return result


RETURNS = {
    "mean_return": "best policy",
    "best_sampled": "best, sampled",
    "last": "last policy",
    "last_sampled": "last, sampled",
    "in_training": "last 100 training episodes",
}
"""Returns of the table: fields of a result, and names of their columns."""


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table with a row per experiment: means over seeds with 95 % intervals (Student's t)."""
    rows = []
    for name in dict.fromkeys(result.experiment for result in results):
        target, of_name = TARGETS[name], [result for result in results if result.experiment == name]
        cells = [with_interval(target, [getattr(result, of) for result in of_name]) for of in RETURNS]
        seconds = [result.seconds for result in of_name if result.seconds is not None]
        goal = f"{target.mean_return:g} within {target.max_env_steps:,}"
        reached = f"{sum(result.is_reached for result in of_name)} of {len(of_name)}"
        steps = f"{max(result.env_steps for result in of_name):,}"
        rows.append([name, goal, reached, steps, *cells, f"{mean(seconds) / 60:.0f}" if seconds else ""])
    header = ["experiment", "goal (steps)", "seeds that reach it", "steps", *RETURNS.values(), "minutes"]
    return markdown_table(header, rows)


def with_digits(target: Target, value: float) -> str:
    """A return as tables show it: returns of about 1 differ in the third digit."""
    return f"{value:.{1 if max(abs(target.mean_return), abs(value)) >= 10 else 3}f}"


def with_interval(target: Target, values: Sequence[float | None]) -> str:
    """Mean over seeds and half of its 95 % interval; empty where a seed has no value."""
    import numpy as np

    from maze.core.utils.stats_utils import t_interval

    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return ""
    if len(known) < 2:
        return with_digits(target, known[0])
    centre, _, high = t_interval(np.asarray(known, float))
    return f"{with_digits(target, centre)} ± {with_digits(target, high - centre)}"


def read_results(path: Path) -> list[Result]:
    """Results that were kept, in the order of targets and seeds."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    order = list(TARGETS)
    return sorted((Result(**json.loads(line)) for line in lines), key=lambda r: (order.index(r.experiment), r.seed))


def with_tables(page: str, results: Sequence[Result]) -> str:
    """The text of a page with its tables written anew."""

    def written(match: re.Match[str]) -> str:
        of_table = [r for r in results if r.experiment.startswith(tuple(match["names"].split()))]
        tables = [table(of_table)] if of_table else []
        return "\n\n".join([match["begin"], *tables, "<!-- end -->"])

    return re.sub(r"(?P<begin><!-- results: (?P<names>[\w ]+) -->)\n.*?<!-- end -->", written, page, flags=re.DOTALL)


def main() -> int:
    """Run the named experiments; exit status 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seeds", type=int, help="number of seeds, default: as the goal asks")
    parser.add_argument("--jobs", type=int, default=2, help="runs in parallel")
    parser.add_argument("--results", type=Path, help="keep results here and leave out what is there")
    parser.add_argument("--keep", type=Path, help="keep runs in this directory, and resume those in it")
    parser.add_argument("--tables", type=Path, help="page whose tables are written from the results")
    arguments = parser.parse_args()
    if arguments.tables and not arguments.results:
        parser.error("--tables needs --results")
    wanted = arguments.experiments or [name for name in TARGETS if not name.startswith(WITH_EXTRAS)]
    if unknown := [each for each in wanted if not any(name.startswith(each) for name in TARGETS)]:
        parser.error(f"unknown experiment {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")

    def n_seeds(target: Target) -> int:
        return target.n_seeds if arguments.seeds is None else int(arguments.seeds)

    jobs = [
        (target, seed)
        for name, target in TARGETS.items()
        if any(name.startswith(each) for each in wanted)
        for seed in range(
            target.first_seed, target.first_seed + (target.n_seeds if arguments.seeds is None else arguments.seeds)
        )
    ]
    kept = read_results(arguments.results) if arguments.results else []
    done = {(result.experiment, result.seed): result for result in kept}

    def run(job: tuple[Target, int]) -> Result:
        target, seed = job
        if (target.name, seed) in done:
            return done[target.name, seed]
        result = run_one(target, seed, arguments.keep)
        if arguments.results:
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
        return result

    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(run, jobs))
    if results:
        print(table(results))
    if arguments.tables:
        page = arguments.tables.read_text(encoding="utf-8")
        arguments.tables.write_text(with_tables(page, read_results(arguments.results)), encoding="utf-8")
    return 0 if all(result.is_reached for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
