"""Compare learning curves of PPO, A2C and SAC with stable-baselines3: same networks, weights, optimizer and settings.

Each run starts from the weights that stable-baselines3 draws for its seed (`--init own`: each from its own), takes the
same number of environment steps with the same hyperparameters, and records every finished training episode in the same
wrapper around the gymnasium environment. The table has the mean return of the episodes that ended in each fifth of the
training (the mean over seeds of each run's mean) with a bootstrap interval of 95 %, and the interval of the difference.

Returns can be counted in two ways that differ much while the lengths of episodes change: each episode once (as
stable-baselines3's monitor does), or each by its length (`by step` in the table), which is what a mean over equal
stretches of the training sees.

Finished runs are kept in `--output` and not repeated, so that a long comparison can be stopped and continued.

    python benchmarks/equal_settings.py --output results --seeds 10 --processes 2            # all, a few hours
    python benchmarks/equal_settings.py --output results --algorithms ppo_acrobot --seeds 3  # one, a few minutes
    python benchmarks/equal_settings.py --output results --page docs/benchmarks/equal_settings.md
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.page_tables import Curve, curve_chart, markdown_table, write_table

N_FIFTHS = 5
N_RESAMPLES = 10_000
FRAMEWORKS = ("maze", "stable-baselines3")


@dataclass(frozen=True)
class Task:
    """An algorithm, an environment, and the settings of both frameworks."""

    algorithm: str
    env_id: str
    n_env_steps: int
    n_envs: int
    hidden_units: list[int]
    lr: float
    gamma: float = 0.99
    settings: dict[str, Any] = field(default_factory=dict)
    """Rollouts (`n_steps`, `gae_lambda`, ...), or the replay buffer (`batch_size`, `learning_starts`, ...)."""


ON_POLICY = {"entropy_coef": 0.0, "value_loss_coef": 0.5, "max_grad_norm": 0.5, "eps": 1e-5}
PPO_SETTINGS = {**ON_POLICY, "n_steps": 128, "batch_size": 256, "n_epochs": 10, "gae_lambda": 0.95, "clip_range": 0.2}
A2C_SETTINGS = {**ON_POLICY, "n_steps": 16, "gae_lambda": 1.0, "normalize_advantage": False}
SAC_SETTINGS = {"batch_size": 256, "learning_starts": 1000, "buffer_size": 50_000, "tau": 0.005, "eps": 1e-8}

TASKS = {
    "ppo_acrobot": Task("ppo", "Acrobot-v1", 80_000, 8, [64, 64], 3e-4, settings=PPO_SETTINGS),
    "ppo_cartpole": Task("ppo", "CartPole-v1", 80_000, 8, [64, 64], 3e-4, settings=PPO_SETTINGS),
    "a2c_cartpole": Task("a2c", "CartPole-v1", 200_000, 8, [64, 64], 7e-4, settings=A2C_SETTINGS),
    "sac_pendulum": Task("sac", "Pendulum-v1", 10_000, 1, [256, 256], 3e-4, settings=SAC_SETTINGS),
}


# -- what both are measured with --------------------------------------------------------------------------------------


@dataclass
class Record:
    """Finished episodes of a run: environment steps taken so far (in all environments), return, length."""

    n_steps: int = 0
    episodes: list[tuple[int, float, int]] = field(default_factory=list)


class Recorded(gym.Wrapper[Any, Any, Any, Any]):
    """Notes each finished episode of an environment."""

    def __init__(self, env: gym.Env[Any, Any], record: Record) -> None:
        super().__init__(env)
        self._record = record
        self._total, self._length = 0.0, 0

    def reset(self, **arguments: Any) -> Any:
        """Begin an episode; one that was not over is not counted."""
        self._total, self._length = 0.0, 0
        return self.env.reset(**arguments)

    def step(self, action: Any) -> Any:
        """Take a step."""
        result = self.env.step(action)
        self._record.n_steps += 1
        self._total += float(result[1])
        self._length += 1
        if result[2] or result[3]:
            self._record.episodes.append((self._record.n_steps, self._total, self._length))
        return result


def make_env(task: Task, record: Record) -> gym.Env[Any, Any]:
    """An environment of the task."""
    return Recorded(gym.make(task.env_id), record)


# -- stable-baselines3 ------------------------------------------------------------------------------------------------


def build_sb3(task: Task, seed: int, record: Record) -> Any:
    """The peer's model; its weights follow from the seed."""
    from stable_baselines3 import A2C, PPO, SAC
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = DummyVecEnv([partial(make_env, task, record) for _ in range(task.n_envs)])  # type: ignore[list-item]
    settings = task.settings
    common = {"learning_rate": task.lr, "gamma": task.gamma, "device": "cpu", "seed": seed}
    optimizer = {"optimizer_class": torch.optim.Adam, "optimizer_kwargs": {"eps": settings["eps"]}}
    if task.algorithm == "sac":
        return SAC(
            "MlpPolicy", env, batch_size=settings["batch_size"], learning_starts=settings["learning_starts"],
            buffer_size=settings["buffer_size"], tau=settings["tau"],
            policy_kwargs={"net_arch": task.hidden_units, **optimizer}, **common,
        )  # fmt: skip
    widths = {"net_arch": {"pi": task.hidden_units, "vf": task.hidden_units}, "activation_fn": nn.Tanh, **optimizer}
    common |= {
        "n_steps": settings["n_steps"], "gae_lambda": settings["gae_lambda"], "ent_coef": settings["entropy_coef"],
        "vf_coef": settings["value_loss_coef"], "max_grad_norm": settings["max_grad_norm"], "policy_kwargs": widths,
    }  # fmt: skip
    if task.algorithm == "a2c":
        normalize = settings["normalize_advantage"]
        return A2C("MlpPolicy", env, use_rms_prop=False, normalize_advantage=normalize, **common)
    return PPO(
        "MlpPolicy", env, batch_size=settings["batch_size"], n_epochs=settings["n_epochs"],
        clip_range=settings["clip_range"], **common,
    )  # fmt: skip


def train_sb3(task: Task, seed: int, init: str) -> Record:  # its weights are the common ones
    """A training of the peer."""
    record = Record()
    build_sb3(task, seed, record).learn(task.n_env_steps)
    return record


# -- Maze -------------------------------------------------------------------------------------------------------------


def linear_layers(*modules: nn.Module) -> list[nn.Linear]:
    """All linear layers, in their order."""
    return [layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear)]


@torch.no_grad()
def copy_layers(sources: list[nn.Linear], targets: list[nn.Linear]) -> None:
    """Copy weights; the last layers of the source are concatenated in the last layer of the target."""
    for source, target in zip(sources, targets[:-1], strict=False):
        target.load_state_dict(source.state_dict())
    heads = sources[len(targets) - 1 :]
    targets[-1].weight.copy_(torch.cat([head.weight for head in heads]))
    targets[-1].bias.copy_(torch.cat([head.bias for head in heads]))


def train_maze(task: Task, seed: int, init: str) -> Record:
    """A training of Maze."""
    from maze.core.log_stats.log_stats import StatsContext

    torch.manual_seed(seed)
    record = Record()
    with StatsContext():
        (_train_maze_sac if task.algorithm == "sac" else _train_maze_on_policy)(task, seed, init, record)
    return record


def _train_maze_on_policy(task: Task, seed: int, init: str, record: Record) -> None:
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.agent.torch_state_critic import TorchSharedStateCritic
    from maze.core.rollout.rollout_generator import RolloutGenerator
    from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
    from maze.distributions.distribution_mapper import DistributionMapper
    from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet, FlattenConcatStateValueNet
    from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
    from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
    from maze.train.trainers.a2c.a2c_trainer import A2C
    from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig
    from maze.train.trainers.ppo.ppo_trainer import PPO

    settings = task.settings
    envs = SequentialVectorEnv(
        [lambda: GymMazeEnv(make_env(task, record)) for _ in range(task.n_envs)], logging_prefix="train"
    )
    envs.seed([seed * 1000 + index for index in range(task.n_envs)])
    shapes = {key: space.shape or () for key, space in envs.observation_spaces_dict[0].spaces.items()}
    mapper = DistributionMapper(envs.action_space, {})
    logits = {head: mapper.required_logits_shape(head) for head in envs.action_space.spaces}
    actor = FlattenConcatPolicyNet(shapes, logits, task.hidden_units, nn.Tanh)
    value = FlattenConcatStateValueNet(shapes, task.hidden_units, nn.Tanh)
    if init == "common":
        peer = build_sb3(task, seed, Record()).policy
        copy_layers(linear_layers(peer.mlp_extractor.policy_net, peer.action_net), linear_layers(actor))
        copy_layers(linear_layers(peer.mlp_extractor.value_net, peer.value_net), linear_layers(value))
    policy = TorchPolicy(networks={0: actor}, distribution_mapper=mapper, device="cpu")
    policy.seed(seed)
    critic = TorchSharedStateCritic({0: value}, envs.observation_spaces_dict, "cpu", stack_observations=False)
    n_updates = -(-task.n_env_steps // (settings["n_steps"] * task.n_envs))
    common = {
        "n_epochs": 1, "epoch_length": n_updates, "patience": 0, "n_rollout_steps": settings["n_steps"],
        "lr": task.lr, "gamma": task.gamma, "gae_lambda": settings["gae_lambda"], "optimizer_eps": settings["eps"],
        "value_loss_coef": settings["value_loss_coef"], "entropy_coef": settings["entropy_coef"],
        "max_grad_norm": settings["max_grad_norm"], "rollout_evaluator": None,
        "advantage_normalization": settings.get("normalize_advantage", True),
    }  # fmt: skip
    config: Any = A2CAlgorithmConfig(**common)
    if task.algorithm == "ppo":
        config = PPOAlgorithmConfig(
            batch_size=settings["batch_size"], n_optimization_epochs=settings["n_epochs"],
            clip_range=settings["clip_range"], **common,
        )  # fmt: skip
    model = TorchActorCritic(policy=policy, critic=critic, device="cpu")
    trainer = (PPO if task.algorithm == "ppo" else A2C)(config, RolloutGenerator(envs), None, model, None, seed=seed)
    trainer.train()


def _train_maze_sac(task: Task, seed: int, init: str, record: Record) -> None:
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.agent.torch_state_action_critic import TorchStepStateActionCritic
    from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
    from maze.distributions.distribution_mapper import DistributionMapper
    from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet, FlattenConcatStateActionValueNet
    from maze.train.parallelization.distributed_actors.dummy_distributed_workers_with_buffer import (
        DummyDistributedWorkersWithBuffer,
    )
    from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
    from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
    from maze.train.trainers.sac.sac_runners import SACRunner
    from maze.train.trainers.sac.sac_trainer import SAC

    def env_factory() -> GymMazeEnv:
        return GymMazeEnv(make_env(task, record))

    settings, env = task.settings, env_factory()
    distribution = "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution"
    mapper = DistributionMapper(env.action_space, [{"action_space": "gym.spaces.Box", "distribution": distribution}])
    shapes = {key: space.shape or () for key, space in env.observation_spaces_dict[0].spaces.items()}
    logits = {head: mapper.required_logits_shape(head) for head in env.action_space.spaces}
    actions: dict[str, Any] = {head: space.shape or () for head, space in env.action_space.spaces.items()}
    actor = FlattenConcatPolicyNet(shapes, logits, task.hidden_units, nn.ReLU)
    values = [
        FlattenConcatStateActionValueNet({**shapes, **actions}, {"q_value": (1,)}, task.hidden_units, nn.ReLU)
        for _ in range(2)
    ]
    if init == "common":
        peer = build_sb3(task, seed, Record())
        copy_layers(linear_layers(peer.actor.latent_pi, peer.actor.mu, peer.actor.log_std), linear_layers(actor))
        (space,) = env.action_space.spaces.values()
        for source, target in zip(peer.critic.q_networks, values, strict=True):
            copy_layers(linear_layers(source), linear_layers(target))
            with torch.no_grad():  # the peer's critics see actions in [-1, 1]
                half_width = torch.from_numpy(0.5 * (space.high - space.low)).float()
                linear_layers(target)[0].weight[:, -len(half_width) :] /= half_width
    policy = TorchPolicy(networks={0: actor}, distribution_mapper=mapper, device="cpu")
    policy.seed(seed)
    critic = TorchStepStateActionCritic(
        {0: values[0]}, 1, "cpu", {0: False}, env.action_spaces_dict, twin_networks={0: values[1]}
    )
    n_updates = task.n_env_steps - settings["learning_starts"]
    config = SACAlgorithmConfig(
        n_epochs=1, epoch_length=n_updates, patience=0, batch_size=settings["batch_size"], lr=task.lr,
        entropy_coef_lr=task.lr, entropy_coef=1.0, gamma=task.gamma, tau=settings["tau"],
        initial_buffer_size=settings["learning_starts"], replay_buffer_size=settings["buffer_size"],
        optimizer_eps=settings["eps"], rollout_evaluator=None,
    )  # fmt: skip
    buffer = UniformReplayBuffer(settings["buffer_size"], seed=seed)
    workers = DummyDistributedWorkersWithBuffer(
        env_factory=env_factory, worker_policy=policy, n_rollout_steps=1, n_workers=1,
        batch_size=settings["batch_size"], rollouts_per_iteration=1, split_rollouts_into_transitions=True,
        env_instance_seeds=[seed], replay_buffer=buffer,
    )  # fmt: skip
    trainer = SAC(config, TorchActorCritic(policy, critic, "cpu"), workers, None, None, seed=seed)  # type: ignore[arg-type]
    SACRunner.init_replay_buffer(
        buffer, config.initial_sampling_policy, settings["learning_starts"], seed, True, 1, env_factory
    )
    trainer.train()


TRAIN: dict[str, Callable[[Task, int, str], Record]] = {"maze": train_maze, "stable-baselines3": train_sb3}


# -- runs and what they say -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    framework: str
    seed: int
    init: str

    def file(self, directory: Path) -> Path:
        """Where its episodes are kept."""
        suffix = "" if self.init == "common" or self.framework != "maze" else f"-{self.init}"
        return directory / f"{self.task}{suffix}-{self.framework}-{self.seed}.json"


def train(run: Run, directory: Path) -> None:
    """Train in this process and store the episodes."""
    torch.set_num_threads(1)
    record = TRAIN[run.framework](TASKS[run.task], run.seed, run.init)
    unfinished = run.file(directory).with_suffix(".part")
    unfinished.write_text(json.dumps(record.episodes))
    unfinished.replace(run.file(directory))


def train_all(runs: list[Run], directory: Path, n_processes: int) -> None:
    """Train missing runs, each in a process of its own."""
    waiting = [run for run in runs if not run.file(directory).exists()]
    playing: dict[subprocess.Popen[bytes], Run] = {}
    while waiting or playing:
        while waiting and len(playing) < n_processes:
            run = waiting.pop(0)
            arguments = ["--output", str(directory), "--one", run.task, run.framework, str(run.seed), run.init]
            command = [sys.executable, __file__, *arguments]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            playing[subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)] = run
        time.sleep(0.2)
        for process in [process for process in playing if process.poll() is not None]:
            run = playing.pop(process)
            if process.returncode:
                raise SystemExit(f"{run} failed with status {process.returncode}.")
            print(f"{run.task} {run.framework} seed {run.seed}: done, {len(waiting) + len(playing)} to go", flush=True)


def fifths(task: Task, episodes: list[tuple[int, float, int]], by_step: bool) -> list[float]:
    """Mean return of the episodes that ended in each fifth of the training; NaN where none did."""
    if not episodes:
        return [float("nan")] * N_FIFTHS
    ends, returns, lengths = (np.array(column, float) for column in zip(*episodes, strict=True))
    index = np.minimum(N_FIFTHS - 1, ((ends - 1) * N_FIFTHS / task.n_env_steps).astype(int))
    means = []
    for fifth in range(N_FIFTHS):
        here = index == fifth
        weights = lengths[here] if by_step else np.ones(here.sum())
        means.append(float(np.average(returns[here], weights=weights)) if here.any() else float("nan"))
    return means


def interval(resampled: np.ndarray) -> tuple[float, float]:
    """The middle 95 %."""
    low, high = np.nanquantile(resampled, [0.025, 0.975])
    return float(low), float(high)


def resampled_means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Means over seeds drawn with replacement."""
    chosen = rng.integers(len(values), size=(N_RESAMPLES, len(values)))
    means: np.ndarray = np.nanmean(values[chosen], axis=1)
    return means


def summary(task_name: str, directory: Path, seeds: range, init: str) -> list[dict[str, Any]]:
    """A row for each fifth of the training, and way of counting."""
    task, rng = TASKS[task_name], np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for by_step in (False, True):
        curves = {
            framework: np.array(
                [
                    fifths(task, json.loads(Run(task_name, framework, seed, init).file(directory).read_text()), by_step)
                    for seed in seeds
                ]
            )
            for framework in FRAMEWORKS
        }
        for fifth in range(N_FIFTHS):
            row: dict[str, Any] = {"task": task_name, "counted": "by step" if by_step else "by episode"}
            row |= {"fifth": fifth + 1, "seeds": len(seeds)}
            resampled = {}
            for framework, curve in curves.items():
                resampled[framework] = resampled_means(curve[:, fifth], rng)
                row[framework] = float(np.nanmean(curve[:, fifth]))
                row[f"{framework} low"], row[f"{framework} high"] = interval(resampled[framework])
            row["difference"] = row[FRAMEWORKS[0]] - row[FRAMEWORKS[1]]
            difference = resampled[FRAMEWORKS[0]] - resampled[FRAMEWORKS[1]]
            row["difference low"], row["difference high"] = interval(difference)
            rows.append(row)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page: episodes weighted by their length."""

    def shown(row: dict[str, Any], name: str) -> str:
        return f"{row[name]:.1f} ({row[f'{name} low']:.1f} to {row[f'{name} high']:.1f})"

    cells = [
        [row["task"], str(row["fifth"]), str(row["seeds"]), *(shown(row, name) for name in (*FRAMEWORKS, "difference"))]
        for row in rows
        if row["counted"] == "by step"
    ]
    return markdown_table(["task", "fifth", "seeds", *FRAMEWORKS, "difference"], cells)


def chart(rows: list[dict[str, Any]]) -> str:
    """Return the chart of the page: the learning curves of both frameworks with their intervals."""
    panels = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task and row["counted"] == "by step"]
        maze, peer = (
            Curve(*([row[f"{name}{end}"] for row in of_task] for end in ("", " low", " high"))) for name in FRAMEWORKS
        )
        panels[task] = (maze, peer)
    title = "Mean return of Maze and stable-baselines3 by fifth of the run, with 95 % intervals"
    return curve_chart(title, panels, ("Maze", "stable-baselines3"), "fifth of the run")


def write_page(page: Path, results: Path) -> None:
    """Write table and chart of a page from stored rows."""
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    write_table(page, "equal_settings", markdown(rows))
    page.with_suffix(".svg").write_text(chart(rows), encoding="utf-8")


def main() -> None:
    """Train and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, 0 and up")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--init", choices=("common", "own"), default="common", help="Maze's first weights")
    parser.add_argument("--output", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--page", type=Path, help="page whose table, chart and stored rows are replaced")
    parser.add_argument("--one", nargs=4, metavar=("TASK", "FRAMEWORK", "SEED", "INIT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    directory = arguments.output
    directory.mkdir(parents=True, exist_ok=True)
    if arguments.one:
        task, framework, seed, init = arguments.one
        train(Run(task, framework, int(seed), init), directory)
        return
    seeds = range(arguments.seeds)
    runs = [
        Run(task, framework, seed, arguments.init)
        for task in arguments.algorithms
        for seed in seeds
        for framework in FRAMEWORKS
    ]
    train_all(runs, directory, arguments.processes)
    rows = [row for task in arguments.algorithms for row in summary(task, directory, seeds, arguments.init)]
    with (directory / "equal_settings.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(markdown(rows))
    if arguments.page:
        results = arguments.page.with_suffix(".jsonl")
        results.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        write_page(arguments.page, results)


if __name__ == "__main__":
    main()
