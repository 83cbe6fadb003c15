"""Staying close to the initial policy: hand-worked divergences, masks, sub-steps, decay, checkpoints."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from maze.core.agent.torch_policy import InitialPolicy, TorchPolicy
from maze.core.env.structured_env import ActorID
from maze.core.utils.checkpoint import load_state
from maze.distributions.distribution_mapper import DistributionMapper
from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.ppo.ppo_trainer import PPO
from tests.train.parallelization.toy_envs import coming_and_going_env, counting_env, hierarchical_env, two_step_env
from tests.train.trainers.common.test_actor_critic_trainer import make_model, make_trainer, same, weights
from tests.train.trainers.common.test_structured_training import train
from tests.train.trainers.sac.sac_models import build_trainer as build_sac

ACTOR = ActorID(0, 0)
MASKED = torch.finfo(torch.float32).min
OBSERVATION = {"observation": torch.zeros(2, 1)}
BETA = "maze.distributions.beta.BetaProbabilityDistribution"
SQUASHED = "maze.distributions.squashed_gaussian.SquashedGaussianProbabilityDistribution"


class Constant(nn.Module):
    """Gives the same logits for whatever it sees."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.ParameterDict({head: nn.Parameter(torch.tensor(value)) for head, value in logits.items()})

    def forward(self, x):
        n_rows = len(x["observation"])
        return {head: value.expand(n_rows, *value.shape) for head, value in self.logits.items()}


def policy_of(heads, logits, box=BETA):
    mapper = [{"action_space": "gymnasium.spaces.Box", "distribution": box}]
    return TorchPolicy({0: Constant(logits)}, DistributionMapper(spaces.Dict(heads), mapper), "cpu")


def divergence(heads, current, initial, box=BETA):
    reference = InitialPolicy(policy_of(heads, initial, box))
    policy = policy_of(heads, current, box)
    output = policy.compute_substep_policy_output(OBSERVATION, ACTOR)
    return reference.divergence(output.prob_dist, OBSERVATION, ACTOR), policy, reference


def test_divergence_of_discrete_actions_is_the_relative_entropy_with_gradient_for_the_current_policy_only():
    logits = [math.log(3.0), 0.0]  # probabilities 3/4, 1/4
    kl, policy, reference = divergence({"a": spaces.Discrete(2)}, {"a": logits}, {"a": [0.0, 0.0]})
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl.tolist() == pytest.approx([expected, expected])
    kl.mean().backward()
    assert policy.parameters()[0].grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in reference.policy.parameters())


def test_masked_actions_do_not_enter_the_divergence():
    heads = {"a": spaces.Discrete(3)}
    kl, policy, _ = divergence(heads, {"a": [math.log(3.0), 0.0, MASKED]}, {"a": [0.0, 0.0, MASKED]})
    assert kl[0].item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    kl.mean().backward()
    assert torch.isfinite(policy.parameters()[0].grad).all()


def test_heads_and_components_add_up():
    heads = {"a": spaces.Discrete(2), "b": spaces.MultiDiscrete([2, 2]), "c": spaces.MultiBinary(2)}
    logits = [math.log(3.0), 0.0]
    one = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    current = {"a": logits, "b": logits * 2, "c": [math.log(3.0), 0.0]}
    kl, _, _ = divergence(heads, current, {"a": [0.0] * 2, "b": [0.0] * 4, "c": [0.0] * 2})
    assert kl[0].item() == pytest.approx((1 + 2 + 1) * one, rel=1e-5)


@pytest.mark.parametrize("box", [BETA, SQUASHED, "maze.distributions.gaussian.DiagonalGaussianProbabilityDistribution"])
@given(values=st.lists(st.floats(-2, 2, width=32), min_size=8, max_size=8))
def test_continuous_actions_diverge_by_nothing_from_themselves_and_never_by_less(box, values):
    heads = {"a": spaces.Box(-1, 1, (2,), np.float32)}
    assert divergence(heads, {"a": values[:4]}, {"a": values[:4]}, box)[0].abs().max() < 1e-5
    kl = divergence(heads, {"a": values[:4]}, {"a": values[4:]}, box)[0]
    assert torch.isfinite(kl).all()
    assert kl.min() > -1e-5


def test_a_gaussian_diverges_by_its_squared_distance_in_standard_deviations():
    heads = {"a": spaces.Box(-10, 10, (1,), np.float32)}
    box = "maze.distributions.gaussian.DiagonalGaussianProbabilityDistribution"
    kl, _, _ = divergence(heads, {"a": [3.0, 0.0]}, {"a": [1.0, 0.0]}, box)
    assert kl[0].item() == pytest.approx((3 - 1) ** 2 / 2)  # both of standard deviation 1


def test_the_weight_decays_with_each_epoch_in_which_the_policy_learned():
    trainer = make_trainer(PPO, kl_to_initial_coef=0.4, kl_to_initial_decay=0.5, critic_burn_in_epochs=2)
    found = []
    for trainer.epoch in range(5):
        found.append(trainer._kl_to_initial_coef)
    assert found == [0.4, 0.4, 0.4, 0.2, 0.1]


def divergence_after_training(trainer_class, **config):
    trainer = make_trainer(trainer_class, n_epochs=4, lr=0.01, **config)
    reference = InitialPolicy(trainer.model.policy)
    trainer.train()
    observation = {"observation": torch.linspace(-1, 1, 40).reshape(10, 4)}
    output = trainer.model.policy.compute_substep_policy_output(observation, ACTOR)
    return reference.divergence(output.prob_dist, observation, ACTOR).mean().item()


@pytest.mark.parametrize("trainer_class", [A2C, PPO])
def test_a_penalised_policy_stays_closer_to_where_it_started(trainer_class):
    free = divergence_after_training(trainer_class)
    assert 0.0 <= divergence_after_training(trainer_class, kl_to_initial_coef=100.0) < 0.2 * free


def test_without_a_weight_nothing_is_kept_or_computed():
    trainer = make_trainer(PPO)
    trainer.train()
    assert trainer._initial_policy is None
    assert trainer.training_state()["initial_policy"] is None


def test_a_weight_close_to_zero_changes_reported_statistics_only():
    results = []
    for coef in (0.0, 1e-30):
        trainer = make_trainer(PPO, kl_to_initial_coef=coef)
        trainer.train()
        results.append(weights(trainer.model))
    assert same(*results)


def test_a_resumed_run_stays_close_to_the_same_policy(tmp_path):
    trainer = make_trainer(PPO, kl_to_initial_coef=0.1, checkpoint_file=tmp_path / "latest.pt")
    initial = weights(trainer.model.policy)
    trainer.train()
    assert not same(weights(trainer.model.policy), initial)
    assert load_state(tmp_path / "latest.pt")["initial_policy"] is not None
    resumed = make_trainer(PPO, kl_to_initial_coef=0.1, model=make_model(seed=3))
    resumed.load_state(tmp_path / "latest.pt")
    resumed.train()
    assert same(weights(resumed._initial_policy.policy), initial)


def test_loaded_weights_become_the_initial_policy():
    trainer = make_trainer(PPO, kl_to_initial_coef=0.1)
    trainer.train()
    other = make_model(seed=3).policy
    trainer.load_state_dict(other.state_dict())
    trainer.train()
    assert same(weights(trainer._initial_policy.policy), weights(other))


def moved(policy, reference, env):
    """Divergence of each sub-step's policy from where it started."""
    found = []
    for key, space in env.observation_spaces_dict.items():
        space.seed(0)
        samples = [space.sample() for _ in range(20)]
        observation = {
            name: torch.as_tensor(np.nan_to_num(np.stack([sample[name] for sample in samples]))) for name in space
        }
        actor = ActorID(key, 0)
        output = policy.compute_substep_policy_output(observation, actor)
        found.append(reference.divergence(output.prob_dist, observation, actor).mean().item())
    return found


@pytest.mark.parametrize("make_env", [two_step_env, hierarchical_env, coming_and_going_env])
def test_every_substep_of_a_structured_environment_is_held(make_env):
    free, _ = train(make_env, "Step", PPO, n_epochs=2)
    held, _ = train(make_env, "Step", PPO, n_epochs=2, kl_to_initial_coef=30.0)
    distances = [moved(trainer.model.policy, held._initial_policy, make_env()) for trainer in (held, free)]
    assert all(near < 0.5 * far for near, far in zip(*distances, strict=True)), distances


@pytest.mark.parametrize("make_env", [counting_env, two_step_env, partial(two_step_env, breaks_at=1)])
def test_sac_stays_closer_to_where_it_started(make_env):
    distances = []
    for coef in (100.0, 0.0):
        trainer = build_sac(make_env, n_epochs=8, kl_to_initial_coef=coef, entropy_coef=1.0, lr=0.003)
        reference = InitialPolicy(trainer.model.policy)
        trainer.train()
        distances.append(moved(trainer.model.policy, reference, make_env()))
    assert all(near < 0.5 * far for near, far in zip(*distances, strict=True)), distances


def test_sac_keeps_the_initial_policy_in_its_checkpoints(tmp_path):
    file = tmp_path / "latest.pt"
    trainer = build_sac(counting_env, kl_to_initial_coef=1.0, trainer_args={"checkpoint_file": file})
    initial = weights(trainer.model.policy)
    trainer.train()
    resumed = build_sac(counting_env, seed=5, kl_to_initial_coef=1.0)
    resumed.load_state(file)
    assert same(weights(resumed._initial_policy.policy), initial)
    assert not same(weights(resumed.model.policy), initial)
