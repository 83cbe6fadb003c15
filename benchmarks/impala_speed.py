"""IMPALA: environment steps per second, learner included: two actors, one process, A2C, RLlib.

All contenders learn CartPole-v1 with the same two-layer 64-unit networks; each update takes 2 rollouts of 100 steps.

* *subprocess*: two actors in processes of their own, while the learner learns
* *sequential*: the same two actors taking turns in the process of the learner
* *a2c*: Maze's A2C with as many environments in process

Besides, an environment whose step waits a millisecond, as for a simulator elsewhere: what actors are for.
Rounds alternate between the contenders; the median of the rates and of the per-round ratios is printed. With the cheap
environment, ratios above 1 need free cores.

Where Ray is installed (an environment of its own is best: `pip install "ray[tune]>=2.55,<3" dm-tree lz4 ormsgpack`),
RLlib's IMPALA joins: two environment runners, the same networks, rollouts and batches. Its driver waits for samples up
to 50 ms; with RLlib's default it asks for them in a loop, which takes a core away from the environment runners.

    python benchmarks/impala_speed.py
    python benchmarks/impala_speed.py --envs-per-actor 8 --quick
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import torch
from torch import nn

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_critic import TorchSharedStateCritic
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet, FlattenConcatStateValueNet
from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
from maze.train.parallelization.distributed_actors.sequential_distributed_actors import SequentialDistributedActors
from maze.train.parallelization.distributed_actors.subproc_distributed_actors import SubprocDistributedActors
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.impala.impala_algorithm_config import ImpalaAlgorithmConfig
from maze.train.trainers.impala.impala_trainer import IMPALA

N_ACTORS, N_STEPS = 2, 100
Contender = Callable[[int], float]
"""Makes a number of updates, returns the environment steps per second."""


class WaitingWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """Waits in every step, as for a simulator in another process.

    :param env: The environment.
    :param seconds: How long.
    """

    def __init__(self, env: Any, seconds: float) -> None:
        super().__init__(env)
        self._seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        return self.env.step(action)


def make_env(step_seconds: float) -> GymMazeEnv:
    """CartPole, with steps that take longer if wanted."""
    if not step_seconds:
        return GymMazeEnv("CartPole-v1")
    return GymMazeEnv(WaitingWrapper(gym.make("CartPole-v1"), step_seconds))


def make_model() -> TorchActorCritic:
    """The networks that all contenders have."""
    env = make_env(0.0)
    mapper = DistributionMapper(action_space=env.action_space, distribution_mapper_config={})
    obs_shapes: dict[str, Sequence[int]] = {"observation": (4,)}
    policy_net = FlattenConcatPolicyNet(
        obs_shapes, {"action": mapper.required_logits_shape("action")}, hidden_units=[64, 64], non_lin=nn.Tanh
    )
    value_net = FlattenConcatStateValueNet(obs_shapes, hidden_units=[64, 64], non_lin=nn.Tanh)
    critic = TorchSharedStateCritic({0: value_net}, env.observation_spaces_dict, "cpu", stack_observations=False)
    return TorchActorCritic(TorchPolicy({0: policy_net}, mapper, "cpu"), critic, "cpu")


@contextlib.contextmanager
def impala(kind: str, step_seconds: float, envs_per_actor: int) -> Iterator[Contender]:
    """IMPALA with actors of one kind; they keep running from one call to the next."""
    model = make_model()
    factory = partial(make_env, step_seconds)
    seeds = list(range(N_ACTORS * envs_per_actor))
    sizes = (N_STEPS, N_ACTORS, N_ACTORS)
    actors: DistributedActors
    if kind == "subprocess":
        actors = SubprocDistributedActors(
            factory, model.policy, *sizes, 1.0, "forkserver", seeds, [1, 2], envs_per_actor=envs_per_actor
        )
    else:
        actors = SequentialDistributedActors(factory, model.policy, *sizes, seeds, envs_per_actor=envs_per_actor)
    config = ImpalaAlgorithmConfig(
        n_rollout_steps=N_STEPS, num_actors=N_ACTORS, actors_batch_size=N_ACTORS, envs_per_actor=envs_per_actor
    )
    trainer = IMPALA(config, actors, None, model, None)
    actors.start()

    def run(n_updates: int) -> float:
        start = time.perf_counter()
        for _ in range(n_updates):
            trainer._update()
        return n_updates * N_STEPS * actors.n_envs / (time.perf_counter() - start)

    try:
        yield run
    finally:
        actors.stop()


@contextlib.contextmanager
def a2c(step_seconds: float, envs_per_actor: int) -> Iterator[Contender]:
    """A2C with the same rollouts."""
    n_envs = N_ACTORS * envs_per_actor
    env = SequentialVectorEnv([partial(make_env, step_seconds)] * n_envs)
    config = A2CAlgorithmConfig(n_rollout_steps=N_STEPS)
    trainer = A2C(config, RolloutGenerator(env), None, make_model(), None)

    def run(n_updates: int) -> float:
        start = time.perf_counter()
        for _ in range(n_updates):
            trainer._update()
        return n_updates * N_STEPS * n_envs / (time.perf_counter() - start)

    yield run
    env.close()


@contextlib.contextmanager
def rllib(envs_per_actor: int) -> Iterator[Contender]:
    """RLlib's IMPALA with two environment runners."""
    ray: Any = importlib.import_module("ray")
    algorithms: Any = importlib.import_module("ray.rllib.algorithms.impala")
    model_configs: Any = importlib.import_module("ray.rllib.core.rl_module.default_model_config")

    ray.init(num_cpus=N_ACTORS + 1, include_dashboard=False, log_to_driver=False)
    networks = model_configs.DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
    config = (
        algorithms.IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=N_ACTORS, num_envs_per_env_runner=envs_per_actor, rollout_fragment_length=N_STEPS)
        .learners(num_learners=0)
        .rl_module(model_config=networks)
        .training(
            train_batch_size_per_learner=N_STEPS * N_ACTORS * envs_per_actor,
            lr=0.0005,
            timeout_s_sampler_manager=0.05,
        )
        .reporting(min_time_s_per_iteration=2, min_sample_timesteps_per_iteration=0)
    )
    algorithm = config.build_algo()
    while not _rllib_steps(algorithm.train()):
        pass  # the environment runners are still starting

    def run(n_updates: int) -> float:
        del n_updates  # an iteration of RLlib has a fixed duration
        before = _rllib_steps(algorithm.train())
        start = time.perf_counter()
        return (_rllib_steps(algorithm.train()) - before) / (time.perf_counter() - start)

    try:
        yield run
    finally:
        algorithm.stop()
        ray.shutdown()


def _rllib_steps(results: dict[str, Any]) -> float:
    """Environment steps that the learner has been given so far."""
    return float(results["env_runners"].get("num_env_steps_sampled_lifetime", 0.0))


def measure(contenders: dict[str, Any], n_rounds: int, n_updates: int) -> dict[str, list[float]]:
    """Rates of all rounds, the contenders taking turns."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(io.StringIO()):
        runs = {name: stack.enter_context(contender) for name, contender in contenders.items()}
        for run in runs.values():
            run(5)
        for _ in range(n_rounds):
            for name, run in runs.items():
                run(2)  # what actors have collected while others ran does not count
                rates[name].append(run(n_updates))
    return rates


def report(title: str, rates: dict[str, list[float]]) -> dict[str, float]:
    """Print the table, return the ratios to the first contender."""
    first = next(iter(rates))
    print(f"\n{title}\n{'':<14}{'env steps/s':>14}{first + ' is faster by':>28}")
    ratios = {}
    for name, values in rates.items():
        ratio = median(a / b for a, b in zip(rates[first], values, strict=True))
        ratios[name] = ratio
        print(f"{name:<14}{median(values):>14,.0f}{'' if name == first else f'{ratio:.2f} x':>28}")
    return ratios


def main() -> None:
    """Run the selected measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs-per-actor", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="also write rates and ratios here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    n_rounds = 3 if arguments.quick else 7
    results = {}
    for step_seconds, n_updates in ((0.0, 30), (0.001, 6)):
        contenders: dict[str, Any] = {
            "subprocess": impala("subprocess", step_seconds, arguments.envs_per_actor),
            "sequential": impala("sequential", step_seconds, arguments.envs_per_actor),
            "a2c": a2c(step_seconds, arguments.envs_per_actor),
        }
        if importlib.util.find_spec("ray") is not None and not step_seconds:
            contenders["rllib"] = rllib(arguments.envs_per_actor)
        elif not step_seconds:
            print("RLlib is not installed here: measured without it.")
        cost = f" + {step_seconds * 1000:g} ms of waiting" if step_seconds else ""
        title = f"CartPole-v1{cost}, {N_ACTORS} actors x {arguments.envs_per_actor} environments, {os.cpu_count()} CPUs"
        rates = measure(contenders, n_rounds, n_updates)
        results[title] = {"rates": rates, "ratios": report(title, rates)}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
