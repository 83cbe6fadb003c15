"""A runner that takes no time, for tests of sweeps."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, get_stats_logger, increment_log_step
from maze.runner import Runner
from maze.train.utils.run_process import write_record

ROOT_CONFIG = """
defaults:
  - _self_
  - size: ~
log_base_dir: outputs
seeding: {env_base_seed: ~, agent_base_seed: ~, cudnn_determinism_flag: false}
runner: {_target_: tests.cli.sweep_stub.StubRunner, x: 0.0, y: 0.0, name: a, directory: ~}
hydra:
  run: {dir: run}
  sweep: {dir: sweep, subdir: "${hydra:job.num}"}
  job: {chdir: true}
  callbacks: {run_directory: {_target_: maze.cli.run_directory.RunDirectoryCallback}}
"""


def write_root_config(directory: Path) -> list[str]:
    """Write the configuration; return the first arguments of the command that uses it."""
    (directory / "conf").mkdir()
    (directory / "conf" / "stub.yaml").write_text(ROOT_CONFIG)
    return ["-cd", str(directory / "conf"), "-cn", "stub", f"runner.directory={directory}"]


@dataclass
class StubRunner(Runner):
    """Its score is x + 10 * (the seed's last digit); ``events.json`` maps values of x to injected events."""

    x: float
    y: float
    name: str
    directory: str

    def setup(self, cfg: DictConfig) -> None:
        self.seed = cfg.seeding.env_base_seed

    def run(self, **kwargs: Any) -> None:
        with open(Path(self.directory) / "runs.txt", "a") as file:
            file.write(f"{self.x:g}\n")
        events = Path(self.directory) / "events.json"
        event = json.loads(events.read_text()).get(f"{self.x:g}") if events.is_file() else None
        if event == "raise":
            raise RuntimeError("the reactor is hot")
        if event == "interrupt":
            raise KeyboardInterrupt
        if event == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "hang":
            Path("pid").write_text(str(os.getpid()))
            time.sleep(60)
        if event == "report":  # as a training run does after each epoch
            score = {"best_score": self.x, "violation": None, "minimized": False}
            write_record(Path.cwd(), "running", {"epoch": 1, **score})
            time.sleep(30)
        best = {"nan": float("nan"), "none": None}.get(str(event), self.x + 10 * (self.seed % 10))
        selection = SimpleNamespace(best_reward=best)
        if event == "less":  # a minimised KPI
            selection.best_reward, selection.maximize = -best, False
        if str(event).startswith("broken by"):
            selection.is_constrained, selection.best_violation = True, float(str(event).split()[-1])
        self.trainer = SimpleNamespace(model_selection=selection)
        self._log(1.0, self.x + 1, self.x)

    def _log(self, *rewards: float) -> None:
        stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("eval"))
        for reward in rewards:
            stats.add_value(BaseEnvEvents.reward, reward, name="sum")
            stats.reduce()
            increment_log_step()
