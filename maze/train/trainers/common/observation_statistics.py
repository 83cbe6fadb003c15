"""Learned scales of observations and rewards: running normalization, reward scaling and centring.

Statistics of observations are in the networks of a model. Scaling and centring change the rewards of a rollout that is
learned from, not those of statistics, KPIs and evaluations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maze.core.agent.returns import ReturnFunction, Returns, Trajectories
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_model import TorchModel
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_columns import RolloutColumns
from maze.core.utils.stats_utils import CumulativeMovingMeanStd
from maze.perception.blocks.general.input_conversion import RunningNormalizationBlock
from maze.perception.program.network_program import Rows

Moments = dict[str, tuple[int, np.ndarray, np.ndarray]]
"""Number, mean and variance (float64 `[*shape]`) of an episode's observations by name."""


class ObservedRows:
    """Sums over the observations of episodes, each of which is a row.

    Of each observation the first one of its episode is subtracted, so that entries that do not vary have a variance of
    exactly 0. A row's sums do not depend on the other rows.

    :param names: Names of the observations.
    :param observation_spaces_dict: Observation spaces by sub-step.
    :param n_rows: Number of episodes side by side.
    """

    def __init__(self, names: Collection[str], observation_spaces_dict: Mapping[StepKeyType, Any], n_rows: int) -> None:
        # Of each observation: its number, the first one, and sums of differences from it and of their squares.
        self._sums = {
            (step_key, name): [np.zeros(n_rows, np.int64), *(np.zeros((n_rows, *space[name].shape)) for _ in range(3))]
            for step_key, space in observation_spaces_dict.items()
            for name in space
            if name in names
        }

    def __bool__(self) -> bool:
        return bool(self._sums)

    def begin(self, row: int) -> None:
        """Begin an episode: the sums of its row become zero.

        :param row: Index of the row.
        """
        for arrays in self._sums.values():
            for array in arrays:
                array[row] = 0

    def add(self, actor: ActorID, observation: Mapping[str, np.ndarray], rows: Rows) -> None:
        """Take observations into account that are acted on.

        :param actor: The acting actor.
        :param observation: Arrays `[len(rows), *shape]`.
        :param rows: The episodes.
        """
        for (step_key, name), (count, first, total, squares) in self._sums.items():
            if step_key != actor[0]:
                continue
            values, begins = observation[name], count[rows] == 0
            if begins.any():
                first[np.arange(len(count))[rows][begins]] = values[begins]
            difference = values - first[rows]
            total[rows] += difference
            difference *= difference
            squares[rows] += difference
            count[rows] += 1

    def move(self, source: int, target: int) -> None:
        """Copy the sums of an episode to another row, whose sums are replaced.

        :param source: Index of the row of the episode, whose sums stay until :meth:`begin`.
        :param target: Index of the other row.
        """
        for arrays in self._sums.values():
            for array in arrays:
                array[target] = array[source]

    def of(self, row: int) -> Moments | None:
        """Return statistics of an episode; `None` if it has no observations.

        :param row: Index of the row.
        :return: Number, mean and variance (float64 `[*shape]`) by name, over all sub-steps with that observation.
        """
        parts: list[Moments] = []
        for (_, name), (counts, first, total, squares) in self._sums.items():
            if count := int(counts[row]):
                shift = total[row] / count
                variance = np.maximum(squares[row] / count - shift * shift, 0.0)
                parts.append({name: (count, first[row] + shift, variance)})
        return {
            name: (int(found.count), np.asarray(found.mean), np.asarray(found.var))
            for name, found in merged(parts).items()
        } or None


def merged(observed: Iterable[Moments]) -> dict[str, CumulativeMovingMeanStd]:
    """Return statistics of several episodes by name, merged in their order.

    :param observed: Statistics of each.
    """
    found: dict[str, CumulativeMovingMeanStd] = {}
    for moments in observed:
        for name, of_episode in moments.items():
            found.setdefault(name, CumulativeMovingMeanStd(epsilon=0.0)).merge(*of_episode)
    return found


class ObservationStatistics:
    """The statistics in all :class:`~maze.perception.blocks.general.input_conversion.RunningNormalizationBlock`
    of a model, which are the same for all networks, sub-steps and environments with an observation of that name.

    Trainers call :meth:`learn` once for each rollout, after they have learned from it. A rollout is collected and
    learned from with the same statistics, those of all rollouts before. Every observation that was acted on counts
    once, in the order of the rollout for every placement of the environments.

    :param model: The model that is trained.
    """

    def __init__(self, model: TorchModel | None) -> None:
        parts = (model.policy, model.critic) if isinstance(model, TorchActorCritic) else (model,)
        modules = [
            module
            for part in parts
            for network in getattr(part, "networks", {}).values()
            for module in network.modules()
            if isinstance(module, RunningNormalizationBlock)
        ]
        self._blocks: dict[str, list[RunningNormalizationBlock]] = {}
        for block in dict.fromkeys(modules):  # those that networks share once
            self._blocks.setdefault(block.in_keys[0], []).append(block)
        self.names = list(self._blocks)
        """Names of the observations that are normalized."""

    def __bool__(self) -> bool:
        return bool(self._blocks)

    @property
    def is_missing(self) -> bool:
        """Whether there are blocks without any observations so far."""
        return any(not bool(block.count) for blocks in self._blocks.values() for block in blocks)

    def acting_buffers(self) -> list[torch.Tensor]:
        """Return the offset and scale of each block, `[*shape]` each."""
        return [buffer for blocks in self._blocks.values() for each in blocks for buffer in (each.offset, each.scale)]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Return a context in which the model's weights are replaced, but not its statistics."""
        buffers = [buffer for blocks in self._blocks.values() for each in blocks for buffer in each.buffers()]
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    def learn(self, columns: RolloutColumns) -> None:
        """Take the observations of a rollout into account.

        :param columns: The rollout.
        """
        substeps = [(each.entries(), each.observations) for each in columns.substeps.values() if self._blocks]
        self.learn_from({key: array[entries] for key, array in seen.items()} for entries, seen in substeps)

    def learn_from(self, observations: Iterable[Mapping[str, np.ndarray]]) -> None:
        """Take observations into account.

        :param observations: Arrays `[n, *shape]` by name, each observation in one of them.
        :raises ConfigError: A network normalizes something that is not an observation.
        """
        seen: set[str] = set()
        found: dict[str, CumulativeMovingMeanStd] = {}
        for part in observations if self._blocks else ():
            seen |= part.keys()
            for key in self._blocks.keys() & part.keys():
                if len(part[key]):
                    found.setdefault(key, CumulativeMovingMeanStd(epsilon=0.0)).update(part[key])
        for key, blocks in self._blocks.items():
            if seen and key not in seen:
                raise ConfigError(
                    f"model: {blocks[0].block_name} normalizes `{key}`, but there are the observations {sorted(seen)}. "
                    "A RunningNormalizationBlock takes an observation as the environment shows it."
                )
            for block in blocks if key in found else ():
                block.learn(found[key])

    def learn_merged(self, found: Mapping[str, CumulativeMovingMeanStd]) -> None:
        """Take observations into account of which only the statistics are known.

        :param found: The statistics by name.
        :raises ConfigError: There are none.
        """
        if self._blocks and not found:
            raise ConfigError(
                f"model.normalize_observations: expected statistics of the observations {self.names}, but the workers "
                "reported none."
            )
        for key, blocks in self._blocks.items():
            for block in blocks if key in found else []:
                block.learn(found[key])

    def require_learned(self, learner: str) -> None:
        """Refuse networks without statistics, for algorithms that learn none.

        :param learner: Their name.
        :raises ConfigError: There are none yet.
        """
        if self.is_missing:
            raise ConfigError(
                f"model.normalize_observations: {learner} learns no statistics of observations, and the networks have "
                "none yet. Train with A2C, PPO, IMPALA, SAC, DQN, ES or BC, start from such a model (input_dir=...), "
                "or use wrappers=vector_obs, whose statistics are estimated before the run."
            )


# -- rewards that are learned from ------------------------------------------------------------------------------------


_EPSILON = 1e-8
# Scaled rewards are clipped to it.
_LARGEST = 10.0


class RewardScaling:
    """Divide the rewards that a trainer learns from by the standard deviation of the discounted return so far, and
    clips them to [-10, 10] (Engstrom et al. 2020, Implementation matters in deep policy gradients, "reward scaling").

    That return is the discounted sum of the rewards up to a step, from the beginning of its episode on (`R <- gamma * R
    + r`), and the standard deviation is that of all steps of all environments. A rollout counts before its own rewards
    are scaled, all of them by the same number. A return continues in the next rollout, in the environment with the same
    index; with IMPALA, and where a rollout does not wait for all environments, that may be another one.

    :param gamma: Discount for each environment step.
    :param at_ends: Whether all rewards come with the last steps of episodes. They are divided by their root mean square
        instead: the standard deviation of all steps is smaller by the root of the length, and all would be clipped.
    """

    def __init__(self, gamma: float, at_ends: bool = False) -> None:
        self._gamma, self._at_ends = gamma, at_ends
        self._statistics = CumulativeMovingMeanStd(epsilon=0.0)
        # `[n_envs]`: of the running episodes, already discounted for the step that comes.
        self._returns = np.zeros(0)

    @property
    def std(self) -> float:
        """Divisor of rewards; 1 where returns do not vary."""
        variance = float(self._statistics.var) if self._statistics.count else 0.0
        variance += float(self._statistics.mean) ** 2 if self._at_ends else 0.0
        return float(np.sqrt(variance + _EPSILON)) if variance > 0.0 else 1.0

    def scale(self, columns: RolloutColumns) -> None:
        """Learn from the rewards of a rollout, and scale them in place.

        :param columns: The rollout; of rewards that are not finite nothing is learned.
        """
        rewards = columns.rewards
        if np.isfinite(rewards.sum()):
            complete = columns.step_complete
            discounts, ended = np.where(complete, self._gamma, 1.0), columns.terminated | columns.truncated
            discounts[ended] = 0.0
            self._returns = columns.carried(self._returns)
            returns = rewards.astype(np.float64)  # up to each tick
            for tick, discount in enumerate(discounts):
                returns[tick] += self._returns
                self._returns = returns[tick] * discount
            self._statistics.update(returns[ended if self._at_ends else complete])
        for of_whom in (rewards, columns.actor_rewards):
            if of_whom is not None:
                np.multiply(of_whom, np.float32(1.0 / self.std), out=of_whom)
                np.clip(of_whom, -_LARGEST, _LARGEST, out=of_whom)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, and the returns of the running episodes."""
        statistics = {name: float(getattr(self._statistics, name)) for name in ("count", "mean", "var")}
        return {**statistics, "returns": self._returns.copy()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        for name in ("count", "mean", "var"):
            setattr(self._statistics, name, state_dict[name])
        self._returns = np.array(state_dict["returns"], np.float64)


class CentredReturns(ReturnFunction):
    """Returns of rewards minus their average: simple reward centring (Naik et al. 2024, Reward centering).

    Where a problem has no end and is judged by averages, values consist mostly of the average reward divided by `1 -
    gamma`, a constant that carries no information about actions and hides differences that do. Without it `gamma` may
    come close to 1. With `gamma` 1 values are those of average-reward reinforcement learning: defined up to a constant,
    which is chosen so that targets have mean 0 in each rollout (it drifts unless it is held: Ma et al. 2021, Average-
    reward reinforcement learning with trust region methods).

    Centred values have the scale of the differences between states: in a queue under heavy load hundreds, which a
    network with outputs around 1 learns slowly. `is_scaled` divides them by the standard deviation of the targets.

    :param returns: Estimates advantages and targets from the rewards that remain.
    :param rate: Step size of the running estimates of average and standard deviation for each rollout, in (0, 1].
    :param is_scaled: Whether values are learned in standard deviations of the targets.
    """

    def __init__(self, returns: ReturnFunction, rate: float, is_scaled: bool = False) -> None:
        self.gamma = returns.gamma
        self.is_off_policy = returns.is_off_policy
        self.averages: list[float] = []
        """Average reward of an environment step, by separately predicted entry of the trajectories' rewards."""
        self.std = 0.0 if is_scaled else 1.0
        """Divisor of centred rewards; 0 before the first rollout."""
        self._returns = returns
        self._rate = rate
        self._is_scaled = is_scaled

    @override(ReturnFunction)
    def __call__(self, trajectories: Trajectories) -> Returns:
        if trajectories.acts is not None or bool(trajectories.terminated.any()):
            reason = "actors come and go" if trajectories.acts is not None else "an episode ended by itself"
            raise ConfigError(
                f"algorithm.reward_centering: expected a problem without an end, but {reason}: rewards above their "
                "average would make long episodes better or worse than they are. Leave it at 0, or have episodes cut "
                "off only (`max_episode_steps`)."
            )
        rewards = trajectories.rewards if trajectories.has_own_rewards else [torch.stack(trajectories.rewards).sum(0)]
        n_steps = rewards[0].numel() if trajectories.step_complete is None else int(trajectories.step_complete.sum())
        found = [float(reward.sum()) / max(1, n_steps) for reward in rewards]
        known = self.averages or found
        self.averages = [old + self._rate * (new - old) for old, new in zip(known, found, strict=True)]
        is_first = self.std == 0.0
        returns = self._returns(centred(trajectories, self.averages, self.std or 1.0))
        if self._is_scaled:
            targets = torch.cat([_of_decisions(target, trajectories) for target in returns.targets])
            std = (self.std or 1.0) * float(targets.std(correction=0))
            self.std += (1.0 if is_first else self._rate) * (std - self.std)
            if is_first and self.std:  # values are still to be learned, in this unit
                returns = self._returns(centred(trajectories, self.averages, self.std))
        if self.gamma == 1.0:
            returns.targets = [target - _of_decisions(target, trajectories).mean() for target in returns.targets]
        return returns

    def state_dict(self) -> dict[str, Any]:
        """Return the estimates."""
        return {"averages": list(self.averages), "std": self.std}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore estimates of :meth:`state_dict`."""
        self.averages, self.std = list(state_dict["averages"]), float(state_dict["std"])


def _of_decisions(target: Tensor, trajectories: Trajectories) -> Tensor:
    """Return targets of decisions `[n]`, without entries of environments whose autoreset is pending."""
    places = [place for place in trajectories.places if place is not None]
    return torch.cat([target[place] for place in places]) if places else target.flatten()


def centred(trajectories: Trajectories, averages: Sequence[float], std: float = 1.0) -> Trajectories:
    """Return the trajectories with rewards above their average: it is subtracted where an environment step is complete.

    :param trajectories: The trajectories of a rollout.
    :param averages: Average reward of an environment step, for each separately predicted entry of the rewards.
    :param std: Divisor of the centred rewards.
    """
    complete = 1.0 if trajectories.step_complete is None else trajectories.step_complete.to(trajectories.rewards[0])
    if trajectories.has_own_rewards:
        pairs = zip(trajectories.rewards, averages, strict=True)
        rewards = [reward - average * complete for reward, average in pairs]
    else:  # the values predict the sum over all sub-steps
        rewards = [*trajectories.rewards[:-1], trajectories.rewards[-1] - averages[0] * complete]
    return replace(trajectories, rewards=rewards if std == 1.0 else [reward / std for reward in rewards])
