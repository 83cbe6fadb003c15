"""Recurrent models for the tests."""

import torch

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.perception.models.auto_model_composer import AutoModelComposer

STEP_CRITIC = {"_target_": "maze.perception.models.critics.StateCriticComposer"}
SHARED = {"_target_": "maze.perception.models.critics.SharedStateCriticComposer", "stack_observations": False}
POLICY = {"_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer"}


def recurrent_model(env, critic=None, recurrence="carried", **settings):
    """Policy and critic with carried hidden states for an environment, far from their first weights."""
    torch.manual_seed(0)
    composer = AutoModelComposer(
        env.action_spaces_dict,
        env.observation_spaces_dict,
        env.agent_counts_dict,
        policy=POLICY,
        critic=critic or STEP_CRITIC,
        hidden_units=[8],
        recurrence=recurrence,
        **settings,
    )
    model = TorchActorCritic(composer.policy, composer.critic, "cpu")
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.policy.seed(3)
    return model
