"""Effect of structure in two example environments: agents that come and go, and a hierarchy.

For each environment the structured experiment and the flat one train with the same algorithm, hyper-parameters, layers
and number of environment steps, several seeds each, through the command line as a user would. The saved policies act in
fresh episodes, most likely actions; so do a random policy and a rule written by hand.

    python benchmarks/structured_examples.py                     # three seeds each (an hour on two cores)
    python benchmarks/structured_examples.py dispatching --seeds 1
    python benchmarks/structured_examples.py --markdown table.md --json results.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

N_EPISODES = 100
FIRST_EPISODE_SEED = 987_654

Act = Callable[[Any, Any], Any]
"""Observation and environment to action."""


@dataclass(frozen=True)
class Example:
    """An environment in its two forms, and what has to come out."""

    structured: str
    flat: str
    goal: float
    """Mean return that structured policies reach."""
    missed: float
    """Mean return that flat policies of the same size, and random ones, stay below."""
    rule: Act


@dataclass(frozen=True)
class Result:
    """What one policy did."""

    example: str
    policy: str
    seed: int | None
    env_steps: int
    mean_return: float
    min_return: float
    max_return: float


def nearest_order(observation: Any, env: Any) -> Any:
    """Drive to the nearest open order."""
    orders = observation["orders"]
    return {"order": int((orders[:, 0] * orders[:, 1]).argmax())}


def straight_to_the_goal(observation: Any, env: Any) -> Any:
    """Drive straight, and turns the gripper as required."""
    if "orientation" in observation:
        return {"orientation": int(observation["orientation"].argmax())}
    x, y = observation["offset"]
    return {"direction": (1 if x > 0 else 3) if x else (0 if y > 0 else 2)}


EXAMPLES = {
    "dispatching": Example("dispatching_ppo", "dispatching_flat_ppo", goal=65.0, missed=50.0, rule=nearest_order),
    "pick_and_place": Example(
        "pick_and_place_ppo", "pick_and_place_flat_ppo", goal=7.0, missed=1.0, rule=straight_to_the_goal
    ),
}


def train(experiment: str, seed: int, directory: Path) -> None:
    """Train one policy in a process of its own."""
    command = [
        *(sys.executable, "-m", "maze.maze_cli", "-cn", "conf_train", f"+experiment={experiment}"),
        *(f"seeding.env_base_seed={seed}", f"seeding.agent_base_seed={seed + 1000}", f"hydra.run.dir={directory}"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {finished.returncode}:\n{finished.stderr[-3000:]}")


def training_steps(directory: Path) -> int:
    """Environment steps that training took: every step of every rollout, unfinished episodes included."""
    from omegaconf import OmegaConf

    from maze.core.utils.checkpoint import load_state

    config = OmegaConf.load(directory / "hydra_config.yaml")
    n_updates = load_state(directory / "latest.pt")["epoch"] * config.algorithm.epoch_length
    return int(n_updates * config.algorithm.n_rollout_steps * config.runner.concurrency)


def returns_of(env: Any, act: Act) -> list[float]:
    """Undiscounted returns of episodes that training never saw."""
    returns = []
    for seed in range(FIRST_EPISODE_SEED, FIRST_EPISODE_SEED + N_EPISODES):
        env.seed(seed)
        observation, total, done = env.reset(), 0.0, False
        while not done:
            observation, reward, done, _ = env.step(act(observation, env))
            total += reward
        returns.append(total)
    return returns


def train_and_evaluate(example: str, form: str, seed: int) -> Result:
    """One training, and the best policy that it saved."""
    from omegaconf import OmegaConf

    from maze.core.agent.serialized_torch_policy import SerializedTorchPolicy
    from maze.core.utils.config_utils import EnvFactory

    experiment = getattr(EXAMPLES[example], form)
    with tempfile.TemporaryDirectory(prefix=f"{experiment}_{seed}_") as name:
        directory = Path(name) / "run"
        train(experiment, seed, directory)
        config: Any = OmegaConf.load(directory / "hydra_config.yaml")
        policy = SerializedTorchPolicy(
            model=OmegaConf.to_container(config.model, resolve=False),
            state_dict_file=str(directory / "state_dict.pt"),
            spaces_dict_file=str(directory / "spaces_config.pkl"),
            device="cpu",
        )
        n_steps = training_steps(directory)
        env = EnvFactory(config.env, config.wrappers)()

    def act(observation: Any, env: Any) -> Any:
        return policy.compute_action(observation, actor_id=env.actor_id(), deterministic=True)

    return result(example, form, seed, n_steps, returns_of(env, act))


def result(example: str, policy: str, seed: int | None, n_steps: int, returns: Sequence[float]) -> Result:
    """The figures of one policy, which are printed at once."""
    made = Result(example, policy, seed, n_steps, mean(returns), min(returns), max(returns))
    print(f"  {json.dumps(asdict(made))}", flush=True)
    return made


def references(example: str) -> list[Result]:
    """What a random policy and the rule do in the structured environment."""
    from maze.core.agent.random_policy import RandomPolicy
    from maze_envs.logistics.dispatching.maze_env import dispatching_env
    from maze_envs.robotics.pick_and_place.maze_env import pick_and_place_env

    factories: dict[str, Callable[[], Any]] = {"dispatching": dispatching_env, "pick_and_place": pick_and_place_env}
    env = factories[example]()
    random = RandomPolicy(env.action_spaces_dict)
    random.seed(0)
    acting: dict[str, Act] = {
        "random": lambda observation, env: random.compute_action(observation, actor_id=env.actor_id()),
        "rule": EXAMPLES[example].rule,
    }
    return [result(example, name, None, 0, returns_of(env, act)) for name, act in acting.items()]


def is_as_expected(result: Result) -> bool | None:
    """Whether a policy did what it should; None: nothing is expected of it."""
    example = EXAMPLES[result.example]
    if result.policy == "structured":
        return result.mean_return >= example.goal
    return None if result.policy == "rule" else result.mean_return < example.missed


def table(results: Sequence[Result]) -> str:
    """Markdown table over all policies."""
    measures = f"mean return ({N_EPISODES} episodes) | worst | best"
    lines = [
        f"| example | policy | seed | environment steps | {measures} | goal | as expected |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in results:
        example, is_right = EXAMPLES[entry.example], is_as_expected(entry)
        goal = {"structured": f"at least {example.goal:g}", "rule": "-"}.get(entry.policy, f"below {example.missed:g}")
        lines.append(
            f"| {entry.example} | {entry.policy} | {'-' if entry.seed is None else entry.seed} "
            f"| {entry.env_steps:,} | {entry.mean_return:.1f} | {entry.min_return:.1f} | {entry.max_return:.1f} "
            f"| {goal} | {'-' if is_right is None else 'yes' if is_right else 'no'} |"
        )
    return "\n".join(lines)


def compare(names: Sequence[str], n_seeds: int, n_jobs: int) -> list[Result]:
    """All runs and references, in the order of the table."""
    jobs = [(name, form, seed) for name in names for form in ("structured", "flat") for seed in range(n_seeds)]
    with ThreadPoolExecutor(n_jobs) as pool:
        trained = list(pool.map(lambda job: train_and_evaluate(*job), jobs))
    by_example: Mapping[str, list[Result]] = {name: references(name) for name in names}
    return [entry for name in names for entry in (*[r for r in trained if r.example == name], *by_example[name])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; exit status 1 when a policy did not do what it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", metavar="example", help=f"of {', '.join(EXAMPLES)}; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each policy")
    parser.add_argument("--jobs", type=int, default=2, help="runs in parallel")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    options = parser.parse_args(arguments)
    if unknown := set(options.examples) - set(EXAMPLES):
        parser.error(f"unknown example {', '.join(sorted(unknown))}; there are {', '.join(EXAMPLES)}")
    names = [name for name in EXAMPLES if not options.examples or name in options.examples]
    results = compare(names, options.seeds, options.jobs)
    text = table(results)
    print(text)
    if options.markdown:
        options.markdown.write_text(f"{text}\n", encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps([asdict(entry) for entry in results], indent=1), encoding="utf-8")
    return int(any(is_as_expected(entry) is False for entry in results))


if __name__ == "__main__":
    sys.exit(main())
