"""DQN: updates per second relative to stable-baselines3, in one run.

Both train CartPole-v1 with one environment step and one update each, batches of 128, networks of two hidden layers of
256 units with ReLU, the same learning rate, exploration and targets that follow every 250 updates, on one torch thread.
As stable-baselines3 has neither, double Q-learning and duelling heads are off (`--double` shows what the former costs).
Maze runs with its default statistics switched on, stable-baselines3 with its default monitor.

Many short rounds alternate between the two; medians and the median of the per-round ratios are printed, by CPU time of
the process (which other processes disturb less) and by wall time. Absolute numbers depend on the machine, the ratios
much less.

    python benchmarks/dqn_speed.py            # 41 rounds of 400 updates
    python benchmarks/dqn_speed.py --quick    # eleven rounds of 200
    python benchmarks/dqn_speed.py --json out.json
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

ENV_ID = "CartPole-v1"
BATCH_SIZE, HIDDEN_UNITS, LEARNING_RATE, BUFFER_SIZE, WARM_UP, TARGET_INTERVAL = 128, [256, 256], 1e-3, 50_000, 300, 250
EPSILON = 0.05

Contender = Callable[[int], None]
"""Does a number of environment steps with one update each."""


def maze(double: bool = False) -> Contender:
    """Maze's trainer, without evaluation and files.

    :param double: Whether the learned network chooses the actions that the targets value.
    """
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
    from maze.perception.models.custom_model_composer import CustomModelComposer
    from maze.train.parallelization.distributed_actors.dummy_distributed_workers_with_buffer import (
        DummyDistributedWorkersWithBuffer,
    )
    from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
    from maze.train.trainers.dqn.dqn_algorithm_config import DQNAlgorithmConfig
    from maze.train.trainers.dqn.dqn_trainer import DQN, EpsilonGreedyPolicy

    def make_env() -> Any:
        return GymMazeEnv(ENV_ID)

    env = make_env()
    nets = "maze.perception.models.built_in.flatten_concat.FlattenConcat"
    sizes = {"hidden_units": HIDDEN_UNITS, "non_lin": "torch.nn.ReLU"}
    composer = CustomModelComposer(
        action_spaces_dict=env.action_spaces_dict,
        observation_spaces_dict=env.observation_spaces_dict,
        agent_counts_dict=env.agent_counts_dict,
        distribution_mapper_config=list(DQNAlgorithmConfig.distributions),
        policy={
            "_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer",
            "networks": [{"_target_": f"{nets}PolicyNet", **sizes}],
            "substeps_with_separate_agent_nets": [],
        },
        critic={
            "_target_": "maze.perception.models.critics.StepStateCriticComposer",
            "networks": [{"_target_": f"{nets}StateValueNet", **sizes}],
        },
    )
    policy, critic = composer.policy, composer.critic
    assert policy is not None
    config = DQNAlgorithmConfig(
        n_epochs=1, epoch_length=1, batch_size=BATCH_SIZE, lr=LEARNING_RATE, double=double, dueling=False,
        target_update_interval=TARGET_INTERVAL, initial_buffer_size=WARM_UP, replay_buffer_size=BUFFER_SIZE,
        initial_epsilon=EPSILON, final_epsilon=EPSILON, rollout_evaluator=None,
    )  # fmt: skip
    workers = DummyDistributedWorkersWithBuffer(
        env_factory=make_env, worker_policy=EpsilonGreedyPolicy(policy), n_rollout_steps=1, n_workers=1,
        batch_size=BATCH_SIZE, rollouts_per_iteration=WARM_UP, split_rollouts_into_transitions=True,
        env_instance_seeds=[0], replay_buffer=UniformReplayBuffer(BUFFER_SIZE, seed=0),
    )  # fmt: skip
    trainer = DQN(config, TorchActorCritic(policy, critic, "cpu"), workers, seed=0)  # type: ignore[arg-type]
    workers.collect_rollouts()
    workers.rollouts_per_iteration = 1

    def run(n_updates: int) -> None:
        config.epoch_length = n_updates
        trainer.train(n_epochs=1)

    return run


def stable_baselines3() -> Contender:
    """The same with stable-baselines3."""
    from stable_baselines3 import DQN

    model = DQN(
        "MlpPolicy", ENV_ID, learning_rate=LEARNING_RATE, batch_size=BATCH_SIZE, buffer_size=BUFFER_SIZE,
        learning_starts=WARM_UP, train_freq=1, gradient_steps=1, target_update_interval=TARGET_INTERVAL,
        exploration_initial_eps=EPSILON, exploration_final_eps=EPSILON, policy_kwargs={"net_arch": HIDDEN_UNITS},
        device="cpu", seed=0,
    )  # fmt: skip
    model.learn(WARM_UP)

    def run(n_updates: int) -> None:
        model.learn(n_updates, reset_num_timesteps=False)

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--double", action="store_true", help="Maze with double Q-learning")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    n_rounds, n_updates = (11, 200) if arguments.quick else (41, 400)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    contenders = {"maze": maze(arguments.double), "stable-baselines3": stable_baselines3()}
    for run in contenders.values():
        with redirect_stdout(io.StringIO()):
            run(30)
    rates: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in contenders} for clock in ("cpu", "wall")}
    for index in range(n_rounds):
        order = list(contenders.items())
        for name, run in order if index % 2 == 0 else order[::-1]:
            wall, cpu = time.perf_counter(), time.process_time()
            with redirect_stdout(io.StringIO()):
                run(n_updates)
            rates["cpu"][name].append(n_updates / (time.process_time() - cpu))
            rates["wall"][name].append(n_updates / (time.perf_counter() - wall))
    results: dict[str, Any] = {}
    for clock, by_name in rates.items():
        ratios = [own / peer for own, peer in zip(*by_name.values(), strict=True)]
        results[clock] = {**{name: median(values) for name, values in by_name.items()}, "ratio": median(ratios)}
        shown = ", ".join(f"{name} {median(values):.1f}" for name, values in by_name.items())
        low, *_, high = quantiles(ratios, n=10)
        spread = f"{low:.2f} to {high:.2f}"
        print(
            f"updates per second of {clock} time: {shown}; ratio {median(ratios):.2f} (eight of ten rounds: {spread})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
