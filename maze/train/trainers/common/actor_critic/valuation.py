"""From a rollout as it was collected to tensors with advantages and targets.

Policy and critic are asked about a whole rollout at once. Their answers become streams, sequences of decisions in the
order of time, which a return function (GAE, V-trace) turns into advantages and targets. Where all environments take
the same sub-steps, the rows of the networks lie in a stream as they are; otherwise they are found by index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from maze.core.agent.returns import actor_streams, has_known_reward, next_values_from, structured_gae
from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchStateCritic, TorchStepStateCritic
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.train.trainers.common.actor_critic.rollout_batch import AlignedSubsteps, RolloutBatch

if TYPE_CHECKING:
    from maze.core.agent.state_critic_input_output import StateCriticOutput
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.agent.torch_policy_output import PolicyOutput
    from maze.core.rollout.rollout_columns import RolloutColumns

Place = tuple[int, int]
"""(tick, environment)"""

Outputs = tuple["PolicyOutput", "StateCriticOutput"]

Index = tuple[np.ndarray, np.ndarray]
"""Time and sequence of each row in a stream."""


# -- returns ---------------------------------------------------------------------------------------


@dataclass
class Streams:
    """Sequences of decisions, time-major `[n_times, n_sequences]`, without gradients.

    Lists hold an entry for each output of the critic, or (rewards) for each sub-step of an environment step.
    """

    values: list[Tensor]
    """V before each decision."""
    next_values: list[Tensor]
    """V after it, of the final observation where an episode was cut off. Not even finite where one terminated."""
    rewards: list[Tensor]
    has_own_rewards: bool
    """Whether the values of a sub-step predict its own entry of the rewards; otherwise they predict the sum."""
    terminated: Tensor
    truncated: Tensor
    step_complete: Tensor | None = None
    """Where time passes, so that the discount applies; `None`: everywhere."""
    acts: Tensor | None = None
    """Where decisions are, if not everywhere, see :func:`~maze.core.agent.returns.actor_streams`."""
    log_rhos: list[Tensor] = field(default_factory=list)
    """Logarithms of the importance weights by sub-step, if a return function asked for them."""


@dataclass
class Returns:
    """What there is to learn from streams."""

    advantages: list[Tensor]
    """By sub-step, shaped like the stream."""
    targets: list[Tensor]
    """By output of the critic."""


class ReturnFunction(ABC):
    """Estimates advantages and targets of values."""

    gamma: float
    is_off_policy: ClassVar[bool] = False
    """Whether it needs importance weights: then rollouts hold the logits of the policies that acted."""

    @abstractmethod
    def __call__(self, critic: TorchStateCritic, streams: Streams) -> Returns:
        """The returns of all decisions."""


@dataclass(frozen=True)
class GAE(ReturnFunction):
    """Generalised advantage estimation (Schulman et al. 2016)."""

    gamma: float
    """Discount for each environment step."""
    gae_lambda: float
    """0: one-step targets, 1: discounted returns."""

    @override(ReturnFunction)
    def __call__(self, critic: TorchStateCritic, streams: Streams) -> Returns:
        values, ends = streams.values, (streams.terminated, streams.truncated)
        if streams.step_complete is None:  # whole environment steps: the critic says what its values predict
            targets = critic.compute_structured_return(
                self.gamma,
                self.gae_lambda,
                streams.rewards,
                values,
                streams.terminated,
                truncated=streams.truncated,
                next_values=streams.next_values,
            )
            advantages = [target - values[min(index, len(values) - 1)] for index, target in enumerate(targets)]
            return Returns(advantages, targets[: len(values)])
        (reward,), (value,), (following,) = streams.rewards, values, streams.next_values
        advantage = structured_gae(
            reward, value, following, *ends, streams.step_complete, self.gamma, self.gae_lambda, acts=streams.acts
        )
        return Returns([advantage], [advantage + value])


# -- valuation -------------------------------------------------------------------------------------


def value_rollout(model: TorchActorCritic, columns: RolloutColumns, returns: ReturnFunction) -> RolloutBatch:
    """Asks policy and critic about a whole rollout at once, and computes what there is to learn.

    :param model: The model that learns.
    :param columns: The rollout.
    :param returns: How advantages and targets are estimated.
    :raises ConfigError: The critic cannot value the sub-steps of such a rollout.
    """
    critic = model.critic
    assert isinstance(critic, TorchStateCritic)
    if isinstance(critic, TorchDeltaStateCritic) and not columns.is_dense():
        raise ConfigError(
            "model.critic: a delta critic needs environments that all take the same sub-steps in the same order, but "
            "the actors of this environment vary. Use a step or a shared critic."
        )
    groups = [_dense_group(model, columns)] if columns.is_dense() else list(_groups_of(model, columns))
    with torch.set_grad_enabled(returns.is_off_policy and torch.is_grad_enabled()):  # the loss uses the same outputs
        outputs = [model.compute_actor_critic_output(group.record) for group in groups]
    with torch.no_grad():
        for group, of_group in zip(groups, outputs, strict=True):
            group.take(of_group, model, returns.is_off_policy)
        if columns.is_dense() or columns.actor_rewards is None or not isinstance(critic, TorchStepStateCritic):
            streams = _streams(model, columns, groups)
        else:
            streams = _streams_of_actors(model, columns, groups, returns.gamma)
        found = returns(critic, streams)
        parts = [group.with_returns(found, returns.is_off_policy) for group in groups]
    return RolloutBatch([part for part in parts if part.n_rows], max(1, int(columns.step_complete.sum())))


@dataclass
class AskedSubsteps(AlignedSubsteps):
    """Sub-steps together with what the networks said about them, gradients included: it is asked for only once."""

    outputs: Outputs


@dataclass
class _Group:
    """What one policy network did, in the order of time; in a dense rollout, what all of them did."""

    record: StructuredSpacesRecord
    index: Index | None
    """Where its rows are in the streams; `None`: everywhere, in the order of the stream."""
    is_known: np.ndarray | None = None
    """Rows whose rewards are known; `None`: all of them."""
    old_log_probs: list[Tensor] = field(default_factory=list)
    log_rhos: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def take(
        self, outputs: tuple[PolicyOutput, StateCriticOutput], model: TorchActorCritic, is_off_policy: bool
    ) -> None:
        """Takes what the networks said about all rows."""
        self.outputs = outputs
        policy_output, critic_output = outputs
        self.values = critic_output.detached_values
        self.old_log_probs = log_probs = policy_output.joint_log_probs_for_actions(self.record.actions)
        if is_off_policy:
            self.old_log_probs = _behaviour_log_probs(model, self.record)
            self.log_rhos = [new - old for new, old in zip(log_probs, self.old_log_probs, strict=True)]

    def with_returns(self, found: Returns, keeps_outputs: bool) -> AlignedSubsteps:
        part = AlignedSubsteps(
            record=self.record,
            advantages=[_rows_in(advantage, self.index) for advantage in found.advantages],
            old_log_probs=self.old_log_probs,
            targets=[_rows_in(target, self.index) for target in found.targets],
            old_values=self.values,
        )
        if self.is_known is not None and not self.is_known.all():
            return part.rows(torch.from_numpy(np.flatnonzero(self.is_known)).to(part.advantages[0].device))
        return AskedSubsteps(**vars(part), outputs=self.outputs) if keeps_outputs else part


def _behaviour_log_probs(model: TorchActorCritic, record: StructuredSpacesRecord) -> list[Tensor]:
    """Joint log-probabilities of the actions under the policies that chose them."""
    mapper = model.policy.distribution_mapper
    return [
        mapper.logits_dict_to_distribution(substep.logits, 1.0).joint_log_prob(substep.action)  # type: ignore[arg-type]  # tensors
        for substep in record.substep_records
    ]


# -- streams ---------------------------------------------------------------------------------------


def _streams(model: TorchActorCritic, columns: RolloutColumns, groups: list[_Group]) -> Streams:
    """Environment steps of a dense rollout, or else ticks of all actors together."""
    n_substeps = len(groups[0].record.substep_records)
    shape = (columns.n_ticks // n_substeps, columns.n_envs)
    values, log_rhos = (
        [_in_stream(groups, rows, shape) for rows in zip(*of_groups, strict=True)]
        for of_groups in ([group.values for group in groups], [group.log_rhos for group in groups])
    )
    ends = _values_at_ends(model, columns, groups[0].record.substep_records if n_substeps > 1 else None)
    last = torch.tensor([ends.pop((columns.n_ticks, env))[1] for env in range(columns.n_envs)])
    final = {(tick // n_substeps, env): value for (tick, env), (_, value) in ends.items()}
    next_values = [next_values_from(value, last.to(value), final) for value in values]
    rewards = _by_substep(columns.rewards, n_substeps, model.device)
    has_own_rewards = isinstance(model.critic, TorchStepStateCritic) and n_substeps > 1
    if has_own_rewards and columns.actor_rewards is not None:
        rewards = _by_substep(columns.actor_rewards, n_substeps, model.device)
        next_values[1:] = [_next_values_of_later_actor(value, final) for value in values[1:]]
    elif has_own_rewards:
        rewards = [torch.stack(rewards).sum(0)] * n_substeps
    terminated, truncated = (
        torch.from_numpy(array.reshape(-1, n_substeps, columns.n_envs).any(axis=1)).to(model.device)
        for array in (columns.terminated, columns.truncated)
    )
    complete = None if columns.is_dense() else torch.from_numpy(_passes_time(columns)).to(model.device)
    return Streams(values, next_values, rewards, has_own_rewards, terminated, truncated, complete, log_rhos=log_rhos)


def _streams_of_actors(model: TorchActorCritic, columns: RolloutColumns, groups: list[_Group], gamma: float) -> Streams:
    """Actors with rewards of their own, and a critic that predicts them: each actor of an environment is a stream.

    The last decisions of a rollout may have no reward yet. Nothing is learned from them, but their values are what
    follows the decisions before.
    """
    assert columns.actor_rewards is not None
    numbers, actors = _numbered_actors(columns)
    acts = actors[..., np.newaxis] == np.arange(len(numbers))
    values, *log_rhos = (
        _in_stream(groups, rows, actors.shape).cpu().numpy()
        for rows in zip(*([*group.values, *group.log_rhos] for group in groups), strict=True)
    )
    ends = {
        place: (numbers[actor], value)
        for place, (actor, value) in _values_at_ends(model, columns).items()
        if actor in numbers
    }
    complete, terminated, truncated = _passes_time(columns), columns.terminated, columns.truncated
    own = actor_streams(values, acts, ends, terminated, truncated, complete, gamma, *log_rhos)
    is_known = has_known_reward(complete)
    is_last_known = complete & ~np.append(is_known[1:], np.zeros_like(is_known[:1]), axis=0)
    has_left = False if columns.actor_done is None else acts & columns.actor_done[..., np.newaxis]
    for group in groups:
        assert group.index is not None
        ticks, envs = group.index
        group.is_known = is_known[ticks, envs]
        group.index = (ticks, envs * len(numbers) + actors[ticks, envs])

    def stream(grid: np.ndarray) -> Tensor:
        """Environments times actors are the sequences; what is common to all actors of an environment is repeated."""
        filled = np.broadcast_to(grid if grid.ndim == 3 else grid[..., np.newaxis], acts.shape)
        return torch.from_numpy(filled.reshape(len(filled), -1).copy()).to(model.device)

    return Streams(
        values=[stream(own.values)],
        next_values=[stream(own.next_values)],
        rewards=[stream(np.where(acts, columns.actor_rewards[..., np.newaxis], np.float32(0.0)))],
        has_own_rewards=True,
        terminated=stream(terminated[..., np.newaxis] | has_left),
        truncated=stream(truncated | is_last_known),
        step_complete=stream(complete),
        acts=stream(acts),
        log_rhos=[stream(own.log_rhos)] if log_rhos else [],
    )


def _passes_time(columns: RolloutColumns) -> np.ndarray:
    """Where an environment step ends: complete, or cut off with its episode."""
    ends: np.ndarray = columns.step_complete | columns.truncated
    return ends


def _numbered_actors(columns: RolloutColumns) -> tuple[dict[ActorID, int], np.ndarray]:
    """Numbers of all actors, and who acted in each environment and tick (-1: nobody)."""
    numbers: dict[ActorID, int] = {}
    actors = np.full(columns.rewards.shape, -1)
    for substep in columns.substeps.values():
        for actor, (rows, envs) in substep.entries_by_actor():
            actors[substep.ticks[rows], envs] = numbers.setdefault(actor, len(numbers))
    return numbers, actors


def _in_stream(groups: list[_Group], rows: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """What the networks said about each row, in the order of time `[n_times, n_envs]`."""
    if groups[0].index is None:
        return rows[0].reshape(shape)
    stream = np.zeros(shape, np.float32)  # NumPy starts small operations much faster
    for group, of_group in zip(groups, rows, strict=True):
        stream[group.index] = of_group.cpu().numpy()
    return torch.from_numpy(stream).to(rows[0].device)


def _rows_in(stream: Tensor, index: Index | None) -> Tensor:
    """The opposite: what a stream holds for each row of a group."""
    if index is None:
        return stream.flatten()
    return torch.from_numpy(stream.cpu().numpy()[index]).to(stream.device)


def _by_substep(array: np.ndarray, n_substeps: int, device: str) -> list[Tensor]:
    """`[n_ticks, n_envs]` as one tensor `[n_steps, n_envs]` for each sub-step."""
    return [torch.from_numpy(array[position::n_substeps]).to(device) for position in range(n_substeps)]


def _next_values_of_later_actor(values: Tensor, final: Iterable[Place]) -> Tensor:
    """For an actor with rewards of its own that has not seen what comes after an end: its latest value stands in."""
    next_values = torch.cat([values[1:], values[-1:]])
    for place in final:
        next_values[place] = values[place]
    return next_values


# -- values after the last recorded action ---------------------------------------------------------


def _values_at_ends(
    model: TorchActorCritic, columns: RolloutColumns, substeps: Sequence[SpacesRecord] | None = None
) -> dict[Place, tuple[ActorID, float]]:
    """Who would have acted next, and its value: after the rollout (time `n_ticks`), and where episodes were cut off.

    :param substeps: The sub-steps of a dense rollout: a critic that wants to see all of them takes those that are still
        to come from the step before.
    """
    ends: dict[Place, tuple[ActorID, float]] = {}
    for actor, places, observation in _open_ends(columns):
        known, position = None, 0
        if substeps is not None:
            actors = [substep.actor_id for substep in substeps]
            position = actors.index(actor) if actor in actors else 0
            rows = [min(tick, columns.n_ticks - 1) // len(substeps) * columns.n_envs + env for tick, env in places]
            known = [_select(substep.observation or {}, rows) for substep in substeps]
        values = model.bootstrap_values(observation, actor, known, position).cpu().tolist()
        ends.update((place, (actor, value)) for place, value in zip(places, values, strict=True))
    return ends


def _open_ends(columns: RolloutColumns) -> Iterator[tuple[ActorID, list[Place], dict[str, np.ndarray]]]:
    """Observations that nobody acted on, grouped by actor."""
    places: dict[ActorID, list[Place]] = {}
    observations: dict[ActorID, list[dict[str, np.ndarray]]] = {}
    for actor in dict.fromkeys(columns.last_actor_ids):
        envs = [env for env, other in enumerate(columns.last_actor_ids) if other == actor]
        places[actor] = [(columns.n_ticks, env) for env in envs]
        row = columns.last_observations[actor.step_key]
        observations[actor] = [row if len(envs) == columns.n_envs else _select(row, envs)]
    for entry in columns.final_observations:
        places.setdefault(entry.actor_id, []).append((entry.tick, entry.env_index))
        expanded = {key: np.asarray(value)[np.newaxis] for key, value in entry.observation.items()}
        observations.setdefault(entry.actor_id, []).append(expanded)
    for actor, rows in observations.items():
        joined = rows[0] if len(rows) == 1 else {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
        yield actor, places[actor], joined


# -- groups ----------------------------------------------------------------------------------------


def _dense_group(model: TorchActorCritic, columns: RolloutColumns) -> _Group:
    """All environments take the same sub-steps: the sub-steps of an environment step stay together.

    On the CPU the tensors share memory with the columns.
    """

    def tensors(arrays: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """`[n_steps, n_envs]` flattened into rows."""
        flat = {key: array.reshape(-1, *array.shape[2:]) for key, array in (arrays or {}).items()}
        return _tensors(flat, model.device) or None

    substeps = columns.structured_record().substep_records
    return _Group(
        StructuredSpacesRecord(
            [
                SpacesRecord(
                    substep.actor_id,
                    observation=tensors(substep.observation),
                    action=tensors(substep.action),
                    logits=tensors(substep.logits),
                )
                for substep in substeps
            ]
        ),
        index=None,
    )


def _groups_of(model: TorchActorCritic, columns: RolloutColumns) -> Iterator[_Group]:
    """Actors differ between environments or steps: all that one policy did forms a group of its own."""
    for substep in columns.substeps.values():
        has_own_networks = substep.step_key in model.policy.substeps_with_separate_agent_nets
        for actor, place in substep.entries_by_actor(are_separate=has_own_networks):
            record = SpacesRecord(
                actor,
                observation=_tensors(_select(substep.observations, place), model.device),
                action=_tensors(_select(substep.actions, place), model.device),
                logits=_tensors(_select(substep.logits, place), model.device) if substep.logits else None,
            )
            yield _Group(StructuredSpacesRecord([record]), (substep.ticks[place[0]], place[1]))


def _tensors(arrays: Mapping[str, Any], device: str) -> dict[str, Any]:
    return {key: _tensor(array, device) for key, array in arrays.items()}


def _tensor(array: Any, device: str) -> Tensor:
    """Small integers, such as pixels, keep their type until a network sees them; float64 and the like are converted."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.dtype is torch.float64:
        tensor = tensor.to(torch.get_default_dtype())
    return tensor.to(device)


def _select(arrays: Mapping[str, Any], index: Sequence[Any]) -> dict[str, Any]:
    return {key: array[index] for key, array in arrays.items()}
