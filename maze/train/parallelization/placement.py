"""Where a training steps its environments: in its own process, in worker processes, on a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from typing_extensions import Unpack

from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.errors import ConfigError
from maze.core.utils.factory import TARGET_KEY, ConfigType, Factory
from maze.train.parallelization.distributed_actors.env_groups import in_groups
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
    from maze.train.parallelization.on_ray.crew import Crew


PATIENCE = 60.0
"""Seconds that a worker process has beyond what its environments may take."""


class ActorsArguments(TypedDict):
    """What actors do that collect rollouts while a policy learns."""

    policy: TorchPolicy
    n_rollout_steps: int
    """Number of environment steps of a rollout."""
    n_actors: int
    batch_size: int
    """Number of rollouts in a batch."""
    queue_out_of_sync_factor: float
    """Times `batch_size`, the number of finished rollouts that may wait."""
    env_instance_seeds: list[int]
    """A seed for each environment: as many for each actor as it steps together."""
    agent_instance_seeds: list[int]
    """A seed for the policy of each actor."""


class Placement(ABC):
    """Makes what steps environments. A runner has one, and a trainer that asks it works wherever it is.

    A further placement (a cluster) is one subclass: :meth:`vector_env` is enough for A2C, PPO, SAC and all evaluations;
    :meth:`actors` is for trainers that learn while others collect.
    """

    in_process: ClassVar[bool] = False
    """Whether all environments are in the process of the training."""

    env_timeout: float | None = None
    """Seconds that a step or a reset of an environment may take. Environments see to it themselves; a placement ends
    the processes of those that cannot, because native code of theirs does not return."""

    env_groups: int = 1
    """Number of groups in which environments act by themselves, see
    :class:`~maze.train.parallelization.distributed_actors.env_groups.GroupedVectorEnv`."""

    @abstractmethod
    def vector_env(
        self, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str | None = None
    ) -> StructuredVectorEnv:
        """Makes environments that are stepped together, by a policy in the process of the training.

        :param env_factory: Makes one environment.
        :param n_envs: Number of environments.
        :param logging_prefix: Where their statistics are logged (`train`, `eval`); `None`: nowhere.
        """

    @abstractmethod
    def actors(self, env_factory: Callable[[], Any], **arguments: Unpack[ActorsArguments]) -> DistributedActors:
        """Makes actors that collect rollouts with copies of a policy while it learns.

        :param env_factory: Makes one environment.
        :param arguments: What they are to do.
        """

    def crew(self, n_wanted: int, n_needed: int = 0) -> Crew | None:
        """The actors of a cluster, for trainers that give them other work than to step environments.

        :param n_wanted: Number of actors that there is work for.
        :param n_needed: Number of actors that there have to be.
        :return: `None`: there is no cluster in this placement.
        """
        return None

    def join(self, address: str) -> None:
        """Uses the cluster with this address.

        :raises ConfigError: There is no cluster in this placement.
        """
        raise ConfigError(f"runner.address: {address} is of use with runner=ray only, found {type(self).__name__}.")

    def close(self) -> None:
        """Gives back what all environments shared; they are closed already."""

    def workers(self, **arguments: Any) -> BaseDistributedWorkersWithBuffer:
        """Makes what collects rollouts into a replay buffer; the learner waits for it, so that all placements collect
        the same.

        :param arguments: Those of `BaseDistributedWorkersWithBuffer`.
        """
        from maze.train.parallelization.distributed_actors.dummy_distributed_workers_with_buffer import (
            DummyDistributedWorkersWithBuffer,
        )

        return DummyDistributedWorkersWithBuffer(**arguments, make_env=self._replay_env)

    def _replay_env(self, env_factory: Callable[[], Any], n_envs: int) -> StructuredVectorEnv:
        return self.vector_env(env_factory, n_envs)


class InProcess(Placement):
    """Steps all environments in the process of the training: the fastest choice for environments that are cheap."""

    in_process = True

    @override(Placement)
    def vector_env(
        self, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str | None = None
    ) -> StructuredVectorEnv:
        return in_groups(
            self.env_groups, n_envs, logging_prefix, lambda n, prefix: SequentialVectorEnv([env_factory] * n, prefix)
        )

    @override(Placement)
    def actors(self, env_factory: Callable[[], Any], **arguments: Unpack[ActorsArguments]) -> DistributedActors:
        from maze.train.parallelization.distributed_actors.sequential_distributed_actors import (
            SequentialDistributedActors,
        )

        given = arguments_of_actors(env_factory, **arguments)
        for name in ("queue_out_of_sync_factor", "actor_agent_seeds"):  # they take turns, with the policy itself
            del given[name]
        return SequentialDistributedActors(**given)


@dataclass
class Processes(Placement):
    """Steps the environments in worker processes: worth it where a step costs far more than sending an action.

    :param start_method: How processes are started: `forkserver`, `spawn` or `fork`; `None`: `forkserver` where there
        is one.
    :param n_workers: Number of worker processes of a vector environment; `None`: as many as there are CPUs.
    """

    start_method: str | None = None
    n_workers: int | None = None

    @override(Placement)
    def vector_env(
        self, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str | None = None
    ) -> StructuredVectorEnv:
        return self._vector_env(env_factory, n_envs, logging_prefix)

    @override(Placement)
    def _replay_env(self, env_factory: Callable[[], Any], n_envs: int) -> StructuredVectorEnv:
        return self._vector_env(env_factory, n_envs, None, acts=True)

    def _vector_env(
        self, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str | None, acts: bool = False
    ) -> StructuredVectorEnv:
        timeout = call_time_limit(self.env_timeout, n_envs)

        def make(n: int, prefix: str | None) -> SubprocVectorEnv:
            return SubprocVectorEnv(
                [env_factory] * n, prefix, self.start_method, self.n_workers, timeout=timeout, acts=acts
            )

        return in_groups(self.env_groups, n_envs, logging_prefix, make)

    @override(Placement)
    def actors(self, env_factory: Callable[[], Any], **arguments: Unpack[ActorsArguments]) -> DistributedActors:
        from maze.train.parallelization.distributed_actors.subproc_distributed_actors import SubprocDistributedActors

        return SubprocDistributedActors(
            **arguments_of_actors(env_factory, **arguments), start_method=self.start_method or "forkserver"
        )


class Batched(Placement):
    """Steps all environments at once, in the arrays of a simulation that is written for many; see
    :class:`~maze.core.env.batched_core_env.BatchedCoreEnv` and
    :class:`~maze.core.wrappers.gym_vector_env.GymBatch`. Wrappers, which see one environment at a time, have no place
    there."""

    in_process = True

    @override(Placement)
    def vector_env(
        self, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str | None = None
    ) -> StructuredVectorEnv:
        from maze.train.parallelization.vector_env.batched_vector_env import BatchedVectorEnv

        env = env_factory()
        try:
            batch = _unwrapped(env).batch(n_envs)
            for kind, of_batch, of_one in (
                ("actions", batch.action_spaces, env.action_spaces_dict),
                ("observations", batch.observation_spaces, env.observation_spaces_dict),
            ):
                if of_batch != of_one:
                    batch.close()
                    raise ConfigError(
                        f"runner.placement=batched: the {kind} of a single environment, {of_one}, are not those of its "
                        f"simulation of many, {of_batch}; use runner.placement=in_process."
                    )
            return BatchedVectorEnv(batch, logging_prefix)
        finally:
            env.close()

    @override(Placement)
    def actors(self, *args: Any, **kwargs: Any) -> DistributedActors:
        raise ConfigError(
            "runner.placement=batched: environments that are stepped at once have no actors of their own, which this "
            "algorithm asks for; use A2C, PPO, SAC or DQN, or another placement."
        )


def _unwrapped(env: Any) -> Any:
    """The environment without wrappers, if it can be stepped in a batch.

    :raises ConfigError: It cannot.
    """
    wrappers = []
    # by their own classes: wrappers pass for what they wrap
    while CoreEnv not in type(env.__dict__["_wrapped_env"]).__mro__:
        wrappers.append(type(env).__name__)
        env = env.env
    if not hasattr(type(env), "batch"):
        raise ConfigError(
            f"runner.placement=batched: expected an environment whose simulation is written for many at once (a "
            f"BatchedMazeEnv), found {type(env).__name__}; use runner.placement=in_process or processes."
        )
    if wrappers:
        raise ConfigError(
            f"runner.placement=batched: wrappers step one environment at a time, and there are {', '.join(wrappers)}. "
            "Leave them out, or use runner.placement=in_process."
        )
    return env


def call_time_limit(env_timeout: float | None, n_envs: int) -> float | None:
    """Seconds that a call of a worker may take: it may have all steps and resets to do, and much to import before.

    :param env_timeout: Seconds that a step or a reset may take; `None`: any time.
    :param n_envs: Number of environments.
    """
    return None if env_timeout is None else PATIENCE + 2 * n_envs * env_timeout


def arguments_of_actors(env_factory: Callable[[], Any], **arguments: Unpack[ActorsArguments]) -> dict[str, Any]:
    """The same as arguments of `ActorsAhead`."""
    given = dict(arguments)
    seeds = {f"actor_{kind}_seeds": given.pop(f"{kind}_instance_seeds") for kind in ("env", "agent")}
    n_envs = len(arguments["env_instance_seeds"]) // arguments["n_actors"]
    return {"env_factory": env_factory, "envs_per_actor": n_envs, **given, **seeds}


PLACEMENTS: Mapping[str, str] = {
    "in_process": f"{__name__}.InProcess",
    "processes": f"{__name__}.Processes",
    "batched": f"{__name__}.Batched",
    "ray": "maze.train.parallelization.on_ray.ray_placement.OnRay",
}
"""Placements by the names that configurations may use."""


def placement_of(config: ConfigType) -> Placement:
    """The placement that a runner is configured with.

    :param config: A name of `PLACEMENTS`, a placement, or its configuration.
    :raises ConfigError: There is no such placement.
    """
    if isinstance(config, str):
        if config not in PLACEMENTS:
            raise ConfigError(
                f"runner.placement: expected one of {', '.join(PLACEMENTS)} or the configuration of a Placement, got "
                f"{config!r}."
            )
        config = {TARGET_KEY: PLACEMENTS[config]}
    return Factory(Placement).instantiate(config, config_path="runner.placement")  # type: ignore[type-abstract]


def placed(config: ConfigType, address: str | None, env_groups: int, env_timeout: float | None = None) -> Placement:
    """The placement of a runner, told what the runner says of it.

    :param config: See :func:`placement_of`.
    :param address: The cluster to be used; `None`: what the placement itself says.
    :param env_groups: Number of groups in which environments act by themselves; 0: what the placement itself says.
    :param env_timeout: Seconds that a step or a reset of an environment may take; `None`: any time.
    :raises ConfigError: There is no such placement, or no cluster in it.
    """
    placement = placement_of(config)
    placement.env_timeout = env_timeout
    if address is not None:
        placement.join(address)
    placement.env_groups = env_groups or placement.env_groups
    return placement
