"""Simulated error rates of the gate and of the intervals in comparisons and reports.

First table: how often the gate lets a candidate pass whose mean difference from the baseline is exactly what is
tolerated, by distribution of the differences and number of episodes, in per cent. The gate refuses the numbers of
episodes in brackets unless the range of the measure is known. Second table: the same with a known range, for any number
of episodes. Third table: how often the 95 % interval over several runs contains the true mean, by number of runs.

    python -m benchmarks.intervals            # a minute
    python -m benchmarks.intervals --quick    # a fifth of the repetitions
    python -m benchmarks.intervals --json out.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.utils.stats_utils import iqm_interval, mean_interval
from maze.evaluation.gate import MIN_EPISODES

Values = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
EPISODES = (1, 5, 20, 50, 100, 200, 300, 500, 1000)
RUNS = (2, 3, 4, 5, 10, 20)
N_REPETITIONS = 10_000


def rare(share: float, noise: float, sizes: Callable[[Any], Values], mean: float) -> Callable[[Any], Values]:
    """Losses of some sizes in a share of the episodes, and normal noise in all."""

    def drawn(shape: Any) -> Values:
        losses = (RNG.random(shape) < share) * sizes(shape)
        return share * mean - losses + noise * RNG.normal(size=shape)

    return drawn


def lognormal(sigma: float) -> Callable[[Any], Values]:
    return lambda shape: np.exp(sigma**2 / 2) - np.exp(sigma * RNG.normal(size=shape))


DISTRIBUTIONS: dict[str, Callable[[Any], Values]] = {
    "normal": lambda shape: RNG.normal(size=shape),
    "uniform": lambda shape: RNG.uniform(-1, 1, size=shape),
    "Student's t, 3 degrees of freedom": lambda shape: RNG.standard_t(3, size=shape),
    "exponential losses": lambda shape: 1 - RNG.exponential(size=shape),
    "exponential gains": lambda shape: RNG.exponential(size=shape) - 1,
    "lognormal losses, sigma 1": lognormal(1.0),
    "lognormal losses, sigma 1.5": lognormal(1.5),
    "Pareto losses, exponent 2.5": lambda shape: 1 / 1.5 - RNG.pareto(2.5, size=shape),
    "3 % catastrophes of size 1": rare(0.03, 0.0, np.ones, 1.0),
    "3 % catastrophes of size 1, noise 0.1": rare(0.03, 0.1, np.ones, 1.0),
    "3 % catastrophes of exponential size": rare(0.03, 0.0, lambda shape: RNG.exponential(size=shape), 1.0),
    "3 % catastrophes of exponential size, noise 0.1": rare(0.03, 0.1, lambda shape: RNG.exponential(size=shape), 1.0),
    "1 % catastrophes of size 1, noise 0.1": rare(0.01, 0.1, np.ones, 1.0),
}
"""Differences with mean 0."""

BOUNDED: dict[str, tuple[Callable[[Any], Values], tuple[float, float]]] = {
    "uniform in [-1, 1]": (lambda shape: RNG.uniform(-1, 1, size=shape), (-1.0, 1.0)),
    "3 % catastrophes of size 1": (rare(0.03, 0.0, np.ones, 1.0), (-0.97, 0.03)),
    "0.5 % catastrophes of size 1": (rare(0.005, 0.0, np.ones, 1.0), (-0.995, 0.005)),
    "beta(0.2, 2) losses": (lambda shape: 0.2 / 2.2 - RNG.beta(0.2, 2, size=shape), (0.2 / 2.2 - 1, 0.2 / 2.2)),
}


def chunks(n_values: int, n_repetitions: int) -> Iterator[int]:
    """Numbers of repetitions that fit into memory together."""
    size = max(1, min(n_repetitions, 2_000_000 // n_values))
    for start in range(0, n_repetitions, size):
        yield min(size, n_repetitions - start)


def false_passes(
    draw: Callable[[Any], Values], n_episodes: int, n_repetitions: int, bounds: tuple[float, float] | None = None
) -> float:
    """Share of candidates at the margin that pass."""
    if n_episodes < 2 and bounds is None:
        return float("nan")
    found = []
    for n in chunks(n_episodes, n_repetitions):
        _, low, _ = mean_interval(draw((n, 1, n_episodes)), bounds=bounds)
        found.append(low >= 1e-9)
    return float(np.concatenate(found).mean())


def coverage(n_runs: int, deviation: float, kind: str, n_repetitions: int, n_episodes: int = 50) -> float:
    """Share of intervals that contain the truth, for runs whose means differ.

    :param n_runs: Runs of each policy.
    :param deviation: Standard deviation of the runs' means; that over episodes is 1.
    :param kind: `mean`, `difference` of two policies with as many runs, or `IQM`, which repeats less often.
    :param n_repetitions: Number of repetitions.
    :param n_episodes: Episodes, the same for all runs.
    """

    def values(n: int, hard: Values) -> Values:
        return deviation * RNG.normal(size=(n, n_runs, 1)) + 0.7 * RNG.normal(size=(n, n_runs, n_episodes)) + hard

    found = []
    for n in chunks(n_runs * n_episodes, n_repetitions if kind != "IQM" else n_repetitions // 10):
        hard = 0.7 * RNG.normal(size=(n, 1, n_episodes))
        if kind == "IQM":
            ends = [iqm_interval(each)[1:] for each in values(n, hard)]
            low, high = np.transpose(ends)
        else:
            _, low, high = mean_interval(values(n, hard), values(n, hard) if kind == "difference" else None)
        found.append((low <= 0) & (high >= 0))
    return float(np.concatenate(found).mean())


def table(title: str, head: list[str], rows: dict[str, list[float]]) -> None:
    """Print shares in per cent."""
    width = max(map(len, rows))
    print(f"\n{title}\n{'':<{width}}", *(f"{each:>6}" for each in head))
    for name, shares in rows.items():
        print(f"{name:<{width}}", *(f"{100 * share:6.1f}" for share in shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    n = N_REPETITIONS // 5 if options.quick else N_REPETITIONS
    unbounded = {name: [false_passes(draw, each, n) for each in EPISODES[1:]] for name, draw in DISTRIBUTIONS.items()}
    head = [f"{each}" if each >= MIN_EPISODES else f"({each})" for each in EPISODES]
    table("False passes at the margin, %, by number of episodes", head[1:], unbounded)
    bounded = {
        name: [false_passes(draw, each, n // 5, bounds) for each in EPISODES]
        for name, (draw, bounds) in BOUNDED.items()
    }
    table("With a known range", [str(each) for each in EPISODES], bounded)
    kinds = {
        f"{kind}, runs differ by {deviation:g}": [coverage(each, deviation, kind, n) for each in RUNS]
        for kind in ("mean", "difference", "IQM")
        for deviation in (0.0, 0.2, 1.0, 5.0)
    }
    table("Coverage of 95 % intervals, %, by number of runs of 50 episodes", [str(each) for each in RUNS], kinds)
    if options.json is not None:
        results = {"false_passes": unbounded, "known_range": bounded, "coverage": kinds}
        options.json.write_text(json.dumps({"episodes": EPISODES, "runs": RUNS, **results}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
