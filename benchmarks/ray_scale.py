"""Throughput of Ray actors relative to their environments alone and to worker processes.

    python benchmarks/ray_scale.py sleeping                  # steps of 5 ms, one environment an actor, 32 actors
    python benchmarks/ray_scale.py sleeping --actors 2 4 8 16 32      # one after the other, beside the model
    python benchmarks/ray_scale.py sleeping --sigma 1        # step times are lognormal with this sigma
    python benchmarks/ray_scale.py first --sigma 1 --actors 16 --fragment 50   # PPO, all and the first 90 %
    python benchmarks/ray_scale.py cartpole es               # beside runner=local, rounds alternate
    python benchmarks/ray_scale.py rllib --rounds 3          # PPO and IMPALA beside RLlib's, same actors and batches

In `sleeping` there is no learner: what is measured is what remains when its time is taken off. Shares are the part of
the time in which actors stepped their environments, so that they compare with loops of their own on the same machine at
the same time; one loop in this process is measured before and after. What `cluster_model.py` computes is for actors as
fast as that loop. Medians of rounds. Ray is started for the benchmark, with as many CPUs as actors ask for (sleeping
needs none). An actor is a process with torch: 0.2 GB, and about two seconds of a core until it is there, so that 32 of
them need 7 GB, and on two cores a minute or two before anything is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from cluster_model import Cluster, synchronous

from maze.api.run_context import RunContext
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.worker_pool import ClusterEvents
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.distributions.distribution_mapper import DistributionMapper
from maze.train.parallelization.on_ray.cluster import ActorPool
from maze.train.parallelization.on_ray.ray_placement import OnRay
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv


class SleepingEnv(gym.Env[np.ndarray, int]):
    """Steps that take time, and no CPU.

    :param seconds: Mean time of a step.
    :param sigma: Of its logarithm; 0: all take the same time.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, seconds: float, sigma: float) -> None:
        self._seconds, self._sigma = seconds, sigma

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._n_steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Sleeps."""
        time.sleep(self._seconds * self.np_random.lognormal(-(self._sigma**2) / 2, self._sigma))
        self._n_steps += 1
        return np.zeros(4, np.float32), 1.0, False, self._n_steps == 200, {}


def make_env(seconds: float, sigma: float) -> GymMazeEnv:
    """One environment."""
    return GymMazeEnv(SleepingEnv(seconds, sigma))


def make_policy(env: Any) -> TorchPolicy:
    """A small network."""
    mapper = DistributionMapper(env.action_space, {})
    n_inputs = int(np.prod(env.observation_space["observation"].shape))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(n_inputs, 2)

        def forward(self, x: Any) -> Any:
            return {"action": self.layer(x["observation"])}

    return TorchPolicy({0: Net()}, mapper, "cpu")


def rate_alone(factory: Callable[[], Any], n_steps: int) -> float:
    """Environment steps per second of one environment in this process."""
    env = SequentialVectorEnv([factory])
    env.seed([1])
    policy = make_policy(env.envs[0])
    generator = RolloutGenerator(env)
    columns = generator.allocate(n_steps)
    generator.collect(policy, columns)
    start = time.perf_counter()
    generator.collect(policy, columns)
    env.close()
    return n_steps / (time.perf_counter() - start)


def work_of(pool: ActorPool, event: Callable[..., Any]) -> float:
    """Return one statistic of what the actors have done since the last call."""
    statistics = LogStatsAggregator(LogStatsLevel.EPOCH)
    pool.report_work(statistics)
    statistics.reduce()
    return float(statistics.last_value(event))


@contextlib.contextmanager
def placed(n_actors: int) -> Iterator[OnRay]:
    """Actors that are there already."""
    placement = OnRay(start_timeout=600.0)
    placement.env_groups = n_actors
    try:
        placement.actor_pool(n_actors)
        yield placement
    finally:
        placement.close()


def sleeping(options: argparse.Namespace) -> dict[str, float]:
    """PPO's fragments (all are waited for) and IMPALA's, in environment steps per second and as shares."""
    factory = partial(make_env, options.step_ms / 1e3, options.sigma)
    n_actors, n_steps = options.actors, options.fragment
    alone = [rate_alone(factory, 200)]
    with placed(n_actors) as placement:
        env = placement.vector_env(factory, n_actors)
        env.seed(list(range(n_actors)))
        policy = make_policy(factory())
        generator = RolloutGenerator(env, record_logits=True)
        columns = generator.allocate(n_steps, policy)
        generator.collect(policy, columns)
        rounds, pool = [], placement.actor_pool(n_actors)
        work_of(pool, ClusterEvents.actors_busy)
        for _ in range(options.rounds):
            start = time.perf_counter()
            generator.collect(policy, columns)
            rounds.append(n_steps * n_actors / (time.perf_counter() - start))
        synchronous_share = work_of(pool, ClusterEvents.actors_busy)
        batch = max(1, n_actors // 4)
        actors = placement.actors(
            env_factory=factory, policy=policy, n_rollout_steps=n_steps, n_actors=n_actors, batch_size=batch,
            queue_out_of_sync_factor=n_actors / batch, actor_env_seeds=list(range(n_actors)),
            actor_agent_seeds=list(range(n_actors)),
        )  # fmt: skip
        actors.start()
        # two tickets for each actor, as in IMPALA's defaults: one is collected while the other one waits
        n_warm, n_batches = 8, 4 * options.rounds
        for _ in range(n_warm):
            actors.collect_batch()
            actors.broadcast_updated_policy(policy.state_dict())
        work_of(pool, ClusterEvents.actors_busy)
        start = time.perf_counter()
        for _ in range(n_batches):
            actors.collect_batch()
            actors.broadcast_updated_policy(policy.state_dict())
        asynchronous = n_batches * batch * n_steps / (time.perf_counter() - start)
        asynchronous_share = work_of(pool, ClusterEvents.actors_busy)
        actors.stop()
    alone.append(rate_alone(factory, 200))
    model = Cluster(
        n_actors, 1e3 / median(alone), options.sigma, fragment=n_steps, learner_us=0.0, weights_mb=0.0,
        actors_per_node=n_actors,
    )  # fmt: skip
    return {
        "one environment alone, steps per second": median(alone),
        "PPO, steps per second": median(rounds),
        "PPO, times the model": median(rounds) / synchronous(model)[0],
        "PPO, share": synchronous_share,
        "IMPALA, steps per second": asynchronous,
        "IMPALA, times the model": asynchronous / model.alone,
        "IMPALA, share": asynchronous_share,
    }


def first(options: argparse.Namespace) -> dict[str, float]:
    """Fragments of PPO that waits for all and of PPO that waits for the first 90 %, rounds alternating."""
    factory = partial(make_env, options.step_ms / 1e3, options.sigma)
    n_actors, n_steps, n_updates = options.actors, options.fragment, 20
    computed = {
        share: Cluster(n_actors, options.step_ms, options.sigma, fragment=n_steps, wait_for=share)
        for share in (1.0, 0.9)
    }
    expected = {share: cluster.n_samples / cluster.collecting_seconds() for share, cluster in computed.items()}
    rates: dict[float, list[float]] = {1.0: [], 0.9: []}
    with placed(n_actors) as placement:
        collecting = {}
        for share in rates:
            placement.wait_for = share
            env = placement.vector_env(factory, n_actors, "train")
            env.seed(list(range(n_actors)))
            policy = make_policy(factory())
            generator = RolloutGenerator(env, record_logits=True)
            collecting[share] = env, policy, generator, generator.allocate(n_steps, policy)
        for _ in range(options.rounds + 1):  # the first one sets up
            for share, (env, policy, generator, columns) in collecting.items():
                generator.collect(policy, columns)  # receives late fragments, so that no side has a head start
                start = time.perf_counter()
                for _ in range(n_updates):
                    generator.collect(policy, columns)
                rates[share].append(n_updates * n_steps * columns.n_envs / (time.perf_counter() - start))
                env.state_dict()  # waits for those that are late
        ages = collecting[0.9][0]._ages
    ratio = median(one / every for every, one in zip(rates[1.0][1:], rates[0.9][1:], strict=True))
    return {
        "all, steps per second": median(rates[1.0][1:]),
        "first 90 %, steps per second": median(rates[0.9][1:]),
        "first 90 %, times all": ratio,
        "first 90 %, times all, computed": expected[0.9] / expected[1.0],
        "mean age of fragments": float(np.mean(ages)),
        "share of fragments dropped": float(np.mean(np.array(ages) > 1)),
    }


def beside_local(algorithm: str, overrides: dict[str, Any], runners: dict[str, dict[str, Any]], n_rounds: int) -> Any:
    """Seconds of an epoch with each runner, rounds alternating, and the median ratio."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        runs = {
            name: stack.enter_context(
                RunContext(
                    env="CartPole-v1", algorithm=algorithm, runner=name, run_dir=f"{directory}/{name}", silent=True,
                    overrides={"seeding.env_base_seed": 1, "seeding.agent_base_seed": 1, **overrides, **own},
                )
            )
            for name, own in runners.items()
        }  # fmt: skip
        for _ in range(n_rounds + 1):  # the first one sets up
            for name, run in runs.items():
                start = time.perf_counter()
                run.train(n_epochs=1)
                seconds[name].append(time.perf_counter() - start)
    one, other = (values[1:] for values in seconds.values())
    ratio = median(local / ray for local, ray in zip(one, other, strict=True))
    return {**{f"{name}, s": median(values[1:]) for name, values in seconds.items()}, "ray, times local": ratio}


def cartpole(options: argparse.Namespace) -> Any:
    """PPO, fragments of 100 steps of 8 environments, 2 actors."""
    values = {"n_rollout_steps": 100, "epoch_length": 10, "rollout_evaluator": None, "patience": 0}
    overrides = {**{f"algorithm.{key}": value for key, value in values.items()}, "runner.concurrency": 16}
    return beside_local("ppo", overrides, {"local": {}, "ray": {"runner.env_groups": 2}}, options.rounds)


def es(options: argparse.Namespace) -> Any:
    """Evolution strategies, a population of 256, 2 actors."""
    overrides = {"algorithm.n_rollouts_per_update": 256, "runner.n_eval_rollouts": 0, "algorithm.max_steps": 200}
    runners = {"local": {"runner.n_train_workers": 2}, "ray": {"runner.env_groups": 2}}
    return beside_local("es", overrides, runners, options.rounds)


def rllib(options: argparse.Namespace) -> Any:
    """PPO and IMPALA beside RLlib's: two actors of eight CartPoles, the same network, batches and passes over them.

    Both run on the same Ray on this machine, rounds alternating. RLlib is given what Maze's actors have: eight
    environments in each runner, stepped in its process.
    """
    n_steps, n_envs, n_updates = 100, 8, options.updates
    ours = {"n_rollout_steps": n_steps, "epoch_length": n_updates, "rollout_evaluator": None, "patience": 0}
    own = {
        "ppo": {"n_optimization_epochs": 4, "batch_size": 400},
        "impala": {"num_actors": 2, "envs_per_actor": n_envs, "actors_batch_size": 2},
    }
    results: dict[str, float] = {}
    for name, more in own.items():
        rates: dict[str, list[float]] = {"maze": [], "rllib": []}
        with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
            groups: dict[str, Any] = {"runner.env_groups": 2, "runner.concurrency": 2 * n_envs} if name == "ppo" else {}
            groups["runner.placement.ray_config"] = {"num_cpus": 8}
            values = {f"algorithm.{key}": value for key, value in {**ours, **more}.items()}
            run = stack.enter_context(
                RunContext(
                    env="CartPole-v1", algorithm=name, runner="ray", model="flatten_concat", run_dir=directory,
                    silent=True, overrides={**values, **groups},
                )
            )  # fmt: skip
            run.train(n_epochs=1)  # starts the Ray that both run on
            other = stack.enter_context(_of_rllib(name, n_steps, n_envs))
            for _ in range(options.rounds + 1):  # the first one sets up
                start = time.perf_counter()
                run.train(n_epochs=1)
                rates["maze"].append(n_updates * 2 * n_envs * n_steps / (time.perf_counter() - start))
                start, n_sampled = time.perf_counter(), 0
                while n_sampled < n_updates * 2 * n_envs * n_steps:
                    n_sampled += other()
                rates["rllib"].append(n_sampled / (time.perf_counter() - start))
        for whose, of_rounds in rates.items():
            results[f"{name}, {whose}, steps per second"] = median(of_rounds[1:])
        ratios = [a / b for a, b in zip(rates["maze"][1:], rates["rllib"][1:], strict=True)]
        results[f"{name}, times RLlib"] = median(ratios)
    return results


@contextlib.contextmanager
def _of_rllib(name: str, n_steps: int, n_envs: int) -> Iterator[Callable[[], int]]:
    """One iteration of RLlib's algorithm: the number of environment steps that it has learned from."""
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    batch = 2 * n_envs * n_steps
    config: Any = PPOConfig() if name == "ppo" else IMPALAConfig()
    config = config.environment("CartPole-v1").env_runners(
        num_env_runners=2, num_envs_per_env_runner=n_envs, rollout_fragment_length=n_steps
    )
    config = config.rl_module(
        model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
    )
    if name == "ppo":
        config = config.training(train_batch_size_per_learner=batch, minibatch_size=400, num_epochs=4)
    else:
        config = config.training(train_batch_size_per_learner=batch)
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.tune.utils.util").setLevel(logging.ERROR)
    algorithm = config.build_algo()
    before = 0

    def iterate() -> int:
        nonlocal before
        total = int(algorithm.train()["num_env_steps_sampled_lifetime"])
        n_new, before = total - before, total
        return n_new

    try:
        yield iterate
    finally:
        algorithm.stop()


SECTIONS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "sleeping": sleeping,
    "first": first,
    "cartpole": cartpole,
    "es": es,
    "rllib": rllib,
}


OF_SLEEPING = ("sleeping", "first")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=list(SECTIONS))
    parser.add_argument(
        "--actors", type=int, nargs="+", default=[32], help="with sleeping and first, one after another"
    )
    parser.add_argument("--fragment", type=int, default=100, help="steps of a fragment")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--sigma", type=float, default=0.0, help="of lognormal step times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20, help="updates of a round, with rllib")
    parser.add_argument("--json", type=Path, help="writes the results into a file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for section in options.sections:
        for n_actors in options.actors if section in OF_SLEEPING else [0]:
            name = f"{section}, {n_actors} actors" if n_actors else section
            results[name] = result = SECTIONS[section](argparse.Namespace(**{**vars(options), "actors": n_actors}))
            print(name, {key: round(float(value), 3) for key, value in result.items()}, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
