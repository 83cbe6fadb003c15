"""The page on speed: runs benchmarks, keeps what they measured, and writes the table from what is kept.

    python -m benchmarks.speed                         # writes the table
    python -m benchmarks.speed training_speed startup  # runs all that the table has of these first (minutes)
    python -m benchmarks.speed all

Each run of a benchmark is a line of `docs/benchmarks/speed.jsonl`: its figures, the kind of processor, and how busy the
machine was when it began. The table shows medians over runs and from where to where they are.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page_tables import markdown_table, write_table

DIRECTORY = Path(__file__).parent
PAGE, RESULTS = (DIRECTORY.parent / "docs" / "benchmarks" / name for name in ("speed.md", "speed.jsonl"))
BUSY = 0.05
"""Share of the processors' time that others take, from which a machine counts as busy."""

Values = dict[str, float]
"""Numbers of a figure; where there are several, what tells them apart."""


@dataclass(frozen=True)
class Figure:
    """A row of the table."""

    name: str
    """What it is called in the file of results."""
    what: str
    command: str
    """The benchmark and its options."""
    read: Callable[[Any], Values]
    """Finds its numbers in what the benchmark writes."""
    at_least: float | None = None
    at_most: float | None = None
    """The goal of every number: one of the two."""
    unit: str = ""

    @property
    def goal(self) -> str:
        """As a cell of the table."""
        bound, limit = ("≤", self.at_most) if self.at_most is not None else ("≥", self.at_least)
        return f"{bound} {_number(limit or 0.0)}{self.unit}"

    def is_reached(self, value: float) -> bool:
        """Whether a number is what it has to be."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


def at(*keys: str) -> Callable[[Any], Values]:
    """Reads one number.

    :param keys: Those that lead to it.
    """

    def read(found: Any) -> Values:
        for key in keys:
            found = found[key]
        return {"": float(found)}

    return read


def of(**keys: str) -> Callable[[Any], Values]:
    """Reads several numbers.

    :param keys: What leads to each, with `/` in between, by what it is called; `_` stands for a space.
    """
    return lambda found: {
        name.replace("_", " "): value for name, path in keys.items() for value in at(*path.split("/"))(found).values()
    }


def _stacks(found: Any) -> Values:
    return {name.removeprefix("five: "): ratio for name, ratio in found["ratios"].items() if name.startswith("five")}


def _impala(found: Any) -> Values:
    """Of the environments that do not wait; without RLlib there is nothing to tell."""
    ratios = next(iter(found.values()))["ratios"]
    return {"": ratios["rllib"]} if "rllib" in ratios else {}


def _medians_of_rounds(found: Any, key: str) -> dict[str, float]:
    return {name: median(one[key] for one in rounds) for name, rounds in found.items()}


def _served(key: str, beside: bool = False) -> Callable[[Any], Values]:
    """Reads what the server did for each kind of request, as a multiple of the peer's where that is asked for."""

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
        "environment steps per second of a training / of stable-baselines3 2.9 (CartPole-v1)",
        TRAINING,
        of(PPO=f"ppo/{OVER_PEER}", A2C=f"a2c/{OVER_PEER}"),
        at_least=1.3,
    ),
    Figure(
        "training_of_landers",
        "the same, PPO in LunarLander-v3",
        "training_speed.py --env LunarLander-v3 --algorithm ppo --quick",
        at("ppo", OVER_PEER),
        at_least=1.3,
    ),
    Figure(
        "floor",
        "the same / of a script that does nothing else, with torch",
        TRAINING,
        of(PPO="ppo/maze_share_of_floor", A2C="a2c/maze_share_of_floor"),
        at_least=0.75,
    ),
    Figure(
        "layer", "step of `GymMazeEnv` / of the gymnasium environment", LAYER, at("ratios", "GymMazeEnv"), at_most=2.0
    ),
    Figure("layer_with_statistics", "the same with statistics", LAYER, at("ratios", "LogStatsWrapper"), at_most=3.5),
    Figure("wrappers", "step in five wrappers / of the gymnasium environment", "wrappers.py", _stacks, at_most=4.0),
    Figure(
        "substeps",
        "sub-step of the structured cutting environment / step of the flat one",
        "structured_env.py --quick",
        of(structured="structured_vs_flat", masked="masked_vs_flat"),
        at_most=1.3,
    ),
    Figure(
        "processes",
        "steps per second with 1 ms of work in each: two worker processes / in process",
        VECTOR,
        at("burning_subproc_vs_sequential"),
        at_least=1.6,
    ),
    Figure(
        "processes_of_gymnasium",
        "steps per second of 8 CartPoles in two worker processes / in gymnasium's `AsyncVectorEnv`",
        VECTOR,
        at("subproc_vs_gymnasium_async"),
        at_least=1.0,
    ),
    Figure(
        "simulations",
        "simulations written for many: steps per second at once / one after the other",
        SIMULATIONS,
        of(lost_sales="lost sales, stepping", queues="criss-cross, stepping"),
        at_least=10.0,
    ),
    Figure(
        "simulations_as_shipped",
        "the same: updates of `lost_sales_ppo` and `criss_cross_ppo` as shipped",
        SIMULATIONS,
        lambda found: {"lost sales": found["lost_sales_ppo"], "queues": found["criss_cross_ppo"]},
        at_least=10.0,
    ),
    Figure(
        "simulations_small",
        "the same: PPO with 64 environments, 32 steps and minibatches of 512, evaluations included",
        SIMULATIONS,
        of(lost_sales="lost sales, PPO training", queues="criss-cross, PPO training"),
        at_least=10.0,
    ),
    Figure(
        "vector_cartpole",
        "gymnasium's CartPole in NumPy, 256 members: steps per second as a vector environment of Maze with statistics "
        "/ raw (what bounds it: [decision 32](../decisions/0032-gymnasiums-vector-environments.md))",
        CARTPOLE,
        of(at_random="CartPole, at random", balanced="CartPole, balanced"),
        at_least=0.7,
    ),
    Figure(
        "vector_cartpole_training",
        "PPO on it (256 x 32 steps, minibatches of 2,048, evaluation and report included) / stable-baselines3 on 8 "
        "CartPoles (128 steps, minibatches of 256)",
        CARTPOLE,
        at("CartPole, PPO training"),
        at_least=5.0,
    ),
    Figure(
        "job_shop",
        "a decision of a job shop (15x15) through Maze with statistics / in the bare simulator",
        "job_shop.py --speed",
        at("ratio"),
        at_most=1.5,
    ),
    Figure(
        "blocks",
        "forward pass of blocks / of `nn.Sequential` (64x64, batch of 8)",
        "perception.py --quick",
        at("ratios", "blocks"),
        at_most=1.5,
    ),
    Figure(
        "candidates",
        "gradients for 10 to 30 candidates with room for 151 / with room for 30",
        "perception.py --candidates --quick",
        at("candidates", "room for 151"),
        at_most=1.3,
    ),
    Figure(
        "images",
        "gradients for 256 images of 4 x 84 x 84 bytes: blocks / `nn.Sequential`",
        "perception.py --images --quick",
        at("4 x 84 x 84", "blocks"),
        at_most=1.05,
    ),
    Figure(
        "products",
        "gradients of two layers: of blocks / of torch",
        "perception.py --products --quick",
        lambda found: {
            name: found[name]["trainers"]
            for name in ("256 rows, 256 units, ReLU", "2048 rows, 64 units, Tanh", "64 rows, 64 units, Tanh")
        },
        at_most=1.05,
    ),
    Figure(
        "sac",
        "SAC: updates per second / of stable-baselines3 (Pendulum-v1, batch of 256, two 256-unit layers)",
        "sac_speed.py --quick",
        at("cpu", "ratio"),
        at_least=1.15,
    ),
    Figure(
        "dqn",
        "DQN: updates per second / of stable-baselines3 (CartPole-v1, batch of 128, two 256-unit layers)",
        "dqn_speed.py --quick",
        at("cpu", "ratio"),
        at_least=1.3,
    ),
    Figure(
        "sac_local",
        "SAC with `runner=local`, two workers, 1 ms of computing per environment step / `runner=dev`",
        "sac_local.py --steps 10",
        of(waiting="10/local, waiting, ratio", collecting_ahead="10/local, ratio"),
        at_least=1.5,
    ),
    Figure(
        "es",
        "evolution strategies: episodes per second together / one after another",
        "es_speed.py --rounds 9",
        lambda found: {
            "torch": found["together, NumPy"],
            "NumPy": found["together, NumPy"] / found["one after another, NumPy"],
        },
        at_least=5.0,
    ),
    Figure(
        "impala",
        "IMPALA, two actors: environment steps per second / RLlib 2.60 with two environment runners",
        "impala_speed.py --quick",
        _impala,
        at_least=3.0,
    ),
    Figure(
        "ray_ppo",
        "PPO on Ray: environment steps per second / RLlib's on the same Ray (two actors of eight CartPoles)",
        "ray_scale.py rllib --rounds 5",
        at("rllib", "ppo, times RLlib"),
        at_least=3.0,
    ),
    Figure(
        "ray_impala",
        "the same, IMPALA",
        "ray_scale.py rllib --rounds 5",
        at("rllib", "impala, times RLlib"),
        at_least=5.0,
    ),
    Figure(
        "loading",
        "a checkpoint of 10 MB, verified and read / `torch.load`",
        "loading.py",
        dict,
        at_most=1.5,
    ),
    Figure(
        "report_cost",
        "share of a PPO training on CartPole-v1 that its report takes",
        "report_cost.py",
        at("share_in_writer"),
        at_most=0.03,
    ),
    Figure(
        "report_opens",
        "report of 1,000 epochs with 200 statistics: until Chromium has it open",
        PAGES,
        at("report", "loaded_ms"),
        at_most=1000.0,
        unit=" ms",
    ),
    Figure("report_size", "its size", PAGES, at("report", "megabytes"), at_most=3.0, unit=" MB"),
    Figure(
        "episode_page",
        "page of an episode of 10,000 steps: the page's thread for a frame while an arrow key is held",
        PAGES,
        at("episode", "arrow_key_thread_ms"),
        at_most=16.7,
        unit=" ms",
    ),
    Figure(
        "import",
        "`import maze.core.env.maze_env`, without torch",
        STARTUP,
        at("import maze.core.env.maze_env"),
        at_most=0.3,
        unit=" s",
    ),
    Figure("help", "`maze-run --help`", STARTUP, at("maze-run --help"), at_most=1.0, unit=" s"),
    Figure(
        "first_step",
        "`maze-run`, PPO, to the first environment step",
        STARTUP,
        at("maze-run, PPO, to the first step"),
        at_most=4.0,
        unit=" s",
    ),
    Figure(
        "run_context",
        "`RunContext(...)` ready, after what importing stable-baselines3 takes",
        STARTUP,
        at("RunContext later than stable-baselines3"),
        at_most=0.3,
        unit=" s",
    ),
    Figure(
        "bundle",
        "a decision of a policy bundle (64x64, one observation), more than onnxruntime's own call",
        BUNDLE,
        lambda found: {
            name: found["microseconds"][name] - found["microseconds"]["onnxruntime"] for name in ("act", "act, sampled")
        },
        at_most=30.0,
        unit=" µs",
    ),
    Figure("bundle_loads", "importing and loading a bundle", BUNDLE, at("seconds_to_load"), at_most=0.5, unit=" s"),
    Figure("bundle_memory", "memory of a process that acts by it", BUNDLE, at("megabytes"), at_most=150.0, unit=" MB"),
    Figure(
        "server",
        "`maze-serve`, 32 connections, one core: requests per second",
        SERVER,
        _served("per_second"),
        at_least=2000.0,
    ),
    Figure("server_slowest", "the same: 99th percentile", SERVER, _served("p99_ms"), at_most=20.0, unit=" ms"),
    Figure(
        "server_beside_fastapi",
        "the same: requests per second / of FastAPI that answers a constant",
        SERVER,
        _served("per_second", beside=True),
        at_least=0.6,
    ),
)


def run(command: str) -> dict[str, Any]:
    """Runs a benchmark.

    :param command: Its file and its options.
    :return: The line of the file of results.
    :raises SystemExit: It failed; what it said last is in the message.
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
    """Share of all processors' time in which they did something.

    :param seconds: For so long it is looked at.
    :return: 0 to 1; 0 where the system does not tell.
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
    """Who made it, where the system says so: what is fast on one kind may not be on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    makers = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), platform.machine())
    return makers.get(name, name)


def table(kept: Sequence[Mapping[str, Any]]) -> str:
    """The table of the page.

    :param kept: Lines of the file of results.
    """
    rows = []
    for figure in FIGURES:
        runs = [line for line in kept if figure.name in line.get("figures", {})]
        told = "; ".join(line["told"] for line in kept if line.get("figure") == figure.name)
        measured: dict[str, list[float]] = {}
        for line in runs:
            for label, value in line["figures"][figure.name].items():
                measured.setdefault(label, []).append(value)
        cells = [_cell(figure, label, values) for label, values in measured.items()]
        rows.append([figure.what, figure.goal, "; ".join(cells), _runs(runs), told, f"`{figure.command}`"])
    return markdown_table(
        ["figure", "goal", "measured", "runs", "before runs were kept", "command, after `python benchmarks/`"], rows
    )


def _cell(figure: Figure, label: str, values: Sequence[float]) -> str:
    """Median, and the smallest and largest; bold where the goal is missed."""
    middle = _number(median(values)) + figure.unit
    if not figure.is_reached(median(values)):
        middle = f"**{middle}**"
    spread = f" ({_number(min(values))} to {_number(max(values))})" if len(values) > 1 else ""
    return f"{label}: {middle}{spread}" if label else middle + spread


def _runs(runs: Sequence[Mapping[str, Any]]) -> str:
    """How many, on which kinds of processor, and how many on a machine that did something else as well."""
    if not runs:
        return ""
    processors = ", ".join(sorted({line["processor"] for line in runs}))
    n_busy = sum(line["busy"] for line in runs)
    return f"{len(runs)}, {processors}" + (f", {'all' if n_busy == len(runs) else n_busy} busy" if n_busy else "")


def _number(value: float) -> str:
    """Three digits that count, and all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def read_results(file: Path) -> list[dict[str, Any]]:
    """Runs that were kept, and what was told of figures before runs were kept."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what was asked for, and writes the table."""
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
    write_table(options.page, "speed", table(read_results(options.results)))


if __name__ == "__main__":
    main()
