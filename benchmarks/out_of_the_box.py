"""PPO and SAC at their documented defaults beside stable-baselines3 and sb3-contrib at theirs, on ten problems.

Five problems are flat environments of gymnasium, five are structured and masked. The peer receives a structured problem
flattened: a step for each sub-step, all observations and all action heads in one vector, and a mask that allows one
action of every head of other sub-steps (`MaskablePPO`). Both frameworks take the same number of environment steps
(sub-steps of one environment step count once). After each fifth of the steps the current policy acts greedily in
episodes of the same seeds. Results are kept in `--output`, a line of JSON for each run, and finished runs are not
repeated. The tables of all of them are written into the page of the same name (`.md`).

    python benchmarks/out_of_the_box.py --seeds 5                    # what is missing: hours
    python benchmarks/out_of_the_box.py truck_docks --frameworks maze ppo_auto peer --seeds 2
    python benchmarks/out_of_the_box.py --seeds 0                    # tables only

`maze` is `algorithm=ppo model=auto`, `ppo_auto` the same with `algorithm=ppo_auto`.
The tables have interquartile means over seeds and problems of scores, where 0 is a random policy and 1 the best mean
return of any run in the problem, with stratified bootstrap intervals of 95 % (Agarwal et al. 2021).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from scipy.stats import trim_mean

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tutorials")]

from benchmarks.page_tables import markdown_table, write_table  # noqa: E402

RESULTS = ROOT / "docs" / "benchmarks" / "out_of_the_box.jsonl"
N_FIFTHS, N_EPISODES, FIRST_EPISODE_SEED, N_RESAMPLES = 5, 30, 987_654, 5_000
FRAMEWORKS = ("maze", "ppo_auto", "peer")


@dataclass(frozen=True)
class Problem:
    """A problem: a gymnasium id, or a module and the name of an environment in it."""

    env: str
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    n_steps: int = 0
    """Time limit in environment steps; 0: episodes have an end of their own."""

    @property
    def is_flat(self) -> bool:
        """Whether it is an environment of gymnasium."""
        return not self.name

    def make(self) -> Any:
        """Create the environment."""
        if self.is_flat:
            return gym.make(self.env, **self.arguments)
        from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper

        env = getattr(importlib.import_module(self.env), self.name)(**self.arguments)
        return TimeLimitWrapper.wrap(env, max_episode_steps=self.n_steps) if self.n_steps else env


PROBLEMS = {
    "cartpole": Problem("CartPole-v1"),
    "acrobot": Problem("Acrobot-v1"),
    "lunar_lander": Problem("LunarLander-v3"),
    "lunar_lander_continuous": Problem("LunarLander-v3", arguments={"continuous": True}),
    "pendulum": Problem("Pendulum-v1"),
    "truck_docks": Problem("tutorial_maze_env.truck_docks", "TruckDocksEnv"),
    "ambulances": Problem("tutorial_maze_env.ambulances", "AmbulancesEnv"),
    "dispatching": Problem("maze_envs.logistics.dispatching.maze_env", "dispatching_env"),
    "pick_and_place": Problem("maze_envs.robotics.pick_and_place.maze_env", "pick_and_place_env"),
    "cutting": Problem("benchmarks.out_of_the_box", "masked_cutting", n_steps=200),
}


def masked_cutting() -> Any:
    """Create the cutting environment of the tutorial with masked sub-steps."""
    from hydra import compose, initialize_config_module

    from maze.core.utils.config_utils import EnvFactory

    with initialize_config_module("maze.conf", version_base=None):
        config: Any = compose("conf_train", ["+experiment=tutorial_cutting_2d_struct_masked"])
    return EnvFactory(config.env, {})()


class FlatEnv(gym.Env[Any, Any]):
    """A structured environment with a step for each sub-step, one vector as observation, and masks."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.keys = list(env.observation_spaces_dict)
        self.parts = [(key, name) for key in self.keys for name in env.observation_spaces_dict[key]]
        self.spaces = [env.observation_spaces_dict[key][name] for key, name in self.parts]
        n_values = sum(gym.spaces.flatdim(space) for space in self.spaces) + len(self.keys)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (n_values,), np.float32)
        self.heads = [(key, name) for key in self.keys for name in env.action_spaces_dict[key]]
        self.n_choices = [int(env.action_spaces_dict[key][name].n) for key, name in self.heads]
        self.action_space = gym.spaces.MultiDiscrete(self.n_choices)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.env.seed(seed)
        return self._flat(self.env.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        key = self.env.actor_id().step_key
        chosen = {name: int(value) for (of, name), value in zip(self.heads, action, strict=True) if of == key}
        observation, reward, done, info = self.env.step(chosen)
        is_truncated = bool(info.get("TimeLimit.truncated"))
        return self._flat(observation), float(reward), bool(done and not is_truncated), is_truncated, {}

    def action_masks(self) -> np.ndarray:
        """Return the masks of all heads in one vector."""
        key, masks = self.env.actor_id().step_key, []
        for (of, name), n in zip(self.heads, self.n_choices, strict=True):
            mask = self.observation.get(f"{name}_mask", np.ones(n)) if of == key else np.arange(n) == 0
            masks.append(np.asarray(mask, bool))
        return np.concatenate(masks)

    def _flat(self, observation: dict[str, Any]) -> np.ndarray:
        self.observation, key = observation, self.env.actor_id().step_key
        values = [np.array([each == key for each in self.keys], np.float32)]
        for (of, name), space in zip(self.parts, self.spaces, strict=True):
            known = gym.spaces.flatten(space, np.asarray(observation[name]).astype(space.dtype)) if of == key else None
            values.append(np.zeros(gym.spaces.flatdim(space)) if known is None else known)
        return np.concatenate(values).astype(np.float32)


def mean_return(env: Any, act: Callable[[Any], Any]) -> float:
    """Return the mean return of the evaluation episodes of a gymnasium environment."""
    total = 0.0
    for seed in range(FIRST_EPISODE_SEED, FIRST_EPISODE_SEED + N_EPISODES):
        observation, _ = env.reset(seed=seed)
        is_over = False
        while not is_over:
            observation, reward, terminated, truncated, _ = env.step(act(observation))
            total += float(reward)
            is_over = terminated or truncated
    return total / N_EPISODES


def train_maze(problem: Problem, algorithm: str, n_steps: int, seed: int) -> list[float]:
    """Train with Maze; return the mean return after each fifth."""
    from maze.api.run_context import RunContext

    env = problem.make() if problem.is_flat else FlatEnv(problem.make())
    # No early stopping: all take the same number of steps.
    overrides = {"seeding.env_base_seed": seed, "seeding.agent_base_seed": seed, "algorithm.patience": 0}
    returns = []
    with (
        tempfile.TemporaryDirectory() as directory,
        RunContext(problem.make, directory, algorithm=algorithm, model="auto", overrides=overrides, silent=True) as rc,
    ):
        for _ in range(N_FIFTHS):
            rc.train(n_steps=n_steps // N_FIFTHS)
            policy = rc.runner.trainer.model.policy

            def act(observation: Any) -> Any:
                if problem.is_flat:
                    known = {"observation": np.asarray(observation, np.float32)}
                    return policy.compute_action(known, deterministic=True)["action"]  # noqa: B023
                actor = env.env.actor_id()
                chosen = policy.compute_action(env.observation, actor_id=actor, deterministic=True)  # noqa: B023
                return [int(chosen[name]) if of == actor.step_key else 0 for of, name in env.heads]

            returns.append(mean_return(env, act))
    return returns


def train_peer(problem: Problem, n_steps: int, seed: int) -> list[float]:
    """Train with stable-baselines3 or sb3-contrib; return the mean return after each fifth."""
    import torch

    torch.set_num_threads(1)
    returns = []
    if problem.is_flat:
        from stable_baselines3 import PPO, SAC

        env = problem.make()
        kind = SAC if problem.env == "Pendulum-v1" else PPO
        model: Any = kind("MlpPolicy", problem.make(), seed=seed, device="cpu")
        for part in range(N_FIFTHS):
            model.learn(n_steps // N_FIFTHS, reset_num_timesteps=part == 0)
            returns.append(mean_return(env, lambda observation: model.predict(observation, deterministic=True)[0]))
        return returns
    from sb3_contrib import MaskablePPO

    flat, env = FlatEnv(problem.make()), FlatEnv(problem.make())
    sub_steps = sub_steps_per_step(env)
    model = MaskablePPO("MlpPolicy", flat, seed=seed, device="cpu")
    for part in range(N_FIFTHS):
        model.learn(round(n_steps * sub_steps / N_FIFTHS), reset_num_timesteps=part == 0)
        returns.append(
            mean_return(env, lambda seen: model.predict(seen, deterministic=True, action_masks=env.action_masks())[0])
        )
    return returns


def random_return(problem: Problem) -> float:
    """Return the mean return of random allowed actions."""
    env = problem.make() if problem.is_flat else FlatEnv(problem.make())
    env.action_space.seed(0)
    if problem.is_flat:
        return mean_return(env, lambda _: env.action_space.sample())
    return mean_return(env, lambda _: env.action_space.sample(mask=masks_of(env)))


def masks_of(env: FlatEnv) -> tuple[np.ndarray, ...]:
    """Return the masks of the heads in the format of gymnasium."""
    return tuple(np.split(env.action_masks().astype(np.int8), np.cumsum(env.n_choices)[:-1]))


def sub_steps_per_step(env: FlatEnv, n: int = 1000) -> float:
    """Return the mean number of sub-steps of an environment step under random actions."""
    env.action_space.seed(0)
    env.reset(seed=0)
    n_steps = 0
    for _ in range(n):
        *_, terminated, truncated, _ = env.step(env.action_space.sample(mask=masks_of(env)))
        if terminated or truncated:
            n_steps += env.env.get_env_time()
            env.reset()
    return n / (n_steps + env.env.get_env_time())


def run_one(name: str, framework: str, n_steps: int, seed: int) -> dict[str, Any]:
    """Train once in this process."""
    problem, start = PROBLEMS[name], time.process_time()
    if framework == "random":
        returns = [random_return(problem)]
    elif framework == "peer":
        returns = train_peer(problem, n_steps, seed)
    else:
        algorithm = "sac" if name == "pendulum" else framework.replace("maze", "ppo")
        returns = train_maze(problem, algorithm, n_steps, seed)
    seconds = time.process_time() - start
    return {
        "problem": name, "framework": framework, "steps": n_steps, "seed": seed, "returns": returns, "cpu_s": seconds,
    }  # fmt: skip


def interquartile_mean(scores: np.ndarray) -> float:
    """Return the mean of the middle half of all scores."""
    return float(trim_mean(scores.ravel(), 0.25))


def interval(scores: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """Return the bootstrap interval of the interquartile mean, with seeds resampled within each problem.

    :param scores: Scores `[problems, seeds]`.
    """
    n_problems, n_seeds = scores.shape
    chosen = rng.integers(n_seeds, size=(N_RESAMPLES, n_problems, n_seeds))
    means = [interquartile_mean(np.take_along_axis(scores, each, axis=1)) for each in chosen]
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def tables(results: Sequence[dict[str, Any]], n_steps: int) -> tuple[str, str]:
    """Return the table of returns by problem, and that of interquartile means by group."""
    known = {(r["problem"], r["framework"], r["seed"]): r for r in results if r["steps"] in (0, n_steps)}
    rows: list[list[str]] = []
    scores: dict[tuple[bool, str], list[list[float]]] = {}
    for name, problem in PROBLEMS.items():
        # SAC trains on pendulum, for which there is no `ppo_auto`.
        used = [each for each in FRAMEWORKS if (name, each) != ("pendulum", "ppo_auto")]
        runs = {each: [r for (of, by, _), r in sorted(known.items()) if (of, by) == (name, each)] for each in used}
        if not all(runs.values()) or (name, "random", 0) not in known:
            continue
        low = known[name, "random", 0]["returns"][-1]
        high = max(r["returns"][-1] for each in runs.values() for r in each)
        cells = [", ".join(f"{r['returns'][-1]:.1f}" for r in runs.get(each, [])) for each in FRAMEWORKS]
        seconds = (f"{np.mean([r['cpu_s'] for r in runs[each]]):.0f}" if each in runs else "-" for each in FRAMEWORKS)
        rows.append([name, f"{low:.1f}", *cells, ", ".join(seconds)])
        for each in FRAMEWORKS:
            values = [(r["returns"][-1] - low) / (high - low) for r in runs.get(each, runs["maze"])]
            scores.setdefault((problem.is_flat, each), []).append(values)
    means: list[list[str]] = []
    for is_flat, group in ((True, "flat"), (False, "structured")):
        cells = []
        for each in FRAMEWORKS:
            of_problems = scores.get((is_flat, each), [])
            if of_problems:
                array = np.array([values[: min(map(len, of_problems))] for values in of_problems])
                shown = f"{interquartile_mean(array):.2f}"
                if array.shape[1] > 1:
                    low, high = interval(array, np.random.default_rng(0))
                    shown += f" [{low:.2f}, {high:.2f}]"
                cells.append(shown)
        if cells:
            means.append([group, f"{len(of_problems)} problems, {array.shape[1]} seed(s)", *cells])
    seconds_header = f"CPU s: {', '.join(FRAMEWORKS)}"
    return (
        markdown_table(["problem", "random", *FRAMEWORKS, seconds_header], rows),
        markdown_table(["group", "runs", *FRAMEWORKS], means),
    )


def steps_to_level(results: Sequence[dict[str, Any]], n_steps: int) -> str:
    """Return the table of steps, in thousands, after which the structured problems reach the peer's last return."""
    known = {(r["problem"], r["framework"], r["seed"]): r["returns"] for r in results if r["steps"] == n_steps}
    rows = []
    for name, framework, seed in sorted(known):
        if framework == "peer" and not PROBLEMS[name].is_flat:
            level = known[name, "peer", seed][-1]
            cells = []
            for each in FRAMEWORKS:
                reached = [return_ >= level for return_ in known.get((name, each, seed), [])]
                cells.append(f"{(reached.index(True) + 1) * n_steps / N_FIFTHS / 1000:.0f}" if any(reached) else "-")
            rows.append([name, str(seed), f"{level:.1f}", *cells])
    return markdown_table(["problem", "seed", "level", *FRAMEWORKS], rows)


def main() -> None:
    """Run what is missing, one process after the other; print the tables, and write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", default=[], metavar="problem", help=", ".join(PROBLEMS))
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run_one(args.problems[0], args.problems[1], args.steps, args.seeds)))
        return
    lines = args.output.read_text().splitlines() if args.output.is_file() else []
    results = [json.loads(line) for line in lines]
    done = {(r["problem"], r["framework"], r["steps"], r["seed"]) for r in results}
    wanted = [
        (name, framework, 0 if framework == "random" else args.steps, seed)
        for seed in range(args.seeds)
        for name in args.problems or PROBLEMS
        for framework in (*(["random"] if seed == 0 else []), *args.frameworks)
    ]
    for name, framework, n_steps, seed in wanted:
        if (name, framework, n_steps, seed) in done or (name == "pendulum" and framework == "ppo_auto"):
            continue
        command = [sys.executable, __file__, name, framework, "--one", "--steps", str(n_steps), "--seeds", str(seed)]
        finished = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        if finished.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{finished.stderr[-3000:]}")
        line = finished.stdout.strip().splitlines()[-1]
        print(line, file=sys.stderr, flush=True)
        results.append(json.loads(line))
        with args.output.open("a") as file:
            file.write(f"{line}\n")
    page = args.output.with_suffix(".md")
    found = (*tables(results, args.steps), steps_to_level(results, args.steps))
    for name, table in zip(("returns", "means", "steps"), found, strict=True):
        print(f"{table}\n")
        if page.exists():
            write_table(page, name, table)


if __name__ == "__main__":
    main()
