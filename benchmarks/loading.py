"""Time of verifying a checkpoint when it is read: `python -m benchmarks.loading`.

Compares `load_state`, which compares the checksum and reads the values by an interpreter of its own, with `torch.load`
of the same file, which verifies nothing; medians of runs in turn, and quotients of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from maze.core.utils.checkpoint import load_state, save_state


def model_and_optimizer(n_layers: int, width: int) -> dict[str, object]:
    """A state as runs write it: networks and the moments of their optimizer."""
    network = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(n_layers)))
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return {"weights": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}


def median_of(runs: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median milliseconds of each, run in turn."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", type=Path, help="file for the ratios")
    options = parser.parse_args()
    ratios = {}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "state.pt"
        for n_layers, width in ((4, 460), (12, 265), (48, 132)):
            save_state(path, model_and_optimizer(n_layers, width))
            unverified, verified = median_of(
                [lambda: torch.load(path, weights_only=True), lambda: load_state(path)], options.repeats
            )
            ratios[f"{6 * n_layers} tensors"] = verified / unverified
            print(
                f"{path.stat().st_size / 1e6:.1f} MB in {6 * n_layers} tensors: torch.load {unverified:.1f} ms, "
                f"load_state {verified:.1f} ms: {verified / unverified:.2f}"
            )
    if options.json:
        options.json.write_text(json.dumps(ratios, indent=2))


if __name__ == "__main__":
    main()
