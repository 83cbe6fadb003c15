"""Run benchmarks, store their results, and write table and chart of the page on speed from the stored results.

    python -m benchmarks.speed                         # write table and chart
    python -m benchmarks.speed training_speed startup  # run these benchmarks first (minutes)
    python -m benchmarks.speed all

Each run of a benchmark is a line of `docs/benchmarks/speed.jsonl`: its figures, the kind of processor, and whether the
machine was busy when the run started. Table and chart show medians over runs with their range.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page_tables import Bar, bar_chart, markdown_table, write_table

DIRECTORY = Path(__file__).parent
PAGE, RESULTS = (DIRECTORY.parent / "docs" / "benchmarks" / name for name in ("speed.md", "speed.jsonl"))
BUSY = 0.05
"""Share of CPU time used by other programs from which a machine counts as busy."""

Values = dict[str, float]
"""Numbers of a figure by label; the label is empty where there is only one."""


@dataclass(frozen=True)
class Figure:
    """A measured quantity; each of its numbers is a row of the table."""

    name: str
    """Key in the file of results."""
    what: str
    """The quantity."""
    peer: str
    """The denominator of a ratio; empty for absolute numbers."""
    command: str
    """Benchmark file and options."""
    read: Callable[[Any], Values]
    """Extract the numbers from the output of the benchmark."""
    at_least: float | None = None
    at_most: float | None = None
    """Goal of every number: one of the two."""
    unit: str = ""

    @property
    def goal(self) -> str:
        """Return the goal as a cell of the table."""
        bound, limit = ("≤", self.at_most) if self.at_most is not None else ("≥", self.at_least)
        return f"{bound} {_number(limit or 0.0)}{self.unit}"

    def is_reached(self, value: float) -> bool:
        """Return whether a number reaches the goal."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


def at(*keys: str) -> Callable[[Any], Values]:
    """Return a reader of one number.

    :param keys: Path of keys.
    """

    def read(found: Any) -> Values:
        for key in keys:
            found = found[key]
        return {"": float(found)}

    return read


def of(**keys: str) -> Callable[[Any], Values]:
    """Return a reader of several numbers.

    :param keys: Paths of keys, separated by `/`, by label; `_` stands for a space.
    """
    return lambda found: {
        name.replace("_", " "): value for name, path in keys.items() for value in at(*path.split("/"))(found).values()
    }


def _stacks(found: Any) -> Values:
    return {name.removeprefix("five: "): ratio for name, ratio in found["ratios"].items() if name.startswith("five")}


def _impala(found: Any) -> Values:
    """Read the ratio for environments that do not wait; empty without RLlib."""
    ratios = next(iter(found.values()))["ratios"]
    return {"": ratios["rllib"]} if "rllib" in ratios else {}


def _medians_of_rounds(found: Any, key: str) -> dict[str, float]:
    return {name: median(one[key] for one in rounds) for name, rounds in found.items()}


def _served(key: str, beside: bool = False) -> Callable[[Any], Values]:
    """Read a quantity of the server by kind of request; with `beside`, relative to the peer."""

    def read(found: Any) -> Values:
        medians = _medians_of_rounds(found, key)
        peer = medians["FastAPI, a constant"] if beside else 1.0
        return {name.split(": ")[1]: medians[name] / peer for name in found if name.startswith("maze-serve: ")}

    return read


TRAINING, LAYER, VECTOR = "training_speed.py --quick", "env_layer.py", "vector_env.py --quick"
SIMULATIONS, CARTPOLE = "batched_env.py simulations", "batched_env.py cartpole --rounds 5"
STARTUP, BUNDLE, SERVER, PAGES = "startup.py --repeats 9", "bundle_speed.py", "serve_speed.py", "report_page.py"
OVER_PEER = "maze_over_stable_baselines3"

FIGURES = (
    Figure(
        "training",
        "training on CartPole-v1: environment steps per second",
        "stable-baselines3 2.9",
        TRAINING,
        of(PPO=f"ppo/{OVER_PEER}", A2C=f"a2c/{OVER_PEER}"),
        at_least=1.3,
    ),
    Figure(
        "training_of_landers",
        "PPO on LunarLander-v3: environment steps per second",
        "stable-baselines3 2.9",
        "training_speed.py --env LunarLander-v3 --algorithm ppo --quick",
        at("ppo", OVER_PEER),
        at_least=1.3,
    ),
    Figure(
        "floor",
        "training on CartPole-v1: environment steps per second",
        "minimal script with torch",
        TRAINING,
        of(PPO="ppo/maze_share_of_floor", A2C="a2c/maze_share_of_floor"),
        at_least=0.75,
    ),
    Figure(
        "layer", "step of `GymMazeEnv`: time", "gymnasium environment", LAYER, at("ratios", "GymMazeEnv"), at_most=2.0
    ),
    Figure(
        "layer_with_statistics",
        "step of `GymMazeEnv` with statistics: time",
        "gymnasium environment",
        LAYER,
        at("ratios", "LogStatsWrapper"),
        at_most=3.5,
    ),
    Figure("wrappers", "step in five wrappers: time", "gymnasium environment", "wrappers.py", _stacks, at_most=4.0),
    Figure(
        "substeps",
        "sub-step of the structured cutting environment: time",
        "step of the flat one",
        "structured_env.py --quick",
        of(structured="structured_vs_flat", masked="masked_vs_flat"),
        at_most=1.3,
    ),
    Figure(
        "processes",
        "two worker processes, 1 ms of work per step: steps per second",
        "one process",
        VECTOR,
        at("burning_subproc_vs_sequential"),
        at_least=1.6,
    ),
    Figure(
        "processes_of_gymnasium",
        "8 CartPoles in two worker processes: steps per second",
        "gymnasium `AsyncVectorEnv`",
        VECTOR,
        at("subproc_vs_gymnasium_async"),
        at_least=1.0,
    ),
    Figure(
        "simulations",
        "batched simulators: steps per second",
        "one at a time",
        SIMULATIONS,
        of(lost_sales="lost sales, stepping", queues="criss-cross, stepping"),
        at_least=10.0,
    ),
    Figure(
        "simulations_as_shipped",
        "`lost_sales_ppo`, `criss_cross_ppo` as shipped: updates per second",
        "one at a time",
        SIMULATIONS,
        lambda found: {"lost sales": found["lost_sales_ppo"], "queues": found["criss_cross_ppo"]},
        at_least=10.0,
    ),
    Figure(
        "simulations_small",
        "PPO, 64 batched simulators, minibatches of 512: steps per second",
        "one at a time",
        SIMULATIONS,
        of(lost_sales="lost sales, PPO training", queues="criss-cross, PPO training"),
        at_least=10.0,
    ),
    Figure(
        "vector_cartpole",
        "NumPy CartPole, 256 members, with statistics: steps per second",
        "raw gymnasium",
        CARTPOLE,
        of(at_random="CartPole, at random", balanced="CartPole, balanced"),
        at_least=0.7,
    ),
    Figure(
        "vector_cartpole_training",
        "PPO on 256 NumPy CartPoles: steps per second",
        "stable-baselines3, 8 CartPoles",
        CARTPOLE,
        at("CartPole, PPO training"),
        at_least=5.0,
    ),
    Figure(
        "job_shop",
        "decision of a 15x15 job shop with statistics: time",
        "bare simulator",
        "job_shop.py --speed",
        at("ratio"),
        at_most=1.5,
    ),
    Figure(
        "blocks",
        "forward pass of blocks (64x64, batch of 8): time",
        "`nn.Sequential`",
        "perception.py --quick",
        at("ratios", "blocks"),
        at_most=1.5,
    ),
    Figure(
        "candidates",
        "gradients for 10 to 30 candidates, padded to 151: time",
        "padded to 30",
        "perception.py --candidates --quick",
        at("candidates", "room for 151"),
        at_most=1.3,
    ),
    Figure(
        "images",
        "gradients for 256 images of 4 x 84 x 84 bytes: time",
        "`nn.Sequential`",
        "perception.py --images --quick",
        at("4 x 84 x 84", "blocks"),
        at_most=1.05,
    ),
    Figure(
        "products",
        "gradients of two layers of blocks: time",
        "torch defaults",
        "perception.py --products --quick",
        lambda found: {
            name: found[name]["trainers"]
            for name in ("256 rows, 256 units, ReLU", "2048 rows, 64 units, Tanh", "64 rows, 64 units, Tanh")
        },
        at_most=1.05,
    ),
    Figure(
        "sac",
        "SAC on Pendulum-v1, batch of 256: updates per second",
        "stable-baselines3 2.9",
        "sac_speed.py --quick",
        at("cpu", "ratio"),
        at_least=1.15,
    ),
    Figure(
        "dqn",
        "DQN on CartPole-v1, batch of 128: updates per second",
        "stable-baselines3 2.9",
        "dqn_speed.py --quick",
        at("cpu", "ratio"),
        at_least=1.3,
    ),
    Figure(
        "sac_local",
        "SAC, `runner=local`, 1 ms per environment step: steps per second",
        "`runner=dev`",
        "sac_local.py --steps 10",
        of(waiting="10/local, waiting, ratio", collecting_ahead="10/local, ratio"),
        at_least=1.5,
    ),
    Figure(
        "es",
        "evolution strategies, batched: episodes per second",
        "one at a time",
        "es_speed.py --rounds 9",
        lambda found: {
            "torch": found["together, NumPy"],
            "NumPy": found["together, NumPy"] / found["one after another, NumPy"],
        },
        at_least=5.0,
    ),
    Figure(
        "impala",
        "IMPALA, two actors: environment steps per second",
        "RLlib 2.60, two runners",
        "impala_speed.py --quick",
        _impala,
        at_least=3.0,
    ),
    Figure(
        "ray_ppo",
        "PPO on Ray, two actors: environment steps per second",
        "RLlib 2.60, same Ray",
        "ray_scale.py rllib --rounds 5",
        at("rllib", "ppo, times RLlib"),
        at_least=3.0,
    ),
    Figure(
        "ray_impala",
        "IMPALA on Ray, two actors: environment steps per second",
        "RLlib 2.60, same Ray",
        "ray_scale.py rllib --rounds 5",
        at("rllib", "impala, times RLlib"),
        at_least=5.0,
    ),
    Figure(
        "loading",
        "verified loading of a 10 MB checkpoint: time",
        "`torch.load`",
        "loading.py",
        dict,
        at_most=1.5,
    ),
    Figure(
        "report_cost",
        "report: share of the CPU time of a PPO run",
        "",
        "report_cost.py",
        at("share_in_writer"),
        at_most=0.03,
    ),
    Figure(
        "report_opens",
        "report of 1,000 epochs, 200 statistics: opens in Chromium",
        "",
        PAGES,
        at("report", "loaded_ms"),
        at_most=1000.0,
        unit=" ms",
    ),
    Figure(
        "report_size",
        "report of 1,000 epochs, 200 statistics: size",
        "",
        PAGES,
        at("report", "megabytes"),
        at_most=3.0,
        unit=" MB",
    ),
    Figure(
        "episode_page",
        "HTML player, 10,000 steps: main thread per frame, arrow key held",
        "",
        PAGES,
        at("episode", "arrow_key_thread_ms"),
        at_most=16.7,
        unit=" ms",
    ),
    Figure(
        "import",
        "`import maze.core.env.maze_env`",
        "",
        STARTUP,
        at("import maze.core.env.maze_env"),
        at_most=0.3,
        unit=" s",
    ),
    Figure("help", "`maze-run --help`", "", STARTUP, at("maze-run --help"), at_most=1.0, unit=" s"),
    Figure(
        "first_step",
        "`maze-run`, PPO, until the first environment step",
        "",
        STARTUP,
        at("maze-run, PPO, to the first step"),
        at_most=4.0,
        unit=" s",
    ),
    Figure(
        "run_context",
        "`RunContext(...)` until ready, beyond the import of stable-baselines3",
        "",
        STARTUP,
        at("RunContext later than stable-baselines3"),
        at_most=0.3,
        unit=" s",
    ),
    Figure(
        "bundle",
        "decision of a bundle (64x64), beyond the onnxruntime call",
        "",
        BUNDLE,
        lambda found: {
            name: found["microseconds"][name] - found["microseconds"]["onnxruntime"] for name in ("act", "act, sampled")
        },
        at_most=30.0,
        unit=" µs",
    ),
    Figure("bundle_loads", "import and load a bundle", "", BUNDLE, at("seconds_to_load"), at_most=0.5, unit=" s"),
    Figure(
        "bundle_memory", "memory of a process with a bundle", "", BUNDLE, at("megabytes"), at_most=150.0, unit=" MB"
    ),
    Figure(
        "server",
        "`maze-serve`, 32 connections, one core: requests per second",
        "",
        SERVER,
        _served("per_second"),
        at_least=2000.0,
    ),
    Figure(
        "server_slowest",
        "`maze-serve`, 32 connections: 99th percentile",
        "",
        SERVER,
        _served("p99_ms"),
        at_most=20.0,
        unit=" ms",
    ),
    Figure(
        "server_beside_fastapi",
        "`maze-serve`: requests per second",
        "FastAPI, constant answer",
        SERVER,
        _served("per_second", beside=True),
        at_least=0.6,
    ),
)


def run(command: str) -> dict[str, Any]:
    """Run a benchmark.

    :param command: Its file and options.
    :return: The line of the file of results.
    :raises SystemExit: The benchmark failed; the message has the end of its stderr.
    """
    busy = share_in_use() >= BUSY
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "results.json"
        script, *options = shlex.split(command)
        process = subprocess.run(
            [sys.executable, str(DIRECTORY / script), *options, "--json", str(file)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if not file.exists():
            raise SystemExit(f"{command}: no results, exit status {process.returncode}.\n{process.stderr[-2000:]}")
        found = json.loads(file.read_text(encoding="utf-8"))
    figures = {figure.name: figure.read(found) for figure in FIGURES if figure.command == command}
    return {"command": command, "processor": processor(), "busy": busy, "figures": figures}


def share_in_use(seconds: float = 1.0) -> float:
    """Return the share of CPU time in use, over all processors.

    :param seconds: Duration of the measurement.
    :return: 0 to 1; 0 where the system has no `/proc/stat`.
    """

    def idle_and_all() -> tuple[int, int]:
        ticks = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return ticks[3] + ticks[4], sum(ticks)  # idle, and waiting for a disk

    try:
        idle, total = idle_and_all()
        time.sleep(seconds)
        idle_after, total_after = idle_and_all()
    except OSError:
        return 0.0
    return 1.0 - (idle_after - idle) / max(1, total_after - total)


def processor() -> str:
    """Return the vendor of the processor, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    makers = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), platform.machine())
    return makers.get(name, name)


def table(kept: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the page: a row for each number, bold where the goal is missed.

    :param kept: Lines of the file of results.
    """
    rows = []
    for figure, label, values, runs in _measured(kept):
        middle = _number(median(values)) + figure.unit
        shown = middle if figure.is_reached(median(values)) else f"**{middle}**"
        spread = f" ({_number(min(values))} to {_number(max(values))})" if len(values) > 1 else ""
        what = f"{figure.what} ({label})" if label else figure.what
        rows.append(
            [
                what,
                figure.peer or "-",
                shown + spread,
                figure.goal,
                _runs(runs),
                f"`python benchmarks/{figure.command}`",
            ]
        )
    return markdown_table(["what", "peer", "ratio or value", "goal", "runs", "command"], rows)


PEERS = ("stable-baselines3", "RLlib", "gymnasium `AsyncVectorEnv`", "FastAPI")
"""Beginnings of the peers in the chart: libraries; more than 1 is faster than the peer."""


def chart(kept: Sequence[Mapping[str, Any]]) -> str:
    """Return the chart of the page: speed relative to other libraries.

    :param kept: Lines of the file of results.
    """
    bars = []
    for figure, label, values, _ in _measured(kept):
        if figure.peer.startswith(PEERS):
            what = f"{figure.what.split(':')[0]} ({label})" if label else figure.what.split(":")[0]
            note = f"{what} / {figure.peer}".replace("`", "")
            bars.append(Bar(note, median(values), min(values), max(values)))
    bars.sort(key=lambda bar: -bar.value)
    return bar_chart("Speed of Maze relative to other libraries (1: equal, more is faster)", bars)


def _measured(
    kept: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Figure, str, list[float], list[Mapping[str, Any]]]]:
    """Yield each number with its figure, label, values of all runs, and these runs."""
    for figure in FIGURES:
        runs = [line for line in kept if figure.name in line["figures"]]
        for label in dict.fromkeys(label for line in runs for label in line["figures"][figure.name]):
            values = [line["figures"][figure.name][label] for line in runs if label in line["figures"][figure.name]]
            yield figure, label, values, runs


def _runs(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of runs, the kinds of processor, and the number of runs on a busy machine."""
    processors = ", ".join(sorted({line["processor"] for line in runs}))
    n_busy = sum(line["busy"] for line in runs)
    return f"{len(runs)}, {processors}" + (f", {'all' if n_busy == len(runs) else n_busy} busy" if n_busy else "")


def _number(value: float) -> str:
    """Return a number with three significant digits, and all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def read_results(file: Path) -> list[dict[str, Any]]:
    """Return the stored runs."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the named benchmarks and write table and chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", help="names of their files, or `all`")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    commands = dict.fromkeys(figure.command for figure in FIGURES)
    names = {Path(command.split()[0]).stem for command in commands}
    if unknown := set(options.benchmarks) - names - {"all"}:
        parser.error(f"expected names of {', '.join(sorted(names))} or `all`, found {', '.join(sorted(unknown))}")
    for command in commands:
        if {"all", Path(command.split()[0]).stem} & set(options.benchmarks):
            line = run(command)
            print(json.dumps(line), flush=True)
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    kept = read_results(options.results)
    write_table(options.page, "speed", table(kept))
    options.page.with_suffix(".svg").write_text(chart(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
