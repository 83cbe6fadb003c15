"""Memory of the learner and of Ray's object store during a run: neither may grow.

    python benchmarks/ray_memory.py                      # 500 updates each, IMPALA once more with a slow learner
    python benchmarks/ray_memory.py --updates 100 --actors 2 slow

Environments have observations of 64 x 64 numbers, so that a fragment has 1.6 MB (100 steps, one environment). Memory is
compared with that of the first ten updates, and of at least `--seconds` (what the object store holds is known once a
second; at least what may be under way at a time counts): `times` is the largest value of the last half of the run
divided by the largest of those. Learning itself is left out, because its memory does not depend on where environments
are; a slow learner sleeps for four times as long as an update takes the actors.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import torch
from ray_scale import make_policy, placed, work_of

from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.worker_pool import ClusterEvents
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.train.parallelization.on_ray.cluster import ray_session

FIRST_UPDATES = 10
LIMIT = 1.2
SLACK_MB = 2.0
"""The resolution of what the operating system says."""


class PictureEnv(gym.Env[np.ndarray, int]):
    """Observations that weigh something, and steps that cost nothing."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (64 * 64,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._n_steps = 0
        return self._picture(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Draw a picture."""
        self._n_steps += 1
        return self._picture(), 1.0, False, self._n_steps == 50, {}

    def _picture(self) -> np.ndarray:
        return np.full(64 * 64, self.np_random.uniform(-1, 1), np.float32)


def make_env() -> GymMazeEnv:
    """One environment."""
    return GymMazeEnv(PictureEnv())


def watched(pool: Any, update: Any, options: argparse.Namespace, pause: float) -> dict[str, tuple[float, float]]:
    """Memory in MB, the largest in the beginning and the largest in the last half."""
    samples: dict[str, list[float]] = {"object store": [], "learner": []}
    process, start, n_first = psutil.Process(), time.monotonic(), 0
    while len(samples["learner"]) < max(options.updates, 4 * n_first):
        update()
        time.sleep(pause)
        samples["object store"].append(work_of(pool, ClusterEvents.object_store_megabytes))
        samples["learner"].append(process.memory_info().rss / 2**20)
        if time.monotonic() - start < options.seconds or len(samples["learner"]) < FIRST_UPDATES:
            n_first += 1
    return {name: (max(values[:n_first]), max(values[len(values) // 2 :])) for name, values in samples.items()}


def synchronous(options: argparse.Namespace, placement: Any, pause: float) -> dict[str, tuple[float, float]]:
    """PPO's fragments: all are waited for."""
    env = placement.vector_env(make_env, options.actors)
    env.seed(list(range(options.actors)))
    policy = make_policy(make_env())
    generator = RolloutGenerator(env)
    columns = generator.allocate(options.fragment, policy)
    return watched(placement.actor_pool(options.actors), partial(generator.collect, policy, columns), options, pause)


def asynchronous(options: argparse.Namespace, placement: Any, pause: float) -> dict[str, tuple[float, float]]:
    """IMPALA's: actors go on while the learner learns, or sleeps."""
    policy, seeds = make_policy(make_env()), list(range(options.actors))
    actors = placement.actors(
        env_factory=make_env, policy=policy, n_rollout_steps=options.fragment, n_actors=options.actors,
        batch_size=options.actors,
        queue_out_of_sync_factor=1.0, actor_env_seeds=seeds, actor_agent_seeds=seeds,
    )  # fmt: skip

    def update() -> None:
        actors.collect_batch()
        actors.broadcast_updated_policy(policy.state_dict())

    actors.start()
    samples = watched(placement.actor_pool(options.actors), update, options, pause)
    actors.stop()
    return samples


SECTIONS = {"ppo": (synchronous, 0.0), "impala": (asynchronous, 0.0), "slow": (asynchronous, 0.2)}


def main() -> int:
    """Measure and print; 1: something has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--fragment", type=int, default=100, help="steps of a fragment")
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=4.0, help="shortest duration of the reference at the start")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with ray_session(None, options.actors):
        return int(has_grown(options))


def has_grown(options: argparse.Namespace) -> bool:
    """Measure and print; whether something has grown."""
    found = False
    for section in options.sections:
        run, pause = SECTIONS[section]
        with placed(options.actors) as placement:
            samples = run(options, placement, pause)
        fragments = options.actors * options.fragment * 64 * 64 * 4 / 2**20
        for name, (seen, last) in samples.items():
            # one that is under way is seen or not; a second one waits where the learner does not wait for all
            first = max(seen, fragments * (1 if run is synchronous else 2)) if name == "object store" else seen
            factor = 1.0 if last - first < SLACK_MB else last / max(first, 1e-9)
            found |= factor > LIMIT
            print(f"{section}, {name}: {first:.1f} MB, then {last:.1f} MB, {factor:.2f} times", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
