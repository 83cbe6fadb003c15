"""Time of a decision of a policy bundle relative to onnxruntime's call of the same network.

Medians of batches that take turns (processor time of the one thread), for two layers of 64 units and one observation:
`onnxruntime` is its `run` on an input that is ready, `act` is everything from the raw observation to the raw action.
Then, each in a fresh interpreter: time to import and load, and the most memory that a process has used after 1,000
decisions.

    python benchmarks/bundle_speed.py [--rounds 200]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FRESH = """
import sys, time
begin = time.perf_counter()
from maze.serve.bundle import PolicyBundle
session = PolicyBundle.load(sys.argv[1]).session()
loaded = time.perf_counter() - begin
for _ in range(1000):
    session.act([0.0, 0.1, 0.0, 0.2])
heavy = sorted(sys.modules.keys() & {"torch", "hydra", "gymnasium", "pandas", "matplotlib"})
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(loaded, int(peak.split()[1]) / 1024, heavy)
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    rounds = options.rounds
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "policy.maze"
        path.write_bytes(exported_cartpole())
        times = measured(path, rounds)
        for name, micros in times.items():
            print(f"{name:<24} {micros:8.1f} µs, {micros - times['onnxruntime']:+7.1f} µs")
        command = [sys.executable, "-c", FRESH, str(path)]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(5)]
    seconds, megabytes = min(float(run[0]) for run in runs), max(float(run[1]) for run in runs)
    print(f"import and load: {seconds:.2f} s (best of 5)")
    print(f"peak memory:     {megabytes:.0f} MB; heavy modules: {' '.join(runs[0][2:])}")
    if options.json:
        found = {"microseconds": times, "seconds_to_load": seconds, "megabytes": megabytes}
        options.json.write_text(json.dumps(found, indent=2))


def exported_cartpole() -> bytes:
    """A policy of two layers of 64 units for CartPole."""
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
    from maze.distributions.distribution_mapper import DistributionMapper
    from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet
    from maze.serve.export import export_policy

    env = GymMazeEnv("CartPole-v1")
    network = FlattenConcatPolicyNet({"observation": (4,)}, {"action": (2,)}, [64, 64], "torch.nn.Tanh")
    policy = TorchPolicy({0: network}, DistributionMapper(env.action_space, {}), "cpu")
    return export_policy(policy, env, n_steps=200)


def measured(path: Path, rounds: int) -> dict[str, float]:
    """Medians in microseconds."""
    from maze.serve.bundle import PolicyBundle

    bundle = PolicyBundle.load(path)
    session = bundle.session(seed=0)
    network = bundle.steps[0].networks[None]
    observation = np.array([0.0, 0.1, 0.0, 0.2], np.float32)
    ready = {"observation/observation": observation[np.newaxis]}
    raw: Any = network._run
    cases: dict[str, Callable[[], Any]] = {
        "onnxruntime": lambda: raw(["logits/action"], ready),
        "act": lambda: session.act(observation),
        "act, sampled": lambda: session.act(observation, deterministic=False),
        "act, list of numbers": lambda: session.act([0.0, 0.1, 0.0, 0.2]),
    }
    batches: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, call in cases.items():
            begin = time.thread_time()
            for _ in range(100):
                call()
            batches[name].append((time.thread_time() - begin) * 1e4)
    return {name: statistics.median(times) for name, times in batches.items()}


if __name__ == "__main__":
    main()
