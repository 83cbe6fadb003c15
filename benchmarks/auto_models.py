"""Compare `model=auto` with models written for an environment.

Each shipped environment, the tutorial's and the example project's train with their own model configuration and with
`model=auto`, with the same algorithm, hyper-parameters, number of environment steps and seeds, through the command line
as a user would. The best policy that each run saved acts in fresh episodes of the same seeds, most likely actions.

    python benchmarks/auto_models.py                              # three seeds each (two hours on two cores)
    python benchmarks/auto_models.py dispatching cutting_masked --seeds 1
    python benchmarks/auto_models.py --markdown table.md --json results.json
    python benchmarks/auto_models.py dispatching --seeds 1 --epochs 4 --models auto dense shared normalized orthogonal

The last command compares settings of `model=auto` with each other, in short runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from structured_examples import N_EPISODES, returns_of, training_steps

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "tutorials"
sys.path.append(str(TUTORIALS))


@dataclass(frozen=True)
class Pair:
    """A training with a model of its own, which `model=auto` replaces."""

    command: tuple[str, ...]
    tolerance: float
    """How much less the mean return of `model=auto` may be: what seeds differ by."""


_TRAINING = """
import sys, time
from maze.maze_cli import main
status = main()
print(time.process_time())
sys.exit(status)
"""
_BASIC = (
    *("algorithm=ppo", "runner.concurrency=8", "algorithm.n_epochs=10", "algorithm.epoch_length=5"),
    *("algorithm.patience=0", "algorithm.n_rollout_steps=100", "algorithm.lr=0.001", "algorithm.gamma=0.98"),
    *("algorithm.gae_lambda=0.95", "algorithm.batch_size=200", "algorithm.entropy_coef=0.0005"),
)
_TUTORIAL = "+experiment=tutorial_cutting_2d"
PAIRS = {
    "dispatching": Pair(("+experiment=dispatching_ppo",), tolerance=3.0),
    "dispatching_flat": Pair(("+experiment=dispatching_flat_ppo",), tolerance=3.0),
    "pick_and_place": Pair(("+experiment=pick_and_place_ppo",), tolerance=0.5),
    "pick_and_place_flat": Pair(("+experiment=pick_and_place_flat_ppo",), tolerance=0.5),
    "cutting_2d": Pair(
        ("env=cutting_2d", "wrappers=cutting_2d", "model=tutorial_cutting_2d_flat", *_BASIC), tolerance=10.0
    ),
    "tutorial_basic": Pair(
        (*(f"{group}=tutorial_cutting_2d_basic" for group in ("env", "wrappers", "model")), *_BASIC),
        tolerance=10.0,
    ),
    "cutting_flat": Pair((f"{_TUTORIAL}_flat",), tolerance=10.0),
    "cutting_structured": Pair((f"{_TUTORIAL}_struct",), tolerance=5.0),
    "cutting_masked": Pair((f"{_TUTORIAL}_struct_masked",), tolerance=1.0),
}

MODELS: dict[str, tuple[str, ...]] = {
    "own": (),
    "auto": ("model=auto",),
    "dense": ("model=auto", "model.attention=false"),
    "shared": ("model=auto", "model.shared_embedding=true"),
    "normalized": ("model=auto", "model.normalize_observations=true"),
    "orthogonal": ("model=auto", "model.initialization=orthogonal"),
}
"""Overrides of each model."""


@dataclass(frozen=True)
class Result:
    """What one policy did."""

    environment: str
    model: str
    seed: int
    env_steps: int
    cpu_seconds: float
    mean_return: float


def train(name: str, model: str, seed: int, directory: Path, n_epochs: int | None) -> float:
    """Train one policy in a process of its own; returns its CPU seconds."""
    command = list(PAIRS[name].command)
    if model != "own":
        command = [part for part in command if not part.startswith("model=")] + list(MODELS[model])
    if n_epochs is not None:
        command = [part for part in command if not part.startswith("algorithm.n_epochs=")]
        command.append(f"algorithm.n_epochs={n_epochs}")
    if "-cn" not in command:
        command = ["-cn", "conf_train", *command]
    command += [f"seeding.env_base_seed={seed}", f"seeding.agent_base_seed={seed + 1000}", f"hydra.run.dir={directory}"]
    paths = os.pathsep.join([str(TUTORIALS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    finished = subprocess.run(
        [sys.executable, "-c", _TRAINING, *command], env=environment, capture_output=True, text=True, check=False
    )
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {finished.returncode}:\n{finished.stderr[-3000:]}")
    return float(finished.stdout.split()[-1])


def train_and_evaluate(name: str, model: str, seed: int, n_epochs: int | None) -> Result:
    """One training, and the best policy that it saved."""
    from omegaconf import OmegaConf

    from maze.core.agent.serialized_torch_policy import SerializedTorchPolicy
    from maze.core.utils.config_utils import EnvFactory

    with tempfile.TemporaryDirectory(prefix=f"{name}_{model}_{seed}_") as parent:
        directory = Path(parent) / "run"
        cpu_seconds = train(name, model, seed, directory, n_epochs)
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

    made = Result(name, model, seed, n_steps, cpu_seconds, mean(returns_of(env, act)))
    print(f"  {time.strftime('%H:%M:%S')} {json.dumps(asdict(made))}", flush=True)
    return made


def is_reached(name: str, results: Sequence[Result]) -> bool:
    """Whether `model=auto` reaches what the environment's own model reaches, as a mean over the seeds."""
    own, auto = (
        mean(result.mean_return for result in results if (result.environment, result.model) == (name, model))
        for model in ("own", "auto")
    )
    return auto >= own - PAIRS[name].tolerance


def table(names: Sequence[str], results: Sequence[Result]) -> str:
    """Markdown table over all pairs."""
    returns = f"mean return ({N_EPISODES} episodes) per seed"
    lines = [
        f"| environment | environment steps | own model: {returns} | `model=auto` | CPU seconds | reached |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        found = {m: [r for r in results if (r.environment, r.model) == (name, m)] for m in ("own", "auto")}
        scores = [", ".join(f"{result.mean_return:.1f}" for result in of_model) for of_model in found.values()]
        seconds = [f"{mean(result.cpu_seconds for result in of_model):.0f}" for of_model in found.values()]
        lines.append(
            f"| {name} | {found['own'][0].env_steps:,} | {scores[0]} | {scores[1]} | {' and '.join(seconds)} "
            f"| {'yes' if is_reached(name, results) else 'no'} |"
        )
    return "\n".join(lines)


def settings_table(results: Sequence[Result]) -> str:
    """Markdown table with a row for each environment and model."""
    lines = ["| environment | model | environment steps | mean return per seed | CPU seconds |", "| --- " * 5 + "|"]
    for name, model in dict.fromkeys((result.environment, result.model) for result in results):
        found = [result for result in results if (result.environment, result.model) == (name, model)]
        returns = ", ".join(f"{result.mean_return:.1f}" for result in found)
        seconds = mean(result.cpu_seconds for result in found)
        lines.append(f"| {name} | {model} | {found[0].env_steps:,} | {returns} | {seconds:.0f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; exit status 1 where `model=auto` reaches less."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs="*", metavar="environment", help=f"of {', '.join(PAIRS)}; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each model")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=("own", "auto"), help="models to compare")
    parser.add_argument("--epochs", type=int, help="epochs of each run; default: those of its configuration")
    parser.add_argument("--jobs", type=int, default=2, help="runs in parallel")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    options = parser.parse_args(arguments)
    if unknown := set(options.environments) - set(PAIRS):
        parser.error(f"unknown environment {', '.join(sorted(unknown))}; there are {', '.join(PAIRS)}")
    names = [name for name in PAIRS if not options.environments or name in options.environments]
    jobs = [(name, model, seed) for name in names for seed in range(options.seeds) for model in options.models]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda job: train_and_evaluate(*job, options.epochs), jobs))
    text = table(names, results) if set(options.models) >= {"own", "auto"} else settings_table(results)
    print(text)
    if options.markdown:
        options.markdown.write_text(f"{text}\n", encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps([asdict(entry) for entry in results], indent=1), encoding="utf-8")
    is_comparison = {"own", "auto"} <= set(options.models)
    return int(is_comparison and not all(is_reached(name, results) for name in names))


if __name__ == "__main__":
    sys.exit(main())
