"""Imitation of labels that a trainer makes itself, by simulation with copies of the environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch

from maze.core.agent.flat_adam import FlatAdam
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.core.log_stats.event_decorators import define_epoch_stats
from maze.core.utils.seeding import generator_state, set_generator_state
from maze.core.wrappers.return_normalization_reward_wrapper import FrozenEnvFactory
from maze.planning.branches import Branches, branches_of, chance_in, simulation_of, stack_of
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.learning import Losses, gradient_step
from maze.train.trainers.common.trainer import EpochTrainer
from maze.train.trainers.imitation.bc_loss import BCLoss
from maze.train.trainers.imitation.imitation_events import ImitationEvents
from maze.train.trainers.labelling.labelling_configs import LabellingConfig

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.trainers.common.training_runner import TrainingRunner
    from maze.train.utils.train_utils import Part


class LabellingEvents(ImitationEvents):
    """Events of the imitation of simulated labels."""

    @define_epoch_stats(np.mean)
    def gain(self, value: float) -> None:
        """Estimated gain of the return by the labels, over the actions that they are compared with."""

    @define_epoch_stats(np.mean)
    def changed_labels(self, value: float) -> None:
        """Share of the labels that differ from the action of the current policy."""

    @define_epoch_stats(np.mean)
    def simulated_decisions(self, value: float) -> None:
        """Decisions simulated in an update that makes labels."""


class Minibatch(NamedTuple):
    """Labelled decisions by actor: observations and actions by name, and weights, tensors `[batch, ...]`."""

    observations: list[dict[str, torch.Tensor]]
    actions: list[dict[str, torch.Tensor]]
    actors: list[ActorID]
    weights: list[torch.Tensor]


class LabelledDecisions:
    """Decisions with the actions that are to be imitated, and a weight for each.

    :param seed: Seed of the generator.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        """Draws the order of minibatches and all that a trainer draws; a part of the state."""
        self._columns: dict[ActorID, list[tuple[dict[str, np.ndarray], ...]]] = {}

    def add(
        self,
        actor: ActorID,
        observations: Mapping[str, np.ndarray],
        actions: Sequence[Mapping[str, Any]],
        weights: np.ndarray,
    ) -> None:
        """Add decisions of an actor.

        :param actor: The actor.
        :param observations: Arrays `[n, ...]` by name.
        :param actions: The labels, `[n]`.
        :param weights: Their weights in the loss, `[n]`, not negative.
        """
        if not len(weights):
            return
        stacked = {head: np.stack([np.asarray(action[head]) for action in actions]) for head in actions[0]}
        part = (dict(observations), stacked, {"weight": weights.astype(np.float32)})
        self._columns.setdefault(actor, []).append(part)

    def clear(self) -> None:
        """Remove all decisions."""
        self._columns.clear()

    def observations(self) -> Iterator[dict[str, np.ndarray]]:
        """Return observations as they were added."""
        for parts in self._columns.values():
            for observations, *_ in parts:
                yield observations

    def minibatches(self, batch_size: int) -> Iterator[Minibatch]:
        """Yield all decisions in random order, with weights whose mean over all of them is 1.

        :param batch_size: Number of decisions in a minibatch.
        """
        joined = {actor: _joined(parts) for actor, parts in self._columns.items()}
        sizes = [len(weights["weight"]) for *_, weights in joined.values()]
        mean = sum(float(weights["weight"].sum()) for *_, weights in joined.values()) / max(sum(sizes), 1)
        if mean <= 0.0:
            return  # no decision is better than another
        first = np.concatenate([[0], np.cumsum(sizes)])
        order = self.rng.permutation(first[-1])
        for start in range(0, len(order), batch_size):
            chosen, batch = order[start : start + batch_size], Minibatch([], [], [], [])
            for index, (actor, columns) in enumerate(joined.items()):
                rows = chosen[(chosen >= first[index]) & (chosen < first[index + 1])] - first[index]
                if len(rows):
                    seen, actions, weights = (
                        {name: torch.from_numpy(array[rows]) for name, array in arrays.items()} for arrays in columns
                    )
                    batch.observations.append(seen)
                    batch.actions.append(actions)
                    batch.actors.append(actor)
                    batch.weights.append(weights["weight"] / mean)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the decisions and the state of the generator."""
        columns = [(tuple(actor), list(_joined(parts))) for actor, parts in self._columns.items()]
        return {"columns": columns, "generator": generator_state(self.rng)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        set_generator_state(self.rng, state_dict["generator"])
        self._columns = {ActorID(*actor): [tuple(columns)] for actor, columns in state_dict["columns"]}


def _joined(parts: Sequence[tuple[dict[str, np.ndarray], ...]]) -> tuple[dict[str, np.ndarray], ...]:
    return tuple(
        {name: np.concatenate([each[index][name] for each in parts]) for name in parts[0][index]} for index in range(3)
    )


class Copies:
    """Copies of an environment: in arrays where it is a vectorised simulation, otherwise single ones.

    :param env: The environment with its wrappers, which is closed with the copies.
    :param name: Name of the algorithm, for messages.
    :raises ConfigError: It cannot be copied.
    """

    def __init__(self, env: Any, name: str) -> None:
        self._env, self._resources = env, ExitStack()
        self._resources.callback(env.close)
        self.chance = chance_in(stack_of(env)[0], f"algorithm={name}")
        env.seed(1)
        env.reset()
        self._arrays = simulation_of(env)
        self.action_spaces = env.action_spaces_dict

    def branches(self, single: bool = False, gamma: float = 1.0) -> tuple[Branches, int | None]:
        """Return a set of copies, and the environment steps of an episode that a time limit leaves (`None`: any).

        :param single: Whether single environments are needed.
        :param gamma: Discount factor.
        """
        simulation, limit = (None if single else self._arrays) or (None, None)
        branches = branches_of(stack_of(self._env)[0], simulation, gamma)
        self._resources.callback(branches.close)
        return branches, limit

    def close(self) -> None:
        """Close the copies and the environment."""
        self._resources.close()


class LabellingTrainer(EpochTrainer, ABC):
    """Label decisions by simulation, and imitate the labels with the loss of behavioural cloning.

    Labels are computed in the process of the trainer; the placement concerns evaluations.

    :param algorithm_config: Hyperparameters.
    :param policy: The policy that is trained.
    :param copies: Copies of the environment.
    :param seed: Seed of the labels and of the order of minibatches.
    :param common: Arguments of :class:`~maze.train.trainers.common.trainer.EpochTrainer`.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = LabellingConfig
    events_class: ClassVar[type[Any]] = LabellingEvents
    learns_observation_statistics: ClassVar[bool] = True
    policy: TorchPolicy

    def __init__(self, algorithm_config: Any, policy: TorchPolicy, copies: Copies, seed: int, **common: Any) -> None:
        super().__init__(algorithm_config, policy, **common)
        self.copies, self.labelled = copies, LabelledDecisions(seed)
        self.rng = self.labelled.rng
        named = {("policy_grad_norm", key): network for key, network in policy.networks.items()}
        self.optimizer = FlatAdam(named, lr=self.config.lr, eps=1e-8)
        self.loss = BCLoss(copies.action_spaces, self.config.entropy_coef)

    @classmethod
    @override(EpochTrainer)
    def build(cls, run: TrainingRunner) -> LabellingTrainer:
        assert run.env_factory is not None, "setup comes first"
        policy: TorchPolicy = run.model()
        copies = Copies(FrozenEnvFactory(run.env_factory)(), run.algorithm.name)
        run.closing(copies.close)
        return cls(run.algorithm, policy, copies, run.agent_seed(), **run.common_arguments(policy))

    @abstractmethod
    def _label_first(self) -> None:
        """Add decisions that show which observations there are, whatever their labels."""

    @override(EpochTrainer)
    def _begin_training(self, n_epochs: int) -> None:
        self.optimizer.tie()
        if self.observation_statistics.is_missing:
            self._label_first()
            self.observation_statistics.learn_from(self.labelled.observations())
            self.labelled.clear()

    @override(EpochTrainer)
    def _end_training(self) -> None:
        self.policy.eval()

    def _seed(self) -> int:
        return int(self.rng.integers(2**31))

    def _imitate(self) -> None:
        """Learn from each of the labelled decisions once."""
        self.policy.train()
        for batch in self.labelled.minibatches(self.config.batch_size):
            observations, actions, actors, weights = batch
            weights = [weight.to(self.policy.device) for weight in weights]
            loss = self.loss.calculate_loss(self.policy, observations, actions, actors, self.events, weights)
            norms = gradient_step(Losses(loss), self.optimizer, self.config.max_grad_norm)
            for (event, key), norm in norms.items():
                step_key, agent = key if isinstance(key, tuple) else (key, 0)
                getattr(self.events, event)(step_key, agent, float(norm))
        self.policy.eval()

    @override(EpochTrainer)
    def _parts(self) -> dict[str, Part]:
        return {"optimizer": self.optimizer, "labelled": self.labelled}
