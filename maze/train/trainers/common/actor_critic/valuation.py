"""Rollouts with returns and advantages, and the minibatches that losses are computed from.

A rollout has two forms: :class:`~maze.core.rollout.rollout_columns.RolloutColumns`, in which it is collected, and rows
of tensors by policy network (:class:`PolicyBatch`), which minibatches select from. Policy and critic are evaluated once
for all rows. A return function (GAE, V-trace) computes advantages and targets from their time-major outputs. Where
actors come and go and a critic predicts the rewards of each, every actor has a trajectory of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maze.core.agent.policy import HiddenStates
from maze.core.agent.returns import GAE, ReturnFunction, Trajectories, next_values_from
from maze.core.agent.state_critic_input_output import StateCriticOutput
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy_output import PolicyOutput
from maze.core.agent.torch_state_critic import TorchDeltaStateCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.rollout import rollout_columns
from maze.perception.fast_layers import products_of_rare_shapes
from maze.train.trainers.common.actor_critic.sequences import Index, Place, SequencedRollout, Sequences, split_by_actor

__all__ = ["GAE", "PolicyBatch", "RolloutBatch", "value_rollout"]

# Rollouts of vector environments differ in their number of rows, and oneDNN compiles kernels for each size that is new
# (0.5 ms for each minibatch of two networks). Large minibatches therefore have few different sizes.
_MANY_ROWS, _UNIT = 1024, 64

# -- rows and minibatches --------------------------------------------------------------------------


class SubstepRows(NamedTuple):
    """Decisions of one sub-step: row i of every tensor belongs to the same decision."""

    actor_id: ActorID
    """The actor; where agents share a network, one of them."""
    observation: dict[str, Tensor]
    """`[n_rows, ...]` by key."""
    action: dict[str, Tensor]
    """`[n_rows, ...]` by action head."""
    logits: dict[str, Tensor] | None = None
    """Logits of the policy that acted, `[n_rows, ...]` by action head; `None`: not recorded, or a minibatch."""

    def rows(self, rows: Tensor) -> SubstepRows:
        """Copy some rows, without logits.

        :param rows: Indices `[n_selected]`.
        """
        observation = {key: tensor.index_select(0, rows) for key, tensor in self.observation.items()}
        action = {key: tensor.index_select(0, rows) for key, tensor in self.action.items()}  # faster than tensor[rows]
        return SubstepRows(self.actor_id, observation, action)

    def observed(self, rows: slice) -> SubstepRows:
        """Return some rows, which share memory with these, without actions and logits."""
        return SubstepRows(self.actor_id, {key: tensor[rows] for key, tensor in self.observation.items()}, {})


class CostRows(NamedTuple):
    """Costs of a constraint for the rows of a batch; fields as those of :class:`PolicyBatch`."""

    old_values: list[Tensor]
    advantages: list[Tensor]
    targets: list[Tensor]


@dataclass
class PolicyBatch:
    """Decisions of the same environment steps: row i of every tensor belongs to the same environment step.

    Where all environments take the same sub-steps, one batch holds the whole rollout. Otherwise there is one batch with
    a single sub-step for each policy network.
    """

    substeps: list[SubstepRows]
    """Observations and actions of each sub-step."""
    old_values: list[Tensor]
    """For each output of the critic `[n_rows]`: its prediction before the update."""
    old_log_probs: list[Tensor]
    """For each sub-step `[n_rows]`: joint log-probability of the action under the policy that sampled it."""
    advantages: list[Tensor] = field(default_factory=list)
    """For each sub-step `[n_rows]`."""
    targets: list[Tensor] = field(default_factory=list)
    """For each output of the critic `[n_rows]`: returns to predict."""
    log_rhos: list[Tensor] = field(default_factory=list)
    """For each sub-step `[n_rows]`: logarithm of the importance weight; empty for on-policy returns."""
    index: Index | None = None
    """Ticks and environments of the rows; `None`: all of a dense rollout, in the order of time."""
    outputs: tuple[PolicyOutput, StateCriticOutput] | None = None
    """Outputs of the networks for all rows, with gradients; `None`: not computed yet."""
    sequences: Sequences | None = None
    """Sequences that recurrent networks are unrolled over."""
    costs: list[CostRows] = field(default_factory=list)
    """By constraint. Hidden states of their critics follow those of the critic in the sequences."""

    @property
    def n_rows(self) -> int:
        """Number of environment steps (of actions of one policy network, where there is a single sub-step)."""
        return len(self.old_log_probs[0])

    def rows(self, rows: Tensor | np.ndarray, sequences: Sequences | None = None) -> PolicyBatch:
        """Copy some rows.

        :param rows: Indices `[n_selected]`.
        :param sequences: The sequences of these rows; `None`: the model is not recurrent.
        """
        index = torch.as_tensor(rows, device=self.old_log_probs[0].device)

        def each(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor.index_select(0, index) for tensor in tensors]

        return PolicyBatch(
            [substep.rows(index) for substep in self.substeps],
            *(each(self.old_values), each(self.old_log_probs), each(self.advantages), each(self.targets)),
            sequences=sequences,
            costs=[CostRows(*map(each, costs)) for costs in self.costs],
        )

    def known(self, is_known: np.ndarray) -> PolicyBatch:
        """Return the batch without decisions whose rewards are unknown.

        :param is_known: bool `[n_rows]`; unknown are only the last rows of sequences.
        """
        if is_known.all():
            return self
        sequences = None if self.sequences is None else self.sequences.known(is_known)
        return self.rows(np.flatnonzero(is_known), sequences)

    def minibatches(self, n: int, generator: torch.Generator) -> Iterator[PolicyBatch | None]:
        """Divide the rows in random order as evenly as possible; whole sequences stay together.

        Minibatches of at least 1,024 rows have multiples of 64 rows, and the rest of fewer than 64 rows is left out.

        :param n: Number of minibatches; `None` takes the place of an empty one.
        :param generator: Source of the order.
        """
        if self.sequences is not None:
            for chosen in self.sequences.minibatches(n, generator):
                yield None if chosen is None else self.rows(*chosen)
            return
        order = torch.randperm(self.n_rows, generator=generator).to(self.old_log_probs[0].device)
        unit = _UNIT if self.n_rows >= n * _MANY_ROWS else 1
        edges = [self.n_rows * index // (n * unit) * unit for index in range(n + 1)]
        for start, stop in pairwise(edges):
            yield self.rows(order[start:stop]) if stop > start else None

    def evaluate(self, model: TorchActorCritic) -> tuple[PolicyOutput, StateCriticOutput]:
        """Compute the outputs of the networks for all rows.

        :param model: Policy and critic.
        """
        if self.outputs is not None:
            return self.outputs
        return model.evaluate(
            self.substeps, runs=None if self.sequences is None else self.sequences.all_at_once(model.device)
        )


@dataclass
class RolloutBatch:
    """A rollout with returns and advantages, or a minibatch of it."""

    parts: list[PolicyBatch]
    n_steps: int
    """Number of environment steps, over all environments."""

    @property
    def n_rows(self) -> int:
        """Number of rows of all parts together."""
        return sum(part.n_rows for part in self.parts)

    def shuffled(self, batch_size: int, generator: torch.Generator) -> Iterator[RolloutBatch]:
        """Divide the whole batch in random order evenly into minibatches.

        :param batch_size: Largest number of environment steps in a minibatch, before sizes are rounded.
        :param generator: Source of the order.
        """
        # Where environments wait for different actors, a part may have fewer rows than there are minibatches.
        n_minibatches = min(-(-self.n_steps // batch_size), max(part.n_rows for part in self.parts))
        parts = [part.minibatches(n_minibatches, generator) for part in self.parts]
        for together in zip(*parts, strict=True):
            if selected := [part for part in together if part is not None]:
                yield RolloutBatch(selected, self.n_steps // n_minibatches)


def decisions_by_policy(
    columns: rollout_columns.RolloutColumns, separate_agents: Container[Any], device: str
) -> Iterator[tuple[list[SubstepRows], Index | None]]:
    """Yield observations and actions of each policy network in the order of time, with their ticks and environments.

    A dense rollout is yielded once for all networks, with all sub-steps and without an index (`None`). On the CPU its
    tensors share memory with the columns.

    :param columns: The rollout.
    :param separate_agents: Keys of the sub-steps whose agents have networks of their own.
    :param device: Device of the tensors.
    """

    def tensors(arrays: Mapping[str, np.ndarray], place: Any) -> dict[str, Tensor]:
        found = {}
        for key, array in arrays.items():
            tensor = torch.from_numpy(np.ascontiguousarray(array[place]))
            tensor = tensor.flatten(0, tensor.dim() - array.ndim + 1)  # ticks and environments
            if tensor.dtype is torch.float64:  # integers such as pixels keep their type
                tensor = tensor.to(torch.get_default_dtype())
            found[key] = tensor.to(device)
        return found

    def rows(actor: ActorID, of_key: rollout_columns.SubstepColumns, place: Any) -> SubstepRows:
        logits = None if of_key.logits is None else tensors(of_key.logits, place)
        return SubstepRows(actor, tensors(of_key.observations, place), tensors(of_key.actions, place), logits)

    if columns.actor_sequence is not None:
        step_keys, substeps = [actor.step_key for actor in columns.actor_sequence], []
        for position, actor in enumerate(columns.actor_sequence):
            of_key, first = columns.substeps[actor.step_key], step_keys[:position].count(actor.step_key)
            substeps.append(rows(actor, of_key, slice(first, of_key.n_rows, step_keys.count(actor.step_key))))
        yield substeps, None
        return
    for of_key in columns.substeps.values():
        for actor, place in of_key.entries_by_actor(are_separate=of_key.step_key in separate_agents):
            yield [rows(actor, of_key, place)], (of_key.ticks[place[0]], place[1])


# -- valuation -------------------------------------------------------------------------------------


def value_rollout(
    model: TorchActorCritic,
    columns: rollout_columns.RolloutColumns,
    returns: ReturnFunction,
    hidden_states: HiddenStates | None = None,
    sequence_length: int = 0,
    *,
    are_joint: bool = False,
    keeps_outputs: bool = False,
) -> RolloutBatch:
    """Evaluate policy and critic for a whole rollout at once, and compute its advantages and targets.

    :param model: The model that learns.
    :param columns: The rollout.
    :param returns: Estimates advantages and targets.
    :param hidden_states: Hidden states of a recurrent critic before the rollout; they are updated to its end.
    :param sequence_length: Maximum number of steps that recurrent networks are unrolled over; 0: no limit.
    :param are_joint: Whether all actors get the rewards of a tick, also where actors have rewards of their own.
    :param keeps_outputs: Whether the outputs are kept with gradients, for a loss of the whole rollout.
    :raises ConfigError: The critic cannot value the sub-steps of such a rollout.
    """
    if isinstance(model.critic, TorchDeltaStateCritic) and not columns.is_dense():
        raise ConfigError(
            "model.critic: a delta critic needs environments that all take the same sub-steps in the same order, but "
            "the actors of this environment vary. Use a step or a shared critic."
        )
    sequenced = SequencedRollout(model, columns, hidden_states, sequence_length) if model.is_recurrent else None
    separate_agents = model.policy.substeps_with_separate_agent_nets
    keeps_outputs = (returns.is_off_policy or keeps_outputs) and torch.is_grad_enabled()  # the loss uses them as well
    behaviour = model.policy.distribution_mapper.logits_dict_to_distribution
    batches = []
    for substeps, index in decisions_by_policy(columns, separate_agents, model.device):
        outputs, are_recorded = None, substeps[0].logits is not None
        sequences, runs = sequenced.sequences(substeps, index) if sequenced else (None, None)
        with torch.set_grad_enabled(keeps_outputs):
            if sequenced or keeps_outputs or returns.is_off_policy or not are_recorded:
                outputs = model.evaluate(substeps, runs=runs)
            values = outputs[1].detached_values if outputs else _values(model, substeps)
        with torch.no_grad():
            new = outputs[0].joint_log_probs_for_actions([one.action for one in substeps]) if outputs else []
            batch = PolicyBatch(substeps, values, new, index=index, sequences=sequences)
            if are_recorded:
                batch.old_log_probs = [behaviour(one.logits or {}, 1.0).joint_log_prob(one.action) for one in substeps]
            if returns.is_off_policy:
                batch.log_rhos = list(map(torch.sub, new, batch.old_log_probs))
        batch.outputs = outputs if keeps_outputs else None
        batches.append(batch)
    with torch.no_grad():
        trajectories = _trajectories(model, columns, batches, returns.gamma, sequenced, are_joint)
        found = returns(trajectories)
        for batch, place in zip(batches, trajectories.places, strict=True):
            batch.advantages, batch.targets = _rows_at(place, found.advantages), _rows_at(place, found.targets)
        if trajectories.acts is not None:
            is_known = rollout_columns.has_known_reward(columns.step_complete | columns.truncated)
            batches = [batch.known(is_known[batch.index]) for batch in batches]
    if sequenced is not None:
        sequenced.update_hidden_states()
    return RolloutBatch([batch for batch in batches if batch.n_rows], max(1, int(columns.step_complete.sum())))


def _values(model: TorchActorCritic, substeps: Sequence[SubstepRows]) -> list[Tensor]:
    """Return the critic's outputs for all rows, `[n_rows]` each; many rows are evaluated in a multiple of 64, and the
    rest.
    """
    n_rows = len(next(iter(substeps[0].observation.values())))
    n_even = n_rows // _UNIT * _UNIT if n_rows >= _MANY_ROWS else n_rows
    if n_even == n_rows:
        return model.evaluate_critic(substeps).detached_values
    even, rest = ([one.observed(rows) for one in substeps] for rows in (slice(n_even), slice(n_even, None)))
    values = model.evaluate_critic(even).detached_values
    with products_of_rare_shapes():
        return [torch.cat(both) for both in zip(values, model.evaluate_critic(rest).detached_values, strict=True)]


def _trajectories(
    model: TorchActorCritic,
    columns: rollout_columns.RolloutColumns,
    batches: Sequence[PolicyBatch],
    gamma: float,
    sequenced: SequencedRollout | None,
    are_joint: bool,
) -> Trajectories:
    """Return the environment steps of a dense rollout, or else the ticks of all actors: together, or of each by itself
    where a critic predicts its rewards.
    """
    substeps, n_envs, device = batches[0].substeps, columns.n_envs, model.device
    n_substeps, is_dense = len(substeps), batches[0].index is None
    shape = (columns.n_ticks // n_substeps, n_envs)
    places = [batch.index for batch in batches]
    values = _time_major(places, [batch.old_values for batch in batches], shape)
    log_rhos = _time_major(places, [batch.log_rhos for batch in batches], shape)
    ends = _values_at_ends(model, columns, sequenced, substeps if n_substeps > 1 else ())
    is_by_substep = model.state_critic.predicts_substeps
    if is_by_substep and columns.actor_rewards is not None and not is_dense:
        of_actions = log_rhos[0] if log_rhos else None
        return split_by_actor(columns, values[0], of_actions, ends, places, gamma, are_joint)
    last = torch.tensor([ends.pop((columns.n_ticks, env))[1] for env in range(n_envs)])
    final = {(tick // n_substeps, env): torch.tensor(value) for (tick, env), (_, value) in ends.items()}
    next_values = [next_values_from(value, last.to(value), final) for value in values]

    def of_steps(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.reshape(shape[0], n_substeps, n_envs)).to(device)

    rewards = list(of_steps(columns.rewards).unbind(1))
    has_own_rewards = is_by_substep and n_substeps > 1
    if has_own_rewards and columns.actor_rewards is not None and not are_joint:
        rewards = list(of_steps(columns.actor_rewards).unbind(1))
        for index, value in enumerate(values[1:], 1):  # after an end that its actor did not observe: its latest value
            next_values[index] = next_values_from(value, value[-1], {place: value[place] for place in final})
    elif has_own_rewards:
        rewards = [torch.stack(rewards).sum(0)] * n_substeps
    return Trajectories(
        *(values, next_values, rewards, has_own_rewards),
        terminated=of_steps(columns.terminated).any(1),
        truncated=of_steps(columns.truncated).any(1),
        step_complete=None if is_dense else of_steps(columns.step_complete | columns.truncated)[:, 0],
        log_rhos=log_rhos,
        places=places,
    )


def _values_at_ends(
    model: TorchActorCritic,
    columns: rollout_columns.RolloutColumns,
    sequenced: SequencedRollout | None,
    substeps: Sequence[SubstepRows] = (),
) -> dict[Place, tuple[ActorID, Any]]:
    """Return the next actor and its value after the rollout (time `n_ticks`) and where episodes were truncated.

    The value of a quantile critic is the list of its quantiles.

    :param substeps: The sub-steps of a dense rollout, if there are several. Critics that observe all of them take the
        observations of the others from the step before.
    """
    ends: dict[Place, tuple[ActorID, Any]] = {}
    actors = [substep.actor_id for substep in substeps]
    finals, next_actors = columns.final_observations, columns.last_actor_ids
    for actor in dict.fromkeys((*next_actors, *(entry.actor_id for entry in finals))):
        envs = [env for env, other in enumerate(next_actors) if other == actor]
        entries = [entry for entry in finals if entry.actor_id == actor]
        places = [(columns.n_ticks, env) for env in envs] + [(entry.tick, entry.env_index) for entry in entries]
        stacked = {
            key: np.concatenate((array[-1, envs], *(np.asarray(entry.observation[key])[None] for entry in entries)))
            for key, array in columns.substeps[actor.step_key].observations.items()
        }
        known: list[dict[str, Tensor]] = []
        if substeps:
            last_tick, n_substeps = columns.n_ticks - 1, len(substeps)
            steps = [min(tick, last_tick) // n_substeps * columns.n_envs + env for tick, env in places]
            known = [{key: tensor[steps] for key, tensor in one.observation.items()} for one in substeps]
        runs = None if sequenced is None else sequenced.at(actor, places)
        position = actors.index(actor) if actor in actors else 0
        with products_of_rare_shapes():
            values = model.bootstrap_values(stacked, actor, known, position, runs).tolist()
        ends.update((place, (actor, value)) for place, value in zip(places, values, strict=True))
    return ends


def _time_major(places: Sequence[Index | None], outputs: list[list[Tensor]], shape: tuple[int, int]) -> list[Tensor]:
    """Place the rows of all batches in the order of time; the inverse of :func:`_rows_at`.

    :param places: For each batch ticks and environments of its rows; `None`: a dense rollout in the order of time.
    :param outputs: For each batch one tensor `[n_rows, ...]` for each output of a network.
    :param shape: `(n_times, n_envs)`.
    :return: For each output of a network `[n_times, n_envs, ...]`.
    """
    if places[0] is None:
        return [output.reshape(*shape, *output.shape[1:]) for output in outputs[0]]
    arrays = []
    for of_batches in zip(*outputs, strict=True):
        array = np.zeros((*shape, *of_batches[0].shape[1:]), np.float32)  # NumPy starts small operations much faster
        for place, output in zip(places, of_batches, strict=True):
            array[place] = output.cpu().numpy()
        arrays.append(torch.from_numpy(array).to(of_batches[0].device))
    return arrays


def _rows_at(place: Index | None, arrays: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows of a batch from time-major arrays."""
    if place is None:
        return [array.flatten(0, 1) for array in arrays]
    return [torch.from_numpy(array.cpu().numpy()[place]).to(array.device) for array in arrays]
