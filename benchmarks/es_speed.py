"""Episodes per second of evolution strategies: perturbed policies evaluated together, and one at a time.

All ways play the same kind of episodes in one run, in turns, so that a busy machine slows them down alike: CartPole-v1,
cut off after 200 steps, with mirrored perturbations of a policy that balances the pole.

    python benchmarks/es_speed.py

"one after another, torch" writes each perturbation into the policy and asks its torch network for every step; with
"NumPy" it acts through Maze's compiled forward pass; the ratios relate the others to the former. "environments alone"
plays episodes of the same lengths with a rule instead of a policy, in one process: no way of asking policies in this
process can be faster, and "of the floor" says how near each comes to it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet
from maze.train.parallelization.vector_env.vector_env_utils import with_stats
from maze.train.trainers.es.distributed.es_distributed_rollouts import ESDistributedRollouts
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import ESDummyDistributedRollouts
from maze.train.trainers.es.distributed.es_rollout_wrapper import ESRolloutWorkerWrapper
from maze.train.trainers.es.distributed.es_subproc_distributed_rollouts import ESSubprocDistributedRollouts
from maze.train.trainers.es.es_algorithm_config import ESAlgorithmConfig
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable
from maze.train.trainers.es.es_trainer import ESTrainer
from maze.train.trainers.es.es_utils import get_flat_parameters, set_flat_parameters

MAX_STEPS, NOISE_STDDEV, SEED = 200, 0.02, 1
FLOOR = "environments alone"


class TorchOnlyNet(FlattenConcatPolicyNet):
    """The same network, but computed by torch."""

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().forward(x)


def make_env() -> GymMazeEnv:
    return GymMazeEnv("CartPole-v1")


def make_policy(net: type[FlattenConcatPolicyNet]) -> TorchPolicy:
    torch.manual_seed(SEED)
    network = net({"observation": (4,)}, {"action": (2,)}, [64, 64], nn.Tanh)
    return TorchPolicy({0: network}, DistributionMapper(make_env().action_space, {}), "cpu")


def trained(policy: TorchPolicy, noise: SharedNoiseTable) -> torch.Tensor:
    """Parameters that balance the pole."""
    config = ESAlgorithmConfig(n_epochs=15, max_steps=MAX_STEPS)
    rollouts = ESDummyDistributedRollouts(make_env(), 0, noise, SEED, env_factory=make_env, env_seed=SEED)
    with contextlib.redirect_stdout(io.StringIO()):
        ESTrainer(config, policy, noise, None).train(rollouts)
    return get_flat_parameters(policy)


def one_after_another(policy: TorchPolicy, noise: SharedNoiseTable) -> Callable[[int], int]:
    env = ESRolloutWorkerWrapper(make_env(), noise, SEED)
    env.max_steps = MAX_STEPS
    env.seed(SEED)

    def play(n_episodes: int) -> int:
        return sum(sum(env.generate_training(policy, NOISE_STDDEV).lengths) for _ in range(n_episodes // 2))

    return play


def together(policy: TorchPolicy, rollouts: ESDistributedRollouts) -> Callable[[int], int]:
    updates = itertools.count()

    def play(n_episodes: int) -> int:
        rollouts.prepare_update(next(updates), n_episodes, 0)
        results = rollouts.generate_rollouts(policy, MAX_STEPS, NOISE_STDDEV, None)
        # `results` comes last: a further request would play another pair
        n_steps = sum(sum(result.lengths) for _, result in zip(range(n_episodes // 2), results, strict=False))
        results.close()
        return n_steps

    return play


def environments_alone(episode_lengths: list[int]) -> Callable[[int], int]:
    """The cost of stepping, resetting and reducing statistics, which does not depend on how policies are evaluated."""
    env = with_stats(make_env())
    env.seed(SEED)
    lengths = itertools.cycle(episode_lengths)

    def play(n_episodes: int) -> int:
        n_steps = 0
        for length in itertools.islice(lengths, n_episodes):
            position, velocity, angle, angular_velocity = env.reset()["observation"].tolist()
            for _ in range(length):
                push = angle + 0.4 * angular_velocity + 0.05 * position + 0.1 * velocity > 0.0
                observation, _, done, _ = env.step({"action": int(push)})
                position, velocity, angle, angular_velocity = observation["observation"].tolist()
                n_steps += 1
                if done:
                    break
            env.publish_episode()
        return n_steps

    return play


def lengths_of(policy: TorchPolicy, rollouts: ESDistributedRollouts, n_episodes: int) -> list[int]:
    rollouts.prepare_update(0, n_episodes, 0)
    results = rollouts.generate_rollouts(policy, MAX_STEPS, NOISE_STDDEV, None)
    return [length for _, result in zip(range(n_episodes // 2), results, strict=False) for length in result.lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=64, help="number of episodes per update")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the ratios to the first way")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    noise = SharedNoiseTable(10_000_000)
    policy, torch_policy = make_policy(FlattenConcatPolicyNet), make_policy(TorchOnlyNet)
    set_flat_parameters(torch_policy, trained(policy, noise))
    subproc = ESSubprocDistributedRollouts(make_env, 2, 0, noise, [SEED], SEED, n_eval_rollouts=0)

    def dummy() -> ESDistributedRollouts:
        return ESDummyDistributedRollouts(make_env(), 0, noise, SEED, env_factory=make_env, env_seed=SEED)

    ways: dict[str, Any] = {
        "one after another, torch": one_after_another(torch_policy, noise),
        "one after another, NumPy": one_after_another(policy, noise),
        "together, torch.func.vmap": together(torch_policy, dummy()),
        "together, NumPy": together(policy, dummy()),
        "together, NumPy, 2 processes": together(policy, subproc),
        FLOOR: environments_alone(lengths_of(policy, dummy(), arguments.episodes)),
    }
    seconds, steps = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    for play in ways.values():
        play(arguments.episodes)  # builds what is built once
    for _ in range(arguments.rounds):
        for name, play in ways.items():
            start = time.perf_counter()
            steps[name] += play(arguments.episodes)
            seconds[name] += time.perf_counter() - start
    subproc.close()
    reference = next(iter(ways))
    n_episodes = arguments.episodes * arguments.rounds
    print(f"{'':<30}{'episodes/s':>12}{'ratio':>8}{'steps/s':>10}{'steps/episode':>15}{'of the floor':>14}")
    ratios = {}
    for name in ways:
        rate = n_episodes / seconds[name]
        ratios[name] = ratio = rate / (n_episodes / seconds[reference])
        per_second, per_episode = steps[name] / seconds[name], steps[name] / n_episodes
        of_floor = per_second / (steps[FLOOR] / seconds[FLOOR])
        print(f"{name:<30}{rate:>12.1f}{ratio:>8.2f}{per_second:>10,.0f}{per_episode:>15.0f}{of_floor:>14.0%}")
    if arguments.json:
        arguments.json.write_text(json.dumps(ratios, indent=2))


if __name__ == "__main__":
    main()
