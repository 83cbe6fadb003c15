"""Model of the throughput of a Ray cluster and its limits.

    python benchmarks/cluster_model.py --actors 128 --step-ms 5 --sigma 1

A model, not a measurement: what a call and a megabyte cost was measured with Ray 2.60 on one machine.
"""

from __future__ import annotations

import argparse
import heapq
import math
from dataclasses import MISSING, dataclass, fields

import numpy as np

_UPDATES = 50
"""Updates that are simulated where step times are uneven."""


@dataclass(frozen=True)
class Cluster:
    """Actors, each of which steps its environments one after the other; times as the names say."""

    actors: int
    step_ms: float
    """Mean time of an environment step."""
    sigma: float = 0.0
    """Of the logarithm of lognormal step times: at 1, one step in a hundred takes six times the mean."""
    envs: int = 1
    """Environments of an actor."""
    fragment: int = 100
    """Environment steps of a fragment, for each environment."""
    learner_us: float = 20.0
    """The learner's time for one environment step, all its epochs together."""
    call_ms: float = 1.0
    """The learner's time for one call."""
    weights_mb: float = 1.0
    gbps: float = 10.0
    """Of the learner's network."""
    actors_per_node: int = 16
    wait_for: float = 1.0
    """Share of the actors that an update of A2C and PPO waits for, as `runner.placement.wait_for`."""

    @property
    def n_fragments(self) -> int:
        """Fragments that an update of A2C and PPO learns from."""
        return math.ceil(self.wait_for * self.actors - 1e-9)

    @property
    def n_samples(self) -> int:
        """Environment steps that it learns from."""
        return self.n_fragments * self.envs * self.fragment

    @property
    def broadcast(self) -> float:
        """Seconds until every node has new weights, which are sent to one after the other."""
        n_nodes = -(-self.actors // self.actors_per_node)
        return self.weights_mb * (0.3 + n_nodes * 8 / self.gbps) / 1e3

    @property
    def alone(self) -> float:
        """Environment steps per second of all actors without any waiting."""
        return 1e3 * self.actors / self.step_ms

    def fragment_seconds(self) -> np.ndarray:
        """How long fragments take, `[n_updates, n_actors]`."""
        rng, size = np.random.default_rng(0), (self.actors, self.envs * self.fragment)
        mean = -(self.sigma**2) / 2
        seconds = [rng.lognormal(mean, self.sigma, size).sum(1) for _ in range(_UPDATES if self.sigma else 1)]
        return np.array(seconds) * self.step_ms / 1e3

    def collecting_seconds(self, pause: float = 0.0) -> float:
        """How long an update of A2C and PPO waits for its fragments, in the mean.

        Actors that are late go on meanwhile, and begin again when they have delivered, as those of `runner=ray` do.

        :param pause: Seconds between two rollouts, in which the learner learns.
        """
        seconds = self.fragment_seconds()
        now, waited, ends = 0.0, 0.0, list[tuple[float, int, int]]()
        for update, durations in enumerate(seconds):
            under_way = {actor for _, _, actor in ends}
            for actor in set(range(self.actors)) - under_way:
                heapq.heappush(ends, (now + durations[actor], update, actor))
            start, n_taken = now, 0
            while n_taken < self.n_fragments:
                end, begun, actor = heapq.heappop(ends)
                now = max(now, end)
                n_taken += update - begun <= 1  # an older one is dropped
                if begun < update:
                    heapq.heappush(ends, (now + durations[actor], update, actor))
            waited += now - start
            now += pause
        return waited / len(seconds)


def synchronous(cluster: Cluster) -> tuple[float, str]:
    """A2C and PPO: everybody collects a fragment, the learner learns, everybody gets the weights.

    :return: Environment steps per second, and what takes most of the time.
    """
    typical = float(np.median(cluster.fragment_seconds()))
    learner = cluster.n_samples * cluster.learner_us / 1e6
    slowest = cluster.collecting_seconds(learner + cluster.broadcast)
    # calls of fragments that are there earlier cost nothing: the learner waits anyway
    calls = cluster.actors * cluster.call_ms / 1e3
    parts = {
        "environments": min(typical, slowest),
        "the slowest actor": max(slowest - typical, 0.0),
        "calls": max(calls - max(slowest - typical, 0.0), cluster.call_ms / 1e3),
        "learner": learner,
        "weights": cluster.broadcast,
    }
    return cluster.n_samples / sum(parts.values()), max(parts, key=lambda name: parts[name])


def asynchronous(cluster: Cluster) -> tuple[float, str]:
    """IMPALA: no part waits, so that the slowest part limits all. An update takes a quarter of the actors' fragments.

    :return: Environment steps per second, and what limits them.
    """
    n_samples = cluster.actors * cluster.envs * cluster.fragment
    limits = {
        "environments": cluster.alone,
        "learner": _share(1e6, cluster.learner_us),
        "calls": _share(1e3 * cluster.envs * cluster.fragment, cluster.call_ms),
        "weights": _share(n_samples / 4, cluster.broadcast),
    }
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def _share(n: float, cost: float) -> float:
    return n / cost if cost else math.inf


def main() -> None:
    """Print what the model computes for a cluster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Cluster):
        kind, option = int if field.type == "int" else float, f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=kind, **({} if field.default is MISSING else {"default": field.default}))
    options = parser.parse_args()
    if not options.actors or not options.step_ms:
        parser.error("--actors and --step-ms are required, and above zero")
    cluster = Cluster(**vars(options))
    print(f"computed, not measured: {cluster.actors} actors could collect {cluster.alone:,.0f} steps/s by themselves")
    for name, (rate, limit) in {"A2C, PPO": synchronous(cluster), "IMPALA": asynchronous(cluster)}.items():
        print(f"{name:10s} {rate:12,.0f} steps/s  {rate / cluster.alone:5.0%}  limited by: {limit}")


if __name__ == "__main__":
    main()
