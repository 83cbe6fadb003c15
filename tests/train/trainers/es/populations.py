"""Policies for the tests of evolution strategies."""

import torch
from torch import nn

from maze.perception.blocks import RunningNormalizationBlock
from maze.perception.models.custom_model_composer import CustomModelComposer

NET = "maze.perception.models.built_in.flatten_concat.FlattenConcatPolicyNet"


class TorchOnlyNet(nn.Module):
    """A network without a NumPy form."""

    def __init__(self, obs_shapes, action_logits_shapes):
        super().__init__()
        self.keys = list(obs_shapes)
        n_in = sum(shape[0] for shape in obs_shapes.values())
        self.heads = nn.ModuleDict({head: nn.Linear(n_in, shape[0]) for head, shape in action_logits_shapes.items()})

    def forward(self, x):
        features = torch.cat([x[key] for key in self.keys], dim=-1)
        return {head: torch.sin(layer(features)) for head, layer in self.heads.items()}


class NormalizingNet(TorchOnlyNet):
    """The same behind running normalization."""

    def __init__(self, obs_shapes, action_logits_shapes):
        super().__init__(obs_shapes, action_logits_shapes)
        self.blocks = nn.ModuleList(RunningNormalizationBlock(key, key, [shape]) for key, shape in obs_shapes.items())

    def forward(self, x):
        return super().forward({block.in_keys[0]: block(x)[block.out_keys[0]] for block in self.blocks})


def build_policy(env, network=None, separate_agents=()):
    torch.manual_seed(0)
    config = network or {"_target_": NET, "hidden_units": [8], "non_lin": "torch.nn.Tanh"}
    composer = CustomModelComposer(
        action_spaces_dict=env.action_spaces_dict,
        observation_spaces_dict=env.observation_spaces_dict,
        agent_counts_dict=env.agent_counts_dict,
        distribution_mapper_config=[],
        policy={
            "_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer",
            "networks": [config] * len(env.action_spaces_dict),
            "substeps_with_separate_agent_nets": list(separate_agents),
        },
        critic=None,
    )
    composer.policy.seed(1)
    return composer.policy
