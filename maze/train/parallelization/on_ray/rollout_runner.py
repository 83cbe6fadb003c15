"""Rollouts in actors of Ray: `maze-run runner=ray`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from maze.core.annotations import override
from maze.core.rollout.parallel_rollout_runner import DistributedRolloutRunner
from maze.core.utils.factory import ConfigType
from maze.core.utils.worker_pool import TaskPool
from maze.train.parallelization.placement import placement_of


class RayRolloutRunner(DistributedRolloutRunner):
    """Distribute the episodes over actors of Ray; each episode is delivered once, also if actors are lost.

    :param placement: The execution backend, or its configuration.
    :param address: Address of Ray, see :class:`~maze.train.parallelization.on_ray.ray_placement.OnRay`.
    :param env_groups: Number of actors; 0: number of CPUs.
    :param arguments: Arguments of :class:`~maze.core.rollout.rollout_runner.RolloutRunner`.
    """

    sends_files: ClassVar[bool] = True

    def __init__(
        self,
        *arguments: Any,
        placement: ConfigType = "ray",
        address: str | None = None,
        env_groups: int = 0,
        **rest: Any,
    ) -> None:
        super().__init__(*arguments, **rest)
        self.placement = placement_of(placement, address, env_groups)

    @contextmanager
    @override(DistributedRolloutRunner)
    def _pool(self) -> Iterator[TaskPool]:
        try:
            pool = self.placement.actor_pool(self.n_episodes)
            assert pool is not None, "this runner needs a Ray placement"
            yield pool
        finally:
            self.placement.close()
