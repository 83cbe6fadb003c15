"""From a rollout as it was collected to minibatches with advantages and targets.

Policy and critic are asked about a whole rollout at once. Their answers become streams, sequences of decisions in the
order of time, which a return function (GAE, V-trace) turns into advantages and targets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from maze.core.agent.returns import gae
from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchStateCritic
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_sequences import SequencedRollout, Sequences
from maze.core.rollout.rollout_streams import PolicyRows, Streams, rollout_streams
from maze.core.rollout.rollout_tensors import Index, records_by_policy
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord

if TYPE_CHECKING:
    from maze.core.agent.hidden_states import HiddenStates
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
    sequences: Sequences | None = None
    """What recurrent networks are unrolled over."""

    @property
    def n_rows(self) -> int:
        """Number of environment steps (of one policy's actions, where there is a single sub-step)."""
        return len(self.advantages[0])

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.advantages[0].device

    def rows(self, rows: Tensor | slice) -> AlignedSubsteps:
        """A selection: views for a slice, copies for a tensor of indices `[n_selected]`."""

        def chosen(tensor: Tensor) -> Tensor:
            return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)  # faster than tensor[rows]

        def of(tensors: Mapping[str, Any] | None) -> dict[str, Any]:
            return {key: chosen(tensor) for key, tensor in (tensors or {}).items()}

        record = StructuredSpacesRecord(
            [SpacesRecord(one.actor_id, of(one.observation), of(one.action)) for one in self.record.substep_records]
        )
        advantages, old_log_probs, targets, old_values = (
            [chosen(tensor) for tensor in tensors]
            for tensors in (self.advantages, self.old_log_probs, self.targets, self.old_values)
        )
        return AlignedSubsteps(record, advantages, old_log_probs, targets, old_values)

    def minibatches(self, n: int, generator: torch.Generator) -> Iterator[AlignedSubsteps | None]:
        """All rows in random order, divided as evenly as possible; whole sequences where there are some.

        :param n: How many; `None` comes in the place of those that would be empty.
        :param generator: Source of the order.
        """
        if self.sequences is not None:
            for chosen in self.sequences.minibatches(n, generator):
                yield None if chosen is None else self._in_sequences(*chosen)
            return
        order = torch.randperm(self.n_rows, generator=generator).to(self.device)
        for index in range(n):
            start, stop = (self.n_rows * i // n for i in (index, index + 1))
            yield self.rows(order[start:stop]) if stop > start else None

    def _in_sequences(self, rows: np.ndarray, sequences: Sequences | None) -> AlignedSubsteps:
        return replace(self.rows(torch.from_numpy(rows).to(self.device)), sequences=sequences)

    def asked(self, model: TorchActorCritic) -> tuple[PolicyOutput, StateCriticOutput]:
        """What the networks say about all rows.

        :param model: Policy and critic.
        """
        runs = None if self.sequences is None else self.sequences.all_at_once(model.device)
        return self.outputs or model.compute_actor_critic_output(self.record, runs=runs)


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
        parts = [part.minibatches(n_minibatches, generator) for part in self.parts]
        for together in zip(*parts, strict=True):
            if selected := [part for part in together if part is not None]:
                yield RolloutBatch(selected, self.n_steps // n_minibatches)


# -- returns ---------------------------------------------------------------------------------------


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
    is_off_policy: bool = False
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
        rewards, next_values = streams.rewards, streams.next_values
        targets = critic.compute_structured_return(  # it says what its values predict
            self.gamma, self.gae_lambda, rewards, values, terminated, truncated=truncated, next_values=next_values
        )
        advantages = [target - values[min(index, len(values) - 1)] for index, target in enumerate(targets)]
        return Returns(advantages, targets[: len(values)])


# -- valuation -------------------------------------------------------------------------------------


def value_rollout(
    model: TorchActorCritic,
    columns: RolloutColumns,
    returns: ReturnFunction,
    memory: HiddenStates | None = None,
    sequence_length: int = 0,
) -> RolloutBatch:
    """Asks policy and critic about a whole rollout at once, and computes what there is to learn.

    :param model: The model that learns.
    :param columns: The rollout.
    :param returns: How advantages and targets are estimated.
    :param memory: What a recurrent critic remembered before the rollout; it is brought to its end.
    :param sequence_length: Most steps of the sequences that recurrent networks are unrolled over; 0: no limit.
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
    sequenced = SequencedRollout(model, columns, memory, sequence_length) if model.is_recurrent else None
    asked = [_asked(model, record, index, returns, sequenced) for record, index in records]
    with torch.no_grad():
        found = returns(critic, rollout_streams(model, columns, [rows for _, rows in asked], returns.gamma, sequenced))
        parts = [_with_returns(part, rows, found) for part, rows in asked]
    if sequenced is not None:
        sequenced.remember()
    return RolloutBatch([part for part in parts if part.n_rows], max(1, int(columns.step_complete.sum())))


def _asked(
    model: TorchActorCritic,
    record: StructuredSpacesRecord,
    index: Index | None,
    returns: ReturnFunction,
    sequenced: SequencedRollout | None,
) -> tuple[AlignedSubsteps, PolicyRows]:
    """All that one policy did, still without advantages and targets, and what goes into the streams."""
    keeps_outputs = returns.is_off_policy and torch.is_grad_enabled()  # the loss uses them as well
    sequences = None
    with torch.set_grad_enabled(keeps_outputs):
        if sequenced is None:
            outputs = model.compute_actor_critic_output(record)
        else:
            outputs, sequences = sequenced.ask(record, index)
    policy_output, critic_output = outputs
    with torch.no_grad():
        log_probs = old_log_probs = policy_output.joint_log_probs_for_actions(record.actions)
        log_rhos: list[Tensor] = []
        if all(one.logits is not None for one in record.substep_records):
            distribution = model.policy.distribution_mapper.logits_dict_to_distribution
            behaviour = [(distribution(one.logits, 1.0), one.action) for one in record.substep_records]  # type: ignore[arg-type]  # tensors
            old_log_probs = [policy.joint_log_prob(action) for policy, action in behaviour]  # type: ignore[arg-type]  # tensors
        if returns.is_off_policy:
            log_rhos = [new - old for new, old in zip(log_probs, old_log_probs, strict=True)]
    values = critic_output.detached_values
    part = AlignedSubsteps(record, [], old_log_probs, [], values, outputs if keeps_outputs else None, sequences)
    return part, PolicyRows(record.substep_records, values, log_rhos, index)


def _with_returns(part: AlignedSubsteps, rows: PolicyRows, found: Returns) -> AlignedSubsteps:
    part = replace(part, advantages=rows.of(found.advantages), targets=rows.of(found.targets))
    if rows.is_known is None or rows.is_known.all():
        return part
    sequences = None if part.sequences is None else part.sequences.known(rows.is_known)
    return part._in_sequences(np.flatnonzero(rows.is_known), sequences)
