"""The steps of one actor in a rollout: sequences for recurrent networks, and trajectories with rewards of its own.

Recurrent networks are unrolled over sequences, the observations of an actor in an episode.

Hidden states are zero where an episode begins, and those of before where a rollout begins in the middle of one
(Hausknecht and Stone 2015, bootstrapped sequential updates; Kapturowski et al. 2019 on stored states).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maze.core.agent.policy import HiddenStates, StatesOfActor
from maze.core.agent.returns import Trajectories
from maze.core.agent.torch_actor_critic import ModelRuns, TorchActorCritic
from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchSharedStateCritic, TorchStateCritic
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_columns import RolloutColumns, has_known_reward
from maze.perception.blocks.recurrent.recurrent_cell import PackedRows, SequenceRun, StepRun
from maze.train.utils.train_utils import mapped

Place = tuple[int, int]
"""(tick, environment)"""

Index = tuple[np.ndarray, np.ndarray]
"""Ticks and environments of rows."""

States = dict[str, Tensor]
"""Hidden states `[n, size]` by state key."""


@dataclass
class Sequences:
    """Rows divided into sequences, with the hidden states before each of them."""

    order: np.ndarray
    """All rows, sequence after sequence, `[n_rows]`."""
    lengths: np.ndarray
    """Numbers of steps, `[n_sequences]`."""
    policy_states: list[States] = field(default_factory=list)
    """By sub-step."""
    critic_states: list[States] = field(default_factory=list)
    """By sub-step; of a shared critic there is one entry."""

    @property
    def starts(self) -> np.ndarray:
        """Position of the first step of each sequence in the order, `[n_sequences]`."""
        return np.asarray(np.cumsum(self.lengths) - self.lengths)

    def runs(self, groups: Sequence[PackedRows]) -> ModelRuns:
        """Return the runs of a model over the sequences."""
        return ModelRuns(
            [SequenceRun(groups, states) for states in self.policy_states],
            [SequenceRun(groups, states) for states in self.critic_states],
        )

    def all_at_once(self, device: str) -> ModelRuns:
        """Return the runs of a model over all sequences at once, from the stored states before them.

        :param device: Device of the networks.
        """
        return self.runs([PackedRows(self.order, self.starts, self.lengths, device)])

    def minibatches(self, n: int, generator: torch.Generator) -> Iterator[tuple[np.ndarray, Sequences] | None]:
        """Return all sequences in random order, divided into as many rows each as whole sequences allow.

        :param n: Number of parts; empty parts are `None`.
        :param generator: Source of the order.
        :return: As :meth:`chosen`.
        """
        order = torch.randperm(len(self.lengths), generator=generator).numpy()
        place = (np.cumsum(self.lengths[order]) - 1) * n // self.lengths.sum()
        for index in range(n):
            chosen = order[place == index]
            yield self.chosen(chosen) if len(chosen) else None

    def chosen(self, indices: np.ndarray) -> tuple[np.ndarray, Sequences]:
        """Return some of the sequences.

        :param indices: Their indices, `[n_chosen]`.
        :return: Their rows, sequence after sequence, and the sequences of these rows in that order.
        """
        lengths = self.lengths[indices]
        offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        rows = self.order[np.repeat(self.starts[indices], lengths) + offsets]
        return rows, self._with_states_of(Sequences(np.arange(len(rows)), lengths), indices)

    def known(self, is_known: np.ndarray) -> Sequences:
        """Return the sequences without rows at their ends.

        :param is_known: Mask of the rows to keep, bool `[n_rows]`; the others are the last ones of their
            sequences.
        """
        kept = is_known[self.order]
        lengths = np.add.reduceat(kept, self.starts).astype(np.int64)
        left = np.flatnonzero(lengths)
        rows = np.cumsum(is_known) - 1  # their positions after the others are removed
        return self._with_states_of(Sequences(rows[self.order[kept]], lengths[left]), left)

    def _with_states_of(self, sequences: Sequences, indices: np.ndarray) -> Sequences:
        """Copy the states of some of these sequences to others."""
        index = torch.from_numpy(indices)
        sequences.policy_states, sequences.critic_states = mapped(
            lambda states: states[index.to(states.device)], (self.policy_states, self.critic_states)
        )
        return sequences


class SequencedRollout:
    """Hidden states of a recurrent model in a rollout: the stored ones, and those computed from them.

    :param model: The model.
    :param columns: The rollout, with the hidden states of the policy before it.
    :param hidden_states: Hidden states of the critic before it; `None`: zero.
    :param length: Maximum number of steps of a sequence; 0: no limit.
    :raises ConfigError: The critic cannot be recurrent in such a rollout.
    """

    def __init__(
        self, model: TorchActorCritic, columns: RolloutColumns, hidden_states: HiddenStates | None, length: int = 0
    ) -> None:
        assert isinstance(model.critic, TorchStateCritic)
        self._model, self._critic, self._columns, self._length = model, model.critic, columns, length
        self._hidden_states = hidden_states or HiddenStates(columns.n_envs, model.critic.state_sizes)
        self._has_shared_critic = isinstance(model.critic, TorchSharedStateCritic)
        _check(model.critic, columns)
        assert columns.hidden_states is not None, "checked"
        self._known = columns.hidden_states.states
        ended = np.concatenate([columns.hidden_states.begins[np.newaxis], columns.terminated | columns.truncated])
        # Number of episodes that have begun in each environment before each tick, and after the last one.
        self._episodes = np.cumsum(ended, axis=0)
        # By network (`policy`, `critic`), actor, environment and episode: states after its last step, and the row.
        self._final: dict[tuple[str, ActorID | None, int, int], tuple[States, int]] = {}

    def sequences(self, substeps: Sequence[Any], index: Index | None) -> tuple[Sequences, ModelRuns]:
        """Return the sequences of a policy's decisions, and the runs of policy and critic over them.

        Hidden states after them are known once the model has run, without gradients.

        :param substeps: The decisions.
        :param index: Ticks and environments of the rows; `None`: a dense rollout.
        """
        columns = self._columns
        actors: list[Any] = [substep.actor_id for substep in substeps]
        if index is None:
            n_substeps, n_envs = len(substeps), columns.n_envs
            ticks = np.repeat(np.arange(0, columns.n_ticks, n_substeps), n_envs)
            envs = np.tile(np.arange(n_envs), columns.n_ticks // n_substeps)
            agents = np.zeros_like(envs)
        else:
            ticks, envs = index
            of_key = columns.substeps[actors[0].step_key]
            agents = of_key.agent_ids[np.searchsorted(of_key.ticks, ticks), envs]
        streams = agents * columns.n_envs + envs
        order = np.argsort(streams, kind="stable")  # each trajectory in the order of time
        stream, episode = streams[order], self._episodes[ticks, envs][order]
        is_new_stream = np.append(True, stream[1:] != stream[:-1])
        is_start = is_new_stream | np.append(True, episode[1:] != episode[:-1])
        positions = np.arange(len(order))
        since_start = positions - np.maximum.accumulate(np.where(is_start, positions, 0))
        starts = np.flatnonzero(since_start % self._length == 0 if self._length else is_start)
        found = Sequences(order, np.diff(np.append(starts, len(order))))
        env_of, agent_of, episode_of = envs[order][starts], agents[order][starts], episode[starts]
        goes_on = is_new_stream[starts] & (episode_of == 0)

        def before(states_of: Callable[..., Any], actor: Any, sizes: Mapping[str, int]) -> States:
            states = {key: np.zeros((len(starts), size), np.float32) for key, size in sizes.items()}
            for row in np.flatnonzero(goes_on):
                one = actor if actor is None or index is None else ActorID(actor.step_key, int(agent_of[row]))
                for key, known in states_of(one).items():
                    states[key][row] = known[env_of[row]]
            return {key: torch.from_numpy(array).to(self._model.device) for key, array in states.items()}

        policy, critic = self._model.policy, self._critic
        found.policy_states = [
            before(lambda one: self._known.get(one, {}), actor, policy.state_sizes(actor)) for actor in actors
        ]
        found.critic_states = [
            before(self._hidden_states.of, actor, critic.state_sizes(actor))
            for actor in ([None] if self._has_shared_critic else actors)
        ]
        level = since_start[starts] // self._length if self._length else np.zeros_like(starts)
        groups = []
        for depth in range(int(level.max(initial=0)) + 1):
            chosen = np.flatnonzero(level == depth)
            follows = chosen - 1 if depth else None
            groups.append(PackedRows(order, found.starts, found.lengths, self._model.device, chosen, follows))
        runs = found.runs(groups)
        places = list(zip(agent_of.tolist(), env_of.tolist(), episode_of.tolist(), strict=True))
        for name, of_network in (("policy", runs.policy), ("critic", runs.critic)):
            for actor, run in zip(actors, of_network, strict=False):
                is_shared = name == "critic" and self._has_shared_critic
                for row, (agent, env, episode) in enumerate(places):
                    key = None if is_shared else actor if index is None else ActorID(actor.step_key, agent)
                    self._final[name, key, env, episode] = run.final, row  # the model fills in the states
        return found, runs

    def at(self, actor: ActorID, places: Sequence[Place]) -> ModelRuns:
        """Return the runs of policy and critic for single observations that follow the recorded ones.

        :param actor: The observing actor.
        :param places: Tick with which the episode was truncated, or the number of ticks, and environment.
        """
        sought = None if self._has_shared_critic else actor
        sizes = self._model.policy.state_sizes(actor)
        policy = self._states_at("policy", actor, places, self._known.get(actor, {}), sizes)
        critic = self._states_at(
            "critic", sought, places, self._hidden_states.of(sought), self._critic.state_sizes(sought)
        )
        return ModelRuns([StepRun(policy)], [StepRun(critic)])

    def _states_at(
        self, name: str, actor: ActorID | None, places: Sequence[Place], known: StatesOfActor, sizes: Mapping[str, int]
    ) -> States:
        states = {key: torch.zeros(len(places), size, device=self._model.device) for key, size in sizes.items()}
        for row, (tick, env) in enumerate(places):
            episode = int(self._episodes[tick, env])
            final, source = self._final.get((name, actor, env, episode), (None, 0))
            for key, tensor in states.items():
                if final is not None:
                    tensor[row] = final[key][source]
                elif episode == 0 and key in known:
                    tensor[row] = torch.from_numpy(known[key][env])
        return states

    def update_hidden_states(self) -> None:
        """Update the hidden states of the critic to the end of the rollout."""
        now = self._episodes[-1]
        self._hidden_states.reset(now > 0)
        for (name, actor, env, episode), (final, row) in self._final.items():
            if name == "critic" and episode == now[env]:
                for key, array in self._hidden_states.of(actor).items():
                    array[env] = final[key][row].cpu().numpy()


def _check(critic: TorchStateCritic, columns: RolloutColumns) -> None:
    sequence, problem = columns.actor_sequence, ""
    (first, *others) = columns.substeps.values()
    is_of_one = not others and len(np.unique(first.agent_ids[first.entries()])) == 1
    if columns.hidden_states is None:
        problem = "the critic has some and the policy has none, so that the begins of episodes are unknown"
    elif isinstance(critic, TorchDeltaStateCritic) and critic.is_recurrent:
        problem = "a delta critic has no hidden states"
    elif isinstance(critic, TorchSharedStateCritic) and critic.is_recurrent and not (sequence or is_of_one):
        problem = "a shared critic with hidden states needs environments that all take the same sub-steps"
    elif sequence is not None and len(set(sequence)) < len(sequence):
        problem = (
            f"an actor acts several times in a step ({list(sequence)}), which recurrent models are not trained for"
        )
    if problem:
        raise ConfigError(
            f"model.critic: {problem}. Use a recurrent policy and a step critic (`critic=template_state`)."
        )


# -- trajectories of single actors -----------------------------------------------------------------


def split_by_actor(
    columns: RolloutColumns,
    values: Tensor,
    log_rhos: Tensor | None,
    ends: Mapping[Place, tuple[ActorID, float]],
    places: Sequence[Index | None],
    gamma: float,
    are_joint: bool,
) -> Trajectories:
    """Return one trajectory for each actor of each environment.

    The last decisions of a rollout may have no reward yet. They are not learned from; their values are the next values
    of the decisions before.

    :param columns: The rollout, with per-actor rewards.
    :param values: Values before each decision, `[n_ticks, n_envs]`.
    :param log_rhos: Logarithms of the importance weights, likewise; `None`: all are 0.
    :param ends: The next actor and its value at the ends of the rollout and of truncated episodes.
    :param places: Ticks and environments of the decisions of each policy network.
    :param gamma: Discount for each environment step.
    :param are_joint: Whether all actors get the rewards of a tick.
    """
    assert columns.actor_rewards is not None
    numbers: dict[ActorID, int] = {}
    actors = np.full(columns.rewards.shape, -1)  # -1: none acts
    for substep in columns.substeps.values():
        for actor, (rows, envs) in substep.entries_by_actor():
            actors[substep.ticks[rows], envs] = numbers.setdefault(actor, len(numbers))
    acts = actors[..., np.newaxis] == np.arange(len(numbers))
    known_ends = {place: (numbers[actor], value) for place, (actor, value) in ends.items() if actor in numbers}
    complete, terminated, truncated = columns.step_complete | columns.truncated, columns.terminated, columns.truncated
    weights = None if log_rhos is None else log_rhos.cpu().numpy()
    has_left = np.zeros_like(acts) if columns.actor_done is None else acts & columns.actor_done[..., np.newaxis]
    own_values, next_values, own_log_rhos = actor_trajectories(
        values.cpu().numpy(), acts, known_ends, terminated, truncated, complete, gamma, has_left, weights
    )
    is_known = has_known_reward(complete)
    is_last_known = complete & ~np.append(is_known[1:], np.zeros_like(is_known[:1]), axis=0)

    def joined(grid: np.ndarray) -> Tensor:
        """Join environments and actors in one axis; repeat what all actors of an environment have in common."""
        filled = np.broadcast_to(grid if grid.ndim == 3 else grid[..., np.newaxis], acts.shape)
        return torch.from_numpy(filled.reshape(len(filled), -1).copy()).to(values.device)

    return Trajectories(
        values=[joined(own_values)],
        next_values=[joined(next_values)],
        rewards=[joined(np.where(acts | are_joint, columns.actor_rewards[..., np.newaxis], np.float32(0.0)))],
        has_own_rewards=True,
        terminated=joined(terminated[..., np.newaxis] | has_left),
        truncated=joined(truncated | is_last_known),
        step_complete=joined(complete),
        acts=joined(acts),
        log_rhos=[] if log_rhos is None else [joined(own_log_rhos)],
        places=[(ticks, envs * len(numbers) + actors[ticks, envs]) for ticks, envs in filter(None, places)],
    )


def actor_trajectories(
    values: np.ndarray,
    acts: np.ndarray,
    ends: Mapping[tuple[int, int], tuple[int, float]],
    terminated: np.ndarray,
    truncated: np.ndarray,
    step_complete: np.ndarray,
    gamma: float,
    has_left: np.ndarray,
    log_rhos: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the decisions of each actor as a trajectory of its own, however irregularly it acts.

    A tick in which another actor acts only passes time: where it completes an environment step, later rewards are
    discounted, and it changes nothing else. Return functions therefore treat all ticks alike.

    The value of an actor after the end of a rollout or of a truncated episode is known only if the actor acts next;
    otherwise its latest value is used.

    :param values: `[n_ticks, n_envs]`, value of the actor that acted, before it did.
    :param acts: bool `[n_ticks, n_envs, n_actors]`, the actors that acted.
    :param ends: The next actor and its value: after the rollout by `(n_ticks, environment index)`, at the end
        of truncated episodes by the tick they ended with.
    :param terminated: `[n_ticks, n_envs]`, the episode ended by itself.
    :param truncated: `[n_ticks, n_envs]`, the episode was truncated.
    :param step_complete: `[n_ticks, n_envs]`, the tick completed an environment step.
    :param gamma: Discount for each environment step.
    :param has_left: bool `[n_ticks, n_envs, n_actors]`, the decision was the actor's last one in the episode.
    :param log_rhos: `[n_ticks, n_envs]`, logarithm of each decision's importance weight; `None`: all are 1.
    :return: `[n_ticks, n_envs, n_actors]` each: an actor's value before its decision (where others act, the discounted
        value of what follows for it); its value after the tick; and the logarithm of the importance weight of all
        decisions from its own to the one before its next, or to the end of the environment step if it has left.
    """
    n_ticks = len(acts)
    own_values = np.where(acts, values[..., np.newaxis], 0).astype(values.dtype)
    acted_last = np.maximum.accumulate(np.where(acts, np.arange(n_ticks)[:, np.newaxis, np.newaxis], 0), axis=0)
    at_ends = np.take_along_axis(own_values, acted_last, axis=0)
    following = at_ends[-1].copy()
    for (tick, env), (actor, value) in ends.items():
        (following if tick == n_ticks else at_ends[tick])[env, actor] = value
    discounts = np.where(step_complete, gamma, 1.0)[..., np.newaxis].astype(values.dtype)
    weights = np.zeros_like(own_values)
    weight = np.zeros_like(following)
    rest_of_step = np.zeros_like(following[:, :1])
    next_values = np.empty_like(own_values)
    for tick in reversed(range(n_ticks)):
        following[terminated[tick]] = 0.0
        is_cut_off = truncated[tick] & ~terminated[tick]
        following[is_cut_off] = at_ends[tick, is_cut_off]
        next_values[tick] = following
        own_values[tick] = following = np.where(acts[tick], own_values[tick], discounts[tick] * following)
        if log_rhos is not None:
            weight[terminated[tick] | truncated[tick]] = 0.0
            rest_of_step[step_complete[tick]] = 0.0
            weight += log_rhos[tick, :, np.newaxis]
            rest_of_step += log_rhos[tick, :, np.newaxis]
            weights[tick] = np.where(acts[tick], np.where(has_left[tick], rest_of_step, weight), 0.0)
            weight[acts[tick]] = 0.0
    return own_values, next_values, weights
