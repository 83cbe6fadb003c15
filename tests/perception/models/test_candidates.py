"""Actions that choose one of a varying number of candidates."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.core.agent.random_policy import RandomPolicy, candidates_of
from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, EnvironmentContractError
from maze.perception.blocks import SetAttentionBlock
from maze.perception.blocks.joint_blocks import set_blocks
from maze.perception.models.auto_model_composer import AutoModelComposer
from maze.perception.models.space_config import SpacesConfig
from maze.perception.program.network_program import in_numpy

POLICY = {"_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer"}
CRITIC = {"_target_": "maze.perception.models.critics.StateCriticComposer"}
Q_CRITIC = {"_target_": "maze.perception.models.critics.StateActionCriticComposer"}
ACTOR = ActorID(0, 0)


def spaces_of(n, n_features=3):
    observations = spaces.Dict(
        order_candidates=spaces.Box(-1.0, 1.0, (n, n_features), np.float32),
        order_candidates_mask=spaces.Box(0.0, 1.0, (n,), np.float32),
        order_mask=spaces.Box(0.0, 1.0, (n,), np.float32),
        day=spaces.Box(0.0, 1.0, (2,), np.float32),
    )
    return {0: spaces.Dict(order=spaces.Discrete(n))}, {0: observations}


def composed(n, critic=CRITIC, **arguments):
    torch.manual_seed(1)
    model = AutoModelComposer(*spaces_of(n), {0: 1}, policy=POLICY, critic=critic, hidden_units=[16, 8], **arguments)
    for network in (model.policy.networks[0], *model.critic.networks.values()):
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.5)  # at first policies are close to uniform
    return model


def some(n, n_existing=None, n_allowed=None, batch=4):
    """Observations in which the first `n_existing` candidates exist, of which the first `n_allowed` are allowed."""
    rng = np.random.default_rng(3)
    places = np.broadcast_to(np.arange(n), (batch, n))
    return {
        "order_candidates": rng.uniform(-1, 1, (batch, n, 3)).astype(np.float32),
        "order_candidates_mask": (places < (n_existing or n)).astype(np.float32),
        "order_mask": (places < (n_allowed or n_existing or n)).astype(np.float32),
        "day": rng.random((batch, 2)).astype(np.float32),
    }


def tensors(observation):
    return {key: torch.as_tensor(value) for key, value in observation.items()}


def networks_of(model):
    """The networks with a logit for each candidate, as functions, and those with one value for all."""
    policy, critic = model.policy.networks[0], next(iter(model.critic.networks.values()))
    if isinstance(critic, torch.nn.ModuleList):
        return [(policy, "order"), (critic[0], "order_q_values")], []
    return [(policy, "order")], [(critic, "value")]


@pytest.mark.parametrize("critic", [CRITIC, Q_CRITIC])
@pytest.mark.parametrize("attention", [True, False])
def test_the_order_of_candidates_does_not_matter(attention, critic):
    scores, values = networks_of(composed(7, critic, attention=attention))
    observation = some(7, 6, 4)
    order = np.random.default_rng(0).permutation(7)
    mixed = {key: value if key == "day" else value[:, order] for key, value in observation.items()}
    for network, key in scores:
        logits = network(tensors(observation))[key].detach()
        assert logits[:, :4].std() > 0.01
        torch.testing.assert_close(network(tensors(mixed))[key].detach(), logits[:, order])
        np.testing.assert_allclose(in_numpy(network)(mixed)[key], logits[:, order], rtol=1e-4, atol=1e-5)
    for network, key in values:
        expected = network(tensors(observation))[key]
        torch.testing.assert_close(network(tensors(mixed))[key], expected)


@pytest.mark.parametrize("attention", [True, False])
def test_padding_makes_no_difference_and_more_candidates_need_no_other_network(attention):
    model = composed(5, attention=attention)
    scores, values = networks_of(model)
    observation = some(5)
    padded = some(9, 5, 5)
    for key, value in observation.items():
        padded[key][:, : value.shape[1]] = value
    for network, key in scores + values:
        expected, found = (network(tensors(seen))[key] for seen in (observation, padded))
        torch.testing.assert_close(found[:, :5] if key == "order" else found, expected)
    model.policy.seed(0)
    many = some(80, n_allowed=60)
    many["order_mask"][:, :40] = 0.0
    for deterministic in (True, False):
        actions = model.policy.compute_actions(many, ACTOR, deterministic)["order"]
        assert ((actions >= 40) & (actions < 60)).all()
    output = model.policy.compute_substep_policy_output(many, ACTOR)
    assert output.prob_dist.log_prob({"order": torch.as_tensor(actions)})["order"].isfinite().all()
    best, _ = model.policy.compute_top_action_candidates({key: value[0] for key, value in many.items()}, 3, None, None)
    assert all(40 <= action["order"] < 60 for action in best)


def test_the_candidate_mask_is_an_input_of_policy_and_critic():
    model = composed(6)
    few, many = some(6, 6, 2), some(6, 6, 5)
    for network, key in [*networks_of(model)[0], *networks_of(model)[1]]:
        one, other = (network(tensors(seen))[key][:, :1].detach() for seen in (few, many))
        assert (one - other).abs().max() > 1e-3
    hidden = some(6, 4, 2)
    hidden["order_candidates"][:, 4:] = 100.0  # what does not exist has no influence
    for network, key in networks_of(model)[1]:
        torch.testing.assert_close(network(tensors(hidden))[key], network(tensors(some(6, 4, 2)))[key])


def test_nothing_to_choose_among_more_candidates_is_named():
    seen = some(9)
    seen["order_mask"][2] = 0.0
    with pytest.raises(EnvironmentContractError, match="no valid action"):
        composed(5).policy.compute_actions(seen, ACTOR)


def test_random_decisions_follow_the_mask_of_what_is_allowed():
    policy = RandomPolicy(spaces_of(6)[0])
    policy.seed(0)
    seen = {key: value[0] for key, value in some(6, 5, 2).items()}
    assert {int(policy.compute_action(seen, actor_id=ACTOR)["order"]) for _ in range(50)} == {0, 1}


def test_only_the_number_of_candidates_may_differ_from_training():
    class Env:
        def __init__(self, n, n_features=3):
            self.action_spaces_dict, self.observation_spaces_dict = spaces_of(n, n_features)

    trained = SpacesConfig(*spaces_of(5), {0: 1})
    assert candidates_of(*spaces_of(5)) == {"order": "order_candidates"}
    assert trained.differences(Env(50)) == []
    with pytest.raises(CheckpointError, match="observation 'order_candidates' of sub-step 0"):
        trained.require_same(Env(50, n_features=4), "here")
    without = Env(50)
    without.observation_spaces_dict = {0: spaces.Dict(order_mask=spaces.Box(0.0, 1.0, (50,)))}
    assert len(trained.differences(without)) == 3


def test_a_candidate_head_requires_one_candidate_for_each_action():
    actions, observations = spaces_of(5)
    assert candidates_of({0: spaces.Dict(order=spaces.Discrete(6))}, observations) == {}
    assert candidates_of({0: spaces.Dict(item=spaces.Discrete(5))}, observations) == {}
    assert candidates_of({1: actions[0]}, observations) == {}


@settings(max_examples=40, deadline=None)
@given(data=st.data(), attention=st.booleans(), leading=st.sampled_from([(), (2,)]))
def test_large_batches_are_computed_without_padding_rows(data, attention, leading):
    """Outputs and gradients are those of all rows, wherever those that exist lie, whatever stands in the others."""
    n, batch = 12, 6
    model = composed(n, attention=attention)
    density = data.draw(st.sampled_from([0.0, 0.1, 0.4, 1.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    observation = {
        key: rng.uniform(-1, 1, (*leading, batch, *space.shape)).astype(np.float32)
        for key, space in spaces_of(n)[1][0].spaces.items()
    }
    exists = rng.random((*leading, batch, n)) < density
    exists[..., rng.integers(n)] = True
    observation["order_candidates_mask"] = exists.astype(np.float32)
    allowed = rng.random((*leading, batch, n)) < 0.5 * density
    allowed[..., rng.integers(n)] = True  # one that may be chosen, whether it exists or not
    observation["order_mask"] = allowed.astype(np.float32)
    for network, key in [*networks_of(model)[0], *networks_of(model)[1]]:
        found = []
        for many in (10**9, 1):
            network.zero_grad()
            with mock.patch.object(set_blocks, "MANY_ROWS", many):
                output = network(tensors(observation))[key]
            (output[output > -1e30] * 2.0).sum().backward()
            gradients = [p.grad.clone() for p in network.parameters() if p.grad is not None]
            found.append((output.detach(), *gradients))
        with mock.patch.object(set_blocks, "MANY_ROWS", 1):
            acting = in_numpy(network)(observation)[key]
        np.testing.assert_allclose(acting, found[0][0], rtol=1e-4, atol=1e-5)
        assert len(found[0]) == len(found[1])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_padding_rows_are_not_computed(monkeypatch):
    monkeypatch.setattr(set_blocks, "MANY_ROWS", 1)
    model = composed(50)
    seen = []
    for network, _ in [*networks_of(model)[0], *networks_of(model)[1]]:
        (attention,) = (block for block in network.modules() if isinstance(block, SetAttentionBlock))
        attention.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]["order_candidates"].shape))
        network(tensors(some(50, 9, 3)))
        network(tensors(some(50)))
    assert seen == [(4, 9, 3), (4, 50, 3)] * 2
