"""Runners of IMPALA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from maze.core.annotations import override
from maze.train.parallelization.placement import InProcess, Processes
from maze.train.trainers.common.training_runner import TrainingRunner


@dataclass
class ImpalaRunner(TrainingRunner):
    """Train on rollouts that actors collect with slightly older policies."""

    eval_concurrency: int = 0

    default_algorithm: ClassVar[str] = "maze.train.trainers.impala.impala_algorithm_config.ImpalaAlgorithmConfig"
    trains: ClassVar[str] = "maze.train.trainers.impala.impala_trainer.IMPALA"
    replaced_arguments: ClassVar[Mapping[str, str]] = {
        "concurrency": "algorithm.num_actors and algorithm.envs_per_actor"
    }


@dataclass
class ImpalaDevRunner(ImpalaRunner):
    """Actors collect one after another in the training process: reproducible and easy to debug."""


@dataclass
class ImpalaLocalRunner(ImpalaRunner):
    """Actors collect in worker processes while the learner learns.

    :param start_method: Start method of processes: `forkserver`, `spawn`, `fork`; `dummy`: actors in the training
        process.
    """

    start_method: str = "forkserver"
    default_placement: ClassVar[str] = "processes"

    @override(TrainingRunner)
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start_method == "dummy":
            self.placement = InProcess()
        elif self.placement in (None, "processes"):
            self.placement = Processes(self.start_method)
        elif isinstance(self.placement, Mapping) and self.placement.get("start_method", "") is None:
            self.placement = {**self.placement, "start_method": self.start_method}
