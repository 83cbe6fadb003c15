"""From a rollout as it was collected to minibatches with advantages and targets.

Policy and critic are asked about a whole rollout at once. Their answers become streams, sequences of decisions in the
order of time, which a return function (GAE, V-trace) turns into advantages and targets. Where all environments take
the same sub-steps, the rows of the networks lie in a stream as they are; otherwise they are found by index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from maze.core.agent.returns import actor_streams, gae, has_known_reward, next_values_from
from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchStateCritic, TorchStepStateCritic
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_tensors import Index, Place, numbered_actors, open_ends, records_by_policy
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord

if TYPE_CHECKING:
    from maze.core.agent.state_critic_input_output import StateCriticOutput
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.agent.torch_policy_output import PolicyOutput
    from maze.core.rollout.rollout_columns import RolloutColumns


# -- what is learned from --------------------------------------------------------------------------


@dataclass
class AlignedSubsteps:
    """Sub-steps of the same environment steps: row i of everything belongs to the same environment step.

    Where all environments take the same sub-steps, one of these holds the whole rollout; otherwise there is one of a
    single sub-step for each policy.
    """

    record: StructuredSpacesRecord
    """Observations and actions of each sub-step, `[n_rows, ...]`."""
    advantages: list[Tensor]
    """For each sub-step `[n_rows]`."""
    old_log_probs: list[Tensor]
    """For each sub-step `[n_rows]`: joint log-probability of the action under the policy that sampled it."""
    targets: list[Tensor]
    """For each output of the critic `[n_rows]`: the returns it should have predicted."""
    old_values: list[Tensor]
    """For each output of the critic `[n_rows]`: what it predicted when the rollout was valued."""
    outputs: tuple[PolicyOutput, StateCriticOutput] | None = None
    """What the networks said about all rows, with gradients, where it need not be asked for again."""

    @property
    def n_rows(self) -> int:
        """Number of environment steps (of one policy's actions, where there is a single sub-step)."""
        return len(self.advantages[0])

    @property
    def actions(self) -> list[dict[str, Tensor]]:
        """Actions of each sub-step.

        :return: Each `[batch, *space.shape]` by head.
        """
        return self.record.actions

    def rows(self, rows: Tensor | slice) -> AlignedSubsteps:
        """A selection: views for a slice, copies for a tensor of indices `[n_selected]`."""

        def of(tensors: Mapping[str, Any] | None) -> dict[str, Any]:
            return {key: tensor[rows] for key, tensor in (tensors or {}).items()}

        record = StructuredSpacesRecord(
            [SpacesRecord(one.actor_id, of(one.observation), of(one.action)) for one in self.record.substep_records]
        )
        advantages, old_log_probs, targets, old_values = (
            [tensor[rows] for tensor in tensors]
            for tensors in (self.advantages, self.old_log_probs, self.targets, self.old_values)
        )
        return AlignedSubsteps(record, advantages, old_log_probs, targets, old_values)


@dataclass
class RolloutBatch:
    """All that was collected in a rollout, with the targets to learn."""

    parts: list[AlignedSubsteps]
    n_steps: int
    """Number of environment steps, over all environments."""

    @property
    def n_rows(self) -> int:
        """Number of rows of all parts together."""
        return sum(part.n_rows for part in self.parts)

    def shuffled(self, batch_size: int, generator: torch.Generator) -> Iterator[RolloutBatch]:
        """The whole batch in random order, divided evenly into minibatches.

        :param batch_size: Largest number of environment steps in a minibatch.
        :param generator: Source of the order.
        """
        # Where environments wait for different actors, no part may have a row for each of so many minibatches.
        n_minibatches = min(-(-self.n_steps // batch_size), max(part.n_rows for part in self.parts))
        orders = [torch.randperm(part.n_rows, generator=generator) for part in self.parts]
        permuted = [
            part.rows(order.to(part.advantages[0].device)) for part, order in zip(self.parts, orders, strict=True)
        ]
        for index in range(n_minibatches):
            selected = []
            for part in permuted:
                start, stop = (part.n_rows * i // n_minibatches for i in (index, index + 1))
                if stop > start:
                    selected.append(part.rows(slice(start, stop)))
            yield RolloutBatch(selected, self.n_steps // n_minibatches)


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
        values, terminated, truncated = streams.values, streams.terminated, streams.truncated
        if (complete := streams.step_complete) is not None:
            (reward,), (value,), (following,) = streams.rewards, values, streams.next_values
            advantage = gae(
                reward, value, following, terminated, truncated, self.gamma, self.gae_lambda, complete, streams.acts
            )
            return Returns([advantage], [advantage + value])
        targets = critic.compute_structured_return(  # it says what its values predict
            self.gamma,
            self.gae_lambda,
            streams.rewards,
            values,
            terminated,
            truncated=truncated,
            next_values=streams.next_values,
        )
        advantages = [target - values[min(index, len(values) - 1)] for index, target in enumerate(targets)]
        return Returns(advantages, targets[: len(values)])


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
    records = records_by_policy(columns, model.policy.substeps_with_separate_agent_nets, model.device)
    groups = [_asked(model, record, index, returns) for record, index in records]
    with torch.no_grad():
        if columns.is_dense() or columns.actor_rewards is None or not isinstance(critic, TorchStepStateCritic):
            streams = _streams(model, columns, groups)
        else:
            streams = _streams_of_actors(model, columns, groups, returns.gamma)
        found = returns(critic, streams)
        parts = [group.with_returns(found) for group in groups]
    return RolloutBatch([part for part in parts if part.n_rows], max(1, int(columns.step_complete.sum())))


@dataclass
class _Group:
    """What one policy network did, in the order of time; in a dense rollout, what all of them did."""

    part: AlignedSubsteps
    """Still without advantages and targets."""
    index: Index | None
    """Time and sequence of its rows in the streams; `None`: everywhere, in the order of the stream."""
    log_rhos: list[Tensor]
    is_known: np.ndarray | None = None
    """Rows whose rewards are known; `None`: all of them."""

    def with_returns(self, found: Returns) -> AlignedSubsteps:
        advantages, targets = (
            [_rows_in(stream, self.index) for stream in streams] for streams in (found.advantages, found.targets)
        )
        part = replace(self.part, advantages=advantages, targets=targets)
        if self.is_known is None or self.is_known.all():
            return part
        return part.rows(torch.from_numpy(np.flatnonzero(self.is_known)).to(advantages[0].device))


def _asked(
    model: TorchActorCritic, record: StructuredSpacesRecord, index: Index | None, returns: ReturnFunction
) -> _Group:
    keeps_outputs = returns.is_off_policy and torch.is_grad_enabled()  # the loss uses them as well
    with torch.set_grad_enabled(keeps_outputs):
        outputs = policy_output, critic_output = model.compute_actor_critic_output(record)
    with torch.no_grad():
        log_probs = old_log_probs = policy_output.joint_log_probs_for_actions(record.actions)
        log_rhos: list[Tensor] = []
        if returns.is_off_policy:
            distribution = model.policy.distribution_mapper.logits_dict_to_distribution
            behaviour = [(distribution(one.logits, 1.0), one.action) for one in record.substep_records]  # type: ignore[arg-type]  # tensors
            old_log_probs = [policy.joint_log_prob(action) for policy, action in behaviour]  # type: ignore[arg-type]  # tensors
            log_rhos = [new - old for new, old in zip(log_probs, old_log_probs, strict=True)]
        part = AlignedSubsteps(record, [], old_log_probs, [], critic_output.detached_values)
    return _Group(replace(part, outputs=outputs) if keeps_outputs else part, index, log_rhos)


def _streams(model: TorchActorCritic, columns: RolloutColumns, groups: list[_Group]) -> Streams:
    """Environment steps of a dense rollout, or else ticks of all actors together."""
    substeps = groups[0].part.record.substep_records
    n_substeps = len(substeps)
    shape = (columns.n_ticks // n_substeps, columns.n_envs)
    values = _in_streams(groups, [group.part.old_values for group in groups], shape)
    ends = _values_at_ends(model, columns, substeps if n_substeps > 1 else ())
    last = torch.tensor([ends.pop((columns.n_ticks, env))[1] for env in range(columns.n_envs)])
    final = {(tick // n_substeps, env): value for (tick, env), (_, value) in ends.items()}
    next_values = [next_values_from(value, last.to(value), final) for value in values]

    def by_substep(array: np.ndarray) -> list[Tensor]:
        return [torch.from_numpy(array[position::n_substeps]).to(model.device) for position in range(n_substeps)]

    rewards = by_substep(columns.rewards)
    has_own_rewards = isinstance(model.critic, TorchStepStateCritic) and n_substeps > 1
    if has_own_rewards and columns.actor_rewards is not None:
        rewards = by_substep(columns.actor_rewards)
        next_values[1:] = [_next_values_of_later_actor(value, final) for value in values[1:]]
    elif has_own_rewards:
        rewards = [torch.stack(rewards).sum(0)] * n_substeps
    terminated, truncated = (torch.stack(by_substep(a)).any(0) for a in (columns.terminated, columns.truncated))
    complete = None if columns.is_dense() else by_substep(columns.step_complete | columns.truncated)[0]
    log_rhos = _in_streams(groups, [group.log_rhos for group in groups], shape)
    return Streams(values, next_values, rewards, has_own_rewards, terminated, truncated, complete, log_rhos=log_rhos)


def _next_values_of_later_actor(values: Tensor, final: Iterable[Place]) -> Tensor:
    """For an actor with rewards of its own that has not seen what comes after an end: its latest value stands in."""
    next_values = torch.cat([values[1:], values[-1:]])
    for place in final:
        next_values[place] = values[place]
    return next_values


def _streams_of_actors(model: TorchActorCritic, columns: RolloutColumns, groups: list[_Group], gamma: float) -> Streams:
    """Actors with rewards of their own, and a critic that predicts them: each actor of an environment is a stream.

    The last decisions of a rollout may have no reward yet. Nothing is learned from them, but their values are what
    follows the decisions before.
    """
    assert columns.actor_rewards is not None
    numbers, actors = numbered_actors(columns)
    acts = actors[..., np.newaxis] == np.arange(len(numbers))
    answers = [[*group.part.old_values, *group.log_rhos] for group in groups]
    values, *log_rhos = (stream.cpu().numpy() for stream in _in_streams(groups, answers, actors.shape))
    ends = {
        place: (numbers[actor], value)
        for place, (actor, value) in _values_at_ends(model, columns).items()
        if actor in numbers
    }
    complete, terminated, truncated = columns.step_complete | columns.truncated, columns.terminated, columns.truncated
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


def _values_at_ends(
    model: TorchActorCritic, columns: RolloutColumns, substeps: Sequence[SpacesRecord] = ()
) -> dict[Place, tuple[ActorID, float]]:
    """Who would have acted next, and its value: after the rollout (time `n_ticks`), and where episodes were cut off."""
    ends: dict[Place, tuple[ActorID, float]] = {}
    for actor, places, observation, known, position in open_ends(columns, substeps):
        values = model.bootstrap_values(observation, actor, known, position).cpu().tolist()
        ends.update((place, (actor, value)) for place, value in zip(places, values, strict=True))
    return ends


def _in_streams(groups: list[_Group], answers: list[list[Tensor]], shape: tuple[int, ...]) -> list[Tensor]:
    """What the networks said about each row, in the order of time `[n_times, n_envs]`; by output of a network."""
    if groups[0].index is None:
        return [rows.reshape(shape) for rows in answers[0]]
    streams = []
    for of_groups in zip(*answers, strict=True):
        stream = np.zeros(shape, np.float32)  # NumPy starts small operations much faster
        for group, rows in zip(groups, of_groups, strict=True):
            stream[group.index] = rows.cpu().numpy()
        streams.append(torch.from_numpy(stream).to(of_groups[0].device))
    return streams


def _rows_in(stream: Tensor, index: Index | None) -> Tensor:
    """The opposite: what a stream holds for each row of a group."""
    if index is None:
        return stream.flatten()
    return torch.from_numpy(stream.cpu().numpy()[index]).to(stream.device)
