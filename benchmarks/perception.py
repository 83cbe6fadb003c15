"""Forward time of a policy built from perception blocks, relative to the same layers in a plain ``nn.Sequential``.

Run ``python benchmarks/perception.py [--quick] [--json PATH]``. The variants take turns, so that what else the machine
does hits all of them; figures are medians, and ratios compare within one run. Target: at most 1.5 for ``blocks``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from maze.perception.blocks import DenseBlock, InferenceBlock, LinearOutputBlock
from maze.perception.program.numpy_networks import in_numpy

OBSERVATION_SIZE, HIDDEN_UNITS, N_LOGITS, BATCH_SIZE = 8, [64, 64], 4, 8


def build_blocks() -> InferenceBlock:
    """A 64x64 policy network as composers build it."""
    latent = DenseBlock("observation", "latent", (OBSERVATION_SIZE,), HIDDEN_UNITS, nn.Tanh)
    action = LinearOutputBlock("latent", "action", latent.out_shapes(), N_LOGITS)
    return InferenceBlock("observation", "action", (OBSERVATION_SIZE,), {"latent": latent, "action": action})


def build_sequential() -> nn.Sequential:
    """The same layers."""
    return nn.Sequential(
        nn.Linear(OBSERVATION_SIZE, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, N_LOGITS)
    )


def variants() -> dict[str, Callable[[], object]]:
    """One forward pass each, without gradients."""
    blocks, sequential = build_blocks(), build_sequential()
    program = in_numpy(blocks)
    assert program is not None
    array = np.random.default_rng(0).standard_normal((BATCH_SIZE, OBSERVATION_SIZE), dtype=np.float32)
    tensor = torch.from_numpy(array)
    rollout = tensor.expand(4, BATCH_SIZE, OBSERVATION_SIZE)
    return {
        "sequential": lambda: sequential(tensor),
        "blocks": lambda: blocks({"observation": tensor}),
        "sequential, two batch dimensions": lambda: sequential(rollout),
        "blocks, two batch dimensions": lambda: blocks({"observation": rollout}),
        "blocks in NumPy": lambda: program({"observation": array}),
    }


def measure(functions: dict[str, Callable[[], object]], n_rounds: int, n_calls: int) -> dict[str, list[float]]:
    """Time of one call in microseconds, for each round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    with torch.inference_mode():
        for function in functions.values():
            for _ in range(n_calls):
                function()
        for _ in range(n_rounds):
            for name, function in functions.items():
                start = time.perf_counter()
                for _ in range(n_calls):
                    function()
                times[name].append((time.perf_counter() - start) / n_calls * 1e6)
    return times


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    times = measure(variants(), n_rounds=200 if arguments.quick else 2000, n_calls=10)
    microseconds = {name: statistics.median(values) for name, values in times.items()}
    references = {
        "blocks": "sequential",
        "blocks, two batch dimensions": "sequential, two batch dimensions",
        "blocks in NumPy": "sequential",
    }
    # Each round is compared with itself before the median: its variants ran within a few milliseconds.
    ratios = {
        name: statistics.median(own / other for own, other in zip(times[name], times[reference], strict=True))
        for name, reference in references.items()
    }
    for name, value in microseconds.items():
        ratio = f"   ratio {ratios[name]:.2f}" if name in ratios else ""
        print(f"{name:34s} {value:8.1f} us{ratio}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"microseconds": microseconds, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
