"""Kill actors of Ray and machines repeatedly while runs and rollouts use a small cluster.

    python benchmarks/ray_kill_campaign.py ppo --every 20 --actors 8 --epochs 60 --minutes 10 --reach 475
    python benchmarks/ray_kill_campaign.py --minutes 2                 # all four, shortly

A cluster with two worker nodes is simulated on this machine. Every few seconds an actor is killed (SIGKILL), every
fourth time a node with all its actors instead; another node joins some seconds later. What ends before `--minutes` are
over continues: runs are resumed for as many epochs again, rollouts start again. A run passes if

* it ends by itself with status 0, and no update is missing: the record of the run has the requested number of
  environment steps (PPO, IMPALA); the weights are bit for bit those of an undisturbed run (ES); each episode is
  delivered once, with the seeds that `runner=sequential` has (rollouts);
* when it is over there is no process of an actor, and after the cluster's end no process at all and no file in /dev/shm
  more than before; meanwhile, the learner has not opened more and more descriptors.

`--seed` decides who is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch

from maze.core.utils.checkpoint import load_state
from maze.maze_cli import main as maze_run

COMMON = ("env.name=CartPole-v1", "seeding.env_base_seed=11", "seeding.agent_base_seed=11")
TRAIN = ("-cn", "conf_train", *COMMON, "model=flatten_concat")
ACTOR_CRITIC = ("critic=flatten_concat_shared", "algorithm.rollout_evaluator.n_episodes=16", "algorithm.patience=0")
UPDATES, STEPS, ENVS = 20, 100, 16
"""Updates of an epoch, environment steps of a rollout, environments (PPO) or rollouts of a batch (IMPALA)."""
RESTARTS = "actor_restarts"
NODE = {"object_store_memory": 200 * 2**20}
SECONDS_TO_END = 15.0
"""Time that actors have to end, once their run has: the nodes end them."""


@dataclass
class Killer:
    """Kills while a command runs."""

    cluster: Any
    cpus_per_node: int
    every: float
    rng: random.Random
    n_kills: int
    """Largest number of kills."""
    n_actors: int = 0
    """Actors that were killed by themselves."""
    n_nodes: int = 0
    seen: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Memory and descriptors of the command's process, before each kill."""

    def watch(self, command: subprocess.Popen[bytes]) -> int:
        """Kill until the command has ended; its status."""
        while True:
            if self.n_actors + self.n_nodes == self.n_kills:
                return command.wait()
            has_begun = bool(actors())
            with contextlib.suppress(subprocess.TimeoutExpired):
                return command.wait(self.every if has_begun else 1.0)
            if not has_begun:
                continue
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(command.pid)
                self.seen["MB"].append(process.memory_info().rss >> 20)
                self.seen["descriptors"].append(process.num_fds())
            if (self.n_actors + self.n_nodes) % 4 == 3:
                self._replace_a_node(command)
            elif found := actors():
                with contextlib.suppress(psutil.Error):
                    self.rng.choice(found).kill()
                    self.n_actors += 1

    def _replace_a_node(self, command: subprocess.Popen[bytes]) -> None:
        node = self.rng.choice(sorted(self.cluster.worker_nodes, key=lambda node: str(node.node_id)))
        self.cluster.remove_node(node, allow_graceful=False)
        self.n_nodes += 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(min(5.0, self.every / 2))
        self.cluster.add_node(num_cpus=self.cpus_per_node, **NODE)


def actors() -> list[psutil.Process]:
    """Actors of the cluster, whose nodes are children of this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Host"):
                found.append(process)
    return found


@contextlib.contextmanager
def cluster_of_two(cpus_per_node: int) -> Iterator[Any]:
    """A head without CPUs and two worker nodes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **NODE, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=cpus_per_node, **NODE)
        yield cluster
    finally:
        cluster.shutdown()


def arguments_of(name: str, options: argparse.Namespace) -> tuple[str, ...]:
    """The command, without what says where it runs."""
    n_actors, common = options.actors, (*TRAIN, f"algorithm={name}")
    if name == "ppo":
        return (*common, *ACTOR_CRITIC, f"algorithm.epoch_length={UPDATES}", f"runner.concurrency={ENVS}")
    if name == "impala":
        sizes = (f"algorithm.num_actors={n_actors}", f"algorithm.actors_batch_size={ENVS // 2}")
        rollouts = (*sizes, "algorithm.envs_per_actor=2", f"algorithm.n_rollout_steps={STEPS}")
        return (*common, *ACTOR_CRITIC, *rollouts, f"algorithm.epoch_length={UPDATES}")
    if name == "es":
        return (*common, "algorithm.n_rollouts_per_update=64", "runner.shared_noise_table_size=1000000")
    recorded = ("runner.record_actions=true", "runner.record_trajectory=false", "runner.record_event_logs=false")
    return (*COMMON, f"runner.n_episodes={options.epochs * 100}", *recorded)


def undisturbed(name: str) -> str | None:
    """The runner whose results are to be the same, if they do not depend on speed."""
    return {"es": "dev", "rollouts": "sequential"}.get(name)


def problems_of(name: str, run: Path, reference: Path | None, n_epochs: int) -> list[str]:
    """What is missing in the run's directory."""
    if name in ("ppo", "impala"):
        expected = n_epochs * UPDATES * STEPS * ENVS
        found = json.loads((run / "run.json").read_text())["n_env_steps"]
        return [] if found == expected else [f"{found} environment steps, expected {expected}"]
    assert reference is not None
    if name == "es":
        one, other = (tensors(load_state(directory / "latest.pt")["model"]) for directory in (reference, run))
        return [f"{key} differs" for key in one if not torch.equal(one[key], other[key])]
    here, there = (sorted(p.name for p in (d / "action_records").rglob("*")) for d in (reference, run))
    return [] if here == there else [f"{len(there)} episodes, expected {len(here)}"]


def tensors(state: Any, place: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a state, by their place in it."""
    if isinstance(state, torch.Tensor):
        return {place: state}
    parts = state.items() if isinstance(state, dict) else ()
    return {name: tensor for key, part in parts for name, tensor in tensors(part, f"{place}/{key}").items()}


def best_return(run: Path) -> float:
    """The best mean return of an evaluation; 0: there was none."""
    return float(json.loads((run / "run.json").read_text())["best_score"] or 0.0)


def restarts(run: Path) -> int:
    """How many actors the statistics say were replaced."""
    with open(run / "progress.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return round(sum(float(row[key]) for row in rows for key in row if RESTARTS in key and row[key]))


def left_after(seconds: float, found: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    """Processes that are there still after some time."""
    deadline = time.monotonic() + seconds
    while (left := found()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def campaign(name: str, options: argparse.Namespace, root: Path) -> list[str]:
    """Run one thing on a cluster where something is killed all the time; what was wrong."""
    arguments, cpus = arguments_of(name, options), -(-options.actors // 2)
    placed = ("runner=ray", f"runner.env_groups={0 if name == 'impala' else options.actors}")
    # machines come back after seconds, so that nothing is wrong with an actor that is lost several times in a row
    placed = (*placed, "runner.placement.max_restarts=10")
    problems: list[str] = []
    n_rounds, n_restarts, start, last = 0, 0, time.monotonic(), ""
    with cluster_of_two(cpus) as cluster:
        killer = Killer(cluster, cpus, options.every, random.Random(options.seed), options.kills)
        while not problems and (n_rounds == 0 or time.monotonic() - start < 60 * options.minutes):
            n_rounds += 1
            run, n_epochs, killer.seen = root / f"{name}-{n_rounds}", n_rounds * options.epochs, defaultdict(list)
            wanted = () if name == "rollouts" else (f"algorithm.n_epochs={n_epochs}",)
            resumed = (f"input_dir={last}", "resume=true") if last and wanted else ()
            with open(root / f"{name}.log", "ab") as log:
                command = (sys.executable, "-m", "maze.maze_cli", *arguments, *wanted, *resumed, *placed)
                where = (f"runner.address={cluster.address}", f"hydra.run.dir={run}")
                status = killer.watch(subprocess.Popen([*command, *where], stdout=log, stderr=log))
            problems += [f"an actor is left: {process.pid}" for process in left_after(SECONDS_TO_END, actors)]
            if status != 0:
                problems.append(f"status {status}: {(root / f'{name}.log').read_text()[-2000:]}")
                break
            reference = None
            if (runner := undisturbed(name)) is not None:
                reference = root / f"{name}-{runner}-{n_epochs if wanted else options.epochs}"
                if not reference.exists():
                    with open(root / f"{name}.log", "a") as log, contextlib.redirect_stdout(log):
                        assert maze_run([*arguments, *wanted, f"runner={runner}", f"hydra.run.dir={reference}"]) == 0
            problems += problems_of(name, run, reference, n_epochs)
            descriptors = killer.seen["descriptors"][1:]  # the first one is of a process that is still being set up
            if descriptors and descriptors[-1] > 1.5 * descriptors[0]:
                problems.append(f"more and more descriptors: {descriptors}")
            n_restarts, last = n_restarts + (restarts(run) if wanted else 0), str(run)
        seconds = time.monotonic() - start
    if options.kills and not killer.n_actors + killer.n_nodes:
        problems.append("nothing was killed: reduce --every or increase --epochs")
    left = left_after(SECONDS_TO_END, lambda: psutil.Process().children(recursive=True))
    problems += [f"a process is left: {process}" for process in left]
    details = ""
    if last and name in ("ppo", "impala"):
        details = f", {n_restarts} actors replaced, best return {best_return(Path(last)):.0f}"
        if best_return(Path(last)) < options.reach:
            problems.append(f"the best return is {best_return(Path(last)):.0f}, {options.reach:g} was to be reached")
    seen = ", ".join(f"{kind} {of_kind[1:2]} to {of_kind[-1:]}" for kind, of_kind in killer.seen.items())
    print(
        f"{name}: {n_rounds} rounds, {seconds:.0f} s, {killer.n_actors} actors and {killer.n_nodes} nodes "
        f"killed{details}, {seen}: {'; '.join(problems) or 'passed'}",
        flush=True,
    )
    return problems


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["ppo", "impala", "es", "rollouts"]
    parser.add_argument("names", nargs="*", default=names, help=f"what is run: {', '.join(names)}")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between kills")
    parser.add_argument("--actors", type=int, default=8)
    parser.add_argument("--kills", type=int, default=10**9, help="largest number of kills")
    parser.add_argument("--epochs", type=int, default=60, help="of a run; hundreds of episodes of rollouts")
    parser.add_argument("--minutes", type=float, default=0.0, help="for so long something is killed, at least")
    parser.add_argument("--reach", type=float, default=0.0, help="return that PPO and IMPALA have to reach")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # a node that is gone is noticed after seconds, not after a minute
    health = {"period_ms": 500, "timeout_ms": 1000, "failure_threshold": 3, "initial_delay_ms": 500}
    os.environ.update({f"RAY_health_check_{name}": str(value) for name, value in health.items()})
    os.environ["RAY_AUTH_MODE"] = "disabled"
    root = Path(tempfile.mkdtemp(prefix="maze-ray-kills-"))
    problems = []
    for name in options.names:
        before = set(os.listdir("/dev/shm"))
        problems += campaign(name, options, root)
        if left := set(os.listdir("/dev/shm")) - before:
            problems.append(str(left))
            print(f"{name} has left in /dev/shm: {left}", flush=True)
    if problems:
        print(f"the runs are in {root}")
        return 1
    shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
