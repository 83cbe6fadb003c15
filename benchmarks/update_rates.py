"""Rounds of updates by turns: Maze, stable-baselines3, and SBX (the same algorithms in JAX) if an interpreter is given.

Shared by `sac_speed.py` and `dqn_speed.py`. Many short rounds alternate between the contenders; medians and the medians
of the ratios of each round are printed, by CPU time of the contender's process (which other processes disturb less) and
by wall time. Absolute numbers depend on the machine, the ratios much less.

SBX needs an environment of its own:

    python -m venv /tmp/sbx && /tmp/sbx/bin/pip install torch==2.13.0 sbx-rl==0.28.0
    python benchmarks/sac_speed.py --sbx /tmp/sbx/bin/python
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

Contender = Callable[[int], None]
"""Does a number of environment steps with one update each."""
Timed = Callable[[int], tuple[float, float]]
"""The same; returns the CPU and the wall time in seconds."""


def peer(library: str, algorithm: str, env_id: str, warm_up: int, settings: dict[str, Any]) -> Contender:
    """An algorithm of a library with the interface of stable-baselines3."""
    create = getattr(importlib.import_module(library), algorithm)
    model = create("MlpPolicy", env_id, learning_starts=warm_up, seed=0, **settings)
    model.learn(warm_up)

    def run(n_updates: int) -> None:
        model.learn(n_updates, reset_num_timesteps=False)

    return run


def timed(run: Contender) -> Timed:
    """The contender with a clock."""

    def measured(n_updates: int) -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            run(n_updates)
        return time.process_time() - cpu, time.perf_counter() - wall

    return measured


def serve(run: Contender) -> None:
    """Do as many updates as each line of the standard input says, and print the times."""
    measured = timed(run)
    while n_updates := input():
        print("result", *measured(int(n_updates)), flush=True)


@contextlib.contextmanager
def in_child(interpreter: str) -> Iterator[Timed]:
    """The contender that this script serves when another interpreter runs it, on one thread."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    command = [interpreter, sys.argv[0], "--child"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def measured(n_updates: int) -> tuple[float, float]:
            print(n_updates, file=child.stdin, flush=True)
            line = next(line for line in child.stdout or () if line.startswith("result "))
            cpu, wall = map(float, line.split()[1:])
            return cpu, wall

        yield measured
        print("", file=child.stdin, flush=True)


def main(
    description: str | None,
    maze: Callable[[argparse.Namespace], Contender],
    peer_of: Callable[[str], Contender],
    n_updates: int,
    switches: dict[str, str] | None = None,
) -> None:
    """Measure and print.

    :param description: Of the command.
    :param maze: Builds Maze's contender from the options.
    :param peer_of: Builds that of a library: `stable_baselines3` or `sbx`.
    :param n_updates: In a round.
    :param switches: Further options without a value, with their help.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--sbx", help="interpreter of an environment with SBX")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    for name, text in (switches or {}).items():
        parser.add_argument(name, action="store_true", help=text)
    options = parser.parse_args()
    if options.child:
        serve(peer_of("sbx"))
        return
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    n_rounds, n_updates = (11, n_updates // 2) if options.quick else (41, n_updates)
    with contextlib.ExitStack() as stack:
        contenders = {"maze": timed(maze(options)), "stable-baselines3": timed(peer_of("stable_baselines3"))}
        if options.sbx:
            contenders["sbx"] = stack.enter_context(in_child(options.sbx))
        for run in contenders.values():
            run(n_updates)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for index in range(n_rounds):
            order = list(contenders.items())
            for name, run in order if index % 2 == 0 else order[::-1]:
                seconds[name].append(run(n_updates))
    results: dict[str, Any] = {}
    for clock, column in (("cpu", 0), ("wall", 1)):
        rates = {name: [n_updates / pair[column] for pair in rows] for name, rows in seconds.items()}
        results[clock] = {name: median(values) for name, values in rates.items()}
        print(f"updates per second of {clock} time:", ", ".join(f"{k} {v:.1f}" for k, v in results[clock].items()))
        for name in list(rates)[1:]:
            ratios = [own / theirs for own, theirs in zip(rates["maze"], rates[name], strict=True)]
            results[clock]["ratio" if name == "stable-baselines3" else f"ratio to {name}"] = median(ratios)
            low, *_, high = quantiles(ratios, n=10)
            print(f"    ratio to {name} {median(ratios):.2f} (eight of ten rounds: {low:.2f} to {high:.2f})")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
