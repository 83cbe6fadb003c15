"""Small models and trainers for tests of SAC."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.env.structured_env import ActorID
from maze.perception.models.custom_model_composer import CustomModelComposer
from maze.train.parallelization.distributed_actors.dummy_distributed_workers_with_buffer import (
    DummyDistributedWorkersWithBuffer,
)
from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
from maze.train.trainers.sac.sac_runners import SACRunner
from maze.train.trainers.sac.sac_trainer import SAC

NETS = "maze.perception.models.built_in.flatten_concat.FlattenConcat"
SIZES = {"hidden_units": [8], "non_lin": "torch.nn.Tanh"}
SQUASHED = [
    {
        "action_space": "gym.spaces.Box",
        "distribution": "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution",
    }
]


def build_model(env: Any, critic: str = "", distributions: Any = SQUASHED, seed: int = 0) -> TorchActorCritic:
    """An actor-critic with tiny networks.

    :param critic: ``Shared``, or empty for a critic for each sub-step.
    """
    torch.manual_seed(seed)
    n_substeps = len(env.action_spaces_dict)
    composer = "SharedStateActionCriticComposer" if critic == "Shared" else "StateActionCriticComposer"
    module = "shared_state_action_critics_composer." if critic == "Shared" else ""
    model = CustomModelComposer(
        action_spaces_dict=env.action_spaces_dict,
        observation_spaces_dict=env.observation_spaces_dict,
        agent_counts_dict=env.agent_counts_dict,
        distribution_mapper_config=distributions,
        policy={
            "_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer",
            "networks": [{"_target_": f"{NETS}PolicyNet", **SIZES}] * n_substeps,
            "substeps_with_separate_agent_nets": [],
        },
        critic={
            "_target_": f"maze.perception.models.critics.{module}{composer}",
            "networks": [{"_target_": f"{NETS}StateActionValueNet", **SIZES}] * (1 if module else n_substeps),
        },
    )
    model.policy.seed(seed + 1)
    return TorchActorCritic(model.policy, model.critic, "cpu")


def learner_of(model: TorchActorCritic, config: SACAlgorithmConfig, actors: list[ActorID], seed: int = 0) -> SAC:
    """A trainer that gets its batches from the test."""
    return SAC(config, model, SimpleNamespace(actors=actors), None, None, seed=seed)


def build_trainer(make_env: Any, critic: str = "", seed: int = 0, trainer_args: Any = None, **config: Any) -> SAC:
    """A trainer with a filled replay buffer."""
    values = {
        "n_epochs": 1, "epoch_length": 4, "batch_size": 16, "initial_buffer_size": 30, "replay_buffer_size": 100,
        "rollout_evaluator": None, "lr": 0.01, **config,
    }  # fmt: skip
    settings = SACAlgorithmConfig(**values)
    model = build_model(make_env(), critic, seed=seed)
    buffer = UniformReplayBuffer(settings.replay_buffer_size, seed=seed + 2)
    workers = DummyDistributedWorkersWithBuffer(
        env_factory=make_env,
        worker_policy=model.policy,
        n_rollout_steps=settings.n_rollout_steps,
        n_workers=settings.num_actors,
        batch_size=settings.batch_size,
        rollouts_per_iteration=settings.rollouts_per_iteration,
        split_rollouts_into_transitions=settings.split_rollouts_into_transitions,
        env_instance_seeds=[seed + 10 + index for index in range(settings.num_actors)],
        replay_buffer=buffer,
    )
    arguments = {"model_selection": None, "evaluator": None, **(trainer_args or {})}
    trainer = SAC(settings, model, workers, seed=seed + 3, **arguments)
    SACRunner.init_replay_buffer(
        replay_buffer=buffer,
        initial_sampling_policy=settings.initial_sampling_policy,
        initial_buffer_size=settings.initial_buffer_size,
        replay_buffer_seed=seed + 4,
        split_rollouts_into_transitions=settings.split_rollouts_into_transitions,
        n_rollout_steps=settings.n_rollout_steps,
        env_factory=make_env,
    )
    return trainer
