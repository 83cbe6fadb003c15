"""Runners of IMPALA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from maze.core.annotations import override
from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
from maze.train.parallelization.placement import InProcess, Processes
from maze.train.trainers.common.training_runner import TrainingRunner

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


@dataclass
class ImpalaRunner(TrainingRunner):
    """Trains on rollouts that actors collect with slightly older policies."""

    eval_concurrency: int = 0

    default_algorithm: ClassVar[str] = "maze.train.trainers.impala.impala_algorithm_config.ImpalaAlgorithmConfig"
    trains: ClassVar[str] = "maze.train.trainers.impala.impala_trainer.IMPALA"
    replaced_arguments: ClassVar[Mapping[str, str]] = {
        "concurrency": "algorithm.num_actors and algorithm.envs_per_actor"
    }

    def create_distributed_rollout_actors(
        self,
        env_factory: Callable[[], Any],
        policy: TorchPolicy,
        n_rollout_steps: int,
        n_actors: int,
        batch_size: int,
        queue_out_of_sync_factor: float,
        env_instance_seeds: list[int],
        agent_instance_seeds: list[int],
    ) -> DistributedActors:
        """Builds the actors; see :meth:`~maze.train.parallelization.placement.Placement.actors`."""
        return super()._make_actors(
            env_factory=env_factory,
            policy=policy,
            n_rollout_steps=n_rollout_steps,
            n_actors=n_actors,
            batch_size=batch_size,
            queue_out_of_sync_factor=queue_out_of_sync_factor,
            env_instance_seeds=env_instance_seeds,
            agent_instance_seeds=agent_instance_seeds,
        )

    @override(TrainingRunner)
    def _make_actors(self, **arguments: Any) -> DistributedActors:
        return self.create_distributed_rollout_actors(**arguments)


@dataclass
class ImpalaDevRunner(ImpalaRunner):
    """Actors take turns in the process of the training: reproducible, and easy to debug."""


@dataclass
class ImpalaLocalRunner(ImpalaRunner):
    """Actors in processes of their own, which collect while the learner learns.

    :param start_method: How processes are started: `forkserver`, `spawn`, `fork`; `dummy` does without them.
    """

    start_method: str = "forkserver"
    default_placement: ClassVar[str] = "processes"

    @override(TrainingRunner)
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.placement in (None, "processes"):
            self.placement = InProcess() if self.start_method == "dummy" else Processes(self.start_method)
