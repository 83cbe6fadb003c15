"""Action masks in template models: from the observation to sampling, learning and errors."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.perception.models.template_model_composer import TemplateModelComposer
from tests.perception.models.test_template_model_composer import MODEL, box

ACTOR = ActorID("select", 0)
LSTM = {
    "block_type": "maze.perception.blocks.LSTMLastStepBlock",
    "block_params": {"hidden_size": 5, "num_layers": 1, "bidirectional": False, "non_lin": "torch.nn.Tanh"},
}
HEADS = {
    "discrete": (spaces.Discrete(5), [0, 1, 0, 1, 0]),
    "multi_discrete": (spaces.MultiDiscrete([3, 2]), [0, 1, 1, 1, 0]),
    "multi_binary": (spaces.MultiBinary(4), [1, 0, 0, 1]),
}
N_STEPS = 3


def policy_for(kind, recurrent=False, stack_mask=False, mask_shape=None):
    space, mask = HEADS[kind]
    mask_shape = mask_shape or ((N_STEPS, len(mask)) if stack_mask else (len(mask),))
    config = copy.deepcopy(MODEL)
    if recurrent:
        config["model_builder"]["modality_config"]["recurrence"] = LSTM
    observation_space = spaces.Dict(
        {
            "observation": box(*([N_STEPS] if recurrent else []), 4),
            "mask": spaces.Box(0, 1, mask_shape, np.float32),
        }
    )
    composer = TemplateModelComposer(
        action_spaces_dict={"select": spaces.Dict({"choose": space})},
        observation_spaces_dict={"select": observation_space},
        agent_counts_dict={"select": 1},
        **{key: config[key] for key in ("distribution_mapper_config", "model_builder", "policy", "critic")},
        action_masks={"choose": "mask"},
    )
    policy = composer.policy
    policy.seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(std=0.5)  # decided opinions, also on what is masked
    return composer, policy


def observations(kind, batch_size, recurrent=False, stack_mask=False):
    mask = np.tile(np.array(HEADS[kind][1], np.float32), (batch_size, 1))
    if stack_mask:  # in earlier steps other actions were valid
        mask = np.stack([1.0 - mask] * (N_STEPS - 1) + [mask], axis=1)
    shape = (batch_size, *([N_STEPS] if recurrent else []), 4)
    return {"observation": np.random.default_rng(0).normal(size=shape).astype(np.float32), "mask": mask}


def is_valid(kind, actions):
    """Whether no row holds an action that the mask of ``HEADS`` forbids."""
    if kind == "discrete":
        return np.isin(actions, [1, 3])
    if kind == "multi_discrete":
        return np.isin(actions[:, 0], [1, 2]) & (actions[:, 1] == 0)
    return (actions[:, [1, 2]] == 0).all(axis=1)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("recurrent", "stack_mask"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_masked_actions_are_never_chosen(kind, recurrent, stack_mask, deterministic):
    _, policy = policy_for(kind, recurrent, stack_mask)
    actions = policy.compute_actions(observations(kind, 2000, recurrent, stack_mask), ACTOR, deterministic)["choose"]
    assert is_valid(kind, actions).all()
    if not deterministic:
        assert len(np.unique(actions, axis=0)) == {"discrete": 2, "multi_discrete": 2, "multi_binary": 4}[kind]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("recurrent", [False, True])
def test_log_probability_entropy_and_divergence_use_the_mask_of_sampling(kind, recurrent):
    _, policy = policy_for(kind, recurrent)
    x = observations(kind, 50, recurrent)
    actions = {"choose": torch.as_tensor(policy.compute_actions(x, ACTOR)["choose"])}
    output = policy.compute_substep_policy_output(x, ACTOR)

    # the same distribution over valid actions only, built by hand
    logits = output.action_logits["choose"].double()
    groups = {"discrete": [[1, 3]], "multi_discrete": [[1, 2], [3]], "multi_binary": []}[kind]
    if kind == "multi_binary":
        probability = torch.sigmoid(logits[:, [0, 3]])
        bits = actions["choose"][:, [0, 3]].double()
        log_prob = torch.where(bits > 0, probability, 1.0 - probability).log().sum(-1)
        entropy = torch.distributions.Bernoulli(probs=probability).entropy().sum(-1)
    else:
        parts = [torch.distributions.Categorical(logits=logits[:, group]) for group in groups]
        entropy = sum(part.entropy() for part in parts)
        chosen = actions["choose"] if kind == "multi_discrete" else actions["choose"].unsqueeze(-1)
        offsets = [0, 3]
        log_prob = sum(
            part.log_prob(torch.tensor([group.index(int(c) + offset) for c in column]))
            for part, group, column, offset in zip(parts, groups, chosen.T, offsets, strict=False)
        )
    assert torch.allclose(output.prob_dist.joint_log_prob(actions).double(), log_prob, atol=1e-5)
    assert torch.allclose(output.entropy.double(), entropy, atol=1e-5)

    (output.prob_dist.joint_log_prob(actions).sum() + output.entropy.sum()).backward()
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in policy.parameters())


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_divergences_of_masked_policies_count_valid_actions_only(kind, temperature):
    _, policy = policy_for(kind)
    x = observations(kind, 6)
    first = policy.compute_substep_policy_output(x, ACTOR)
    second = policy.compute_substep_policy_output(x, ACTOR, temperature=temperature)
    logits = first.action_logits["choose"].detach()
    if kind == "multi_binary":
        p, q = (torch.distributions.Bernoulli(logits=logits[:, [0, 3]] / t) for t in (1.0, temperature))
        expected = torch.distributions.kl_divergence(p, q).sum(-1)
    else:  # the one valid action of the second component of `multi_discrete` has no part in it
        group = [1, 3] if kind == "discrete" else [1, 2]
        p, q = (torch.distributions.Categorical(logits=logits[:, group] / t) for t in (1.0, temperature))
        expected = torch.distributions.kl_divergence(p, q)
    assert torch.allclose(first.prob_dist.joint_kl(second.prob_dist), expected, atol=1e-5)
    assert bool(torch.isfinite(second.entropy).all())


@pytest.mark.parametrize("kind", ["discrete", "multi_discrete"])
def test_a_row_without_valid_action_names_substep_and_key(kind):
    _, policy = policy_for(kind)
    x = observations(kind, 4)
    x["mask"][2] = 0.0
    for act in (policy.compute_actions, policy.compute_substep_policy_output):
        with pytest.raises(EnvironmentContractError, match=r"Sub-step '?select'?: .*'mask'.*no valid action.*\(2"):
            act(x, ACTOR)


def test_every_bit_may_be_masked():
    _, policy = policy_for("multi_binary")
    x = observations("multi_binary", 4)
    x["mask"][:] = 0.0
    assert not policy.compute_actions(x, ACTOR)["choose"].any()
    output = policy.compute_substep_policy_output(x, ACTOR)
    assert torch.allclose(output.entropy, torch.zeros(4), atol=1e-6)


def test_masks_are_no_features_unless_they_are_mapped():
    composer, policy = policy_for("discrete")
    assert composer.critic.networks["select"].in_keys == ["observation"]
    assert "mask_DenseBlock" not in policy.networks["select"].perception_blocks
    composer.model_builder.observation_modality_mapping["mask"] = "feature"
    network, _ = composer.template_policy_net(
        composer.observation_spaces_dict["select"], composer.action_spaces_dict["select"], []
    )
    assert "mask_DenseBlock" in network.perception_blocks


def test_masked_discrete_policies_act_in_numpy():
    _, policy = policy_for("discrete")
    policy.compute_actions(observations("discrete", 4), ACTOR)
    assert policy._actors["select"].runs_in_numpy


def test_masks_of_other_shapes_and_for_continuous_actions_are_named():
    with pytest.raises(ConfigError, match=r"\(choose\).*'choose_logits': \(5,\), 'mask': \(4,\)"):
        policy_for("discrete", mask_shape=(4,))
    with pytest.raises(ConfigError, match=r"action_masks.steer: only discrete actions can be masked"):
        TemplateModelComposer(
            action_spaces_dict={0: spaces.Dict({"steer": box(1)})},
            observation_spaces_dict={0: spaces.Dict({"observation": box(4), "mask": box(1)})},
            agent_counts_dict={0: 1},
            **{key: MODEL[key] for key in ("distribution_mapper_config", "model_builder", "policy", "critic")},
            action_masks={"steer": "mask"},
        )
