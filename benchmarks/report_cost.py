"""Cost of the report: PPO on CartPole with and without it.

Runs alternate between the two, with the same seeds and everything else that a run writes, in one process. Printed
are the ratio of their CPU times (medians), and the share of the time that the runs with a report spent in its
writer, which other processes disturb less. The report is written every two seconds instead of every ten, so that a
short training shows more than what a long one pays.

    python benchmarks/report_cost.py            # 7 rounds of 12 epochs
    python benchmarks/report_cost.py --quick    # 2 rounds of 4
    python benchmarks/report_cost.py --json out.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from maze.api.run_context import RunContext
from maze.cli.run_summary import facts_of
from maze.core.log_stats.log_stats import LogStatsWriter
from maze.report.run_page import ReportWriter

INTERVAL = 2.0


class NoReport(LogStatsWriter):
    """Takes statistics and does nothing with them."""

    def write(self, path: str | None, step: int, stats: Any) -> None:
        """Does nothing."""


class TimedReport(ReportWriter):
    """Knows how long it took."""

    seconds = 0.0

    def _guarded(self, act: Callable[[], Any]) -> None:
        start = time.process_time()
        super()._guarded(act)
        self.seconds += time.process_time() - start


def train(has_report: bool, n_epochs: int) -> tuple[float, float]:
    """CPU seconds of a run, and those of its report."""
    writers: list[TimedReport] = []

    def writer(directory: Path, project: Path) -> LogStatsWriter:
        if not has_report:
            return NoReport()
        writers.append(TimedReport(directory, facts_of(directory, project), interval=INTERVAL))
        return writers[-1]

    with TemporaryDirectory() as directory, patch("maze.cli.run_summary.report_writer", writer):
        seeds = {"seeding.env_base_seed": 1, "seeding.agent_base_seed": 1}
        rc = RunContext(
            run_dir=directory, algorithm="ppo", env="CartPole-v1", overrides=seeds, experiment=None, silent=True
        )
        start = time.process_time()
        rc.train(n_epochs=n_epochs)
        rc.close()
        return time.process_time() - start, sum(each.seconds for each in writers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    n_rounds, n_epochs = (2, 4) if options.quick else (7, 12)
    train(True, 1)  # imports
    pairs = [(train(False, n_epochs)[0], train(True, n_epochs)) for _ in range(n_rounds)]
    results = {
        "with_over_without": median(with_report for _, (with_report, _) in pairs) / median(off for off, _ in pairs),
        "share_in_writer": sum(own for _, (_, own) in pairs) / sum(total for _, (total, _) in pairs),
        "seconds_of_a_training": median(off for off, _ in pairs),
    }
    for name, value in results.items():
        print(f"{name:<24} {value:.4f}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
