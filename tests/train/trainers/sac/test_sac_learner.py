"""One update of SAC: targets of flat and structured environments, and what an update may touch."""

import itertools
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_action_critic import TorchStepStateActionCritic
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, NonFiniteError
from maze.distributions.distribution_mapper import DistributionMapper
from maze.distributions.gaussian import DiagonalGaussianProbabilityDistribution
from maze.distributions.squashed_gaussian import SquashedGaussianProbabilityDistribution
from maze.train.trainers.common.replay_buffer.transitions import TransitionBatch
from maze.train.trainers.sac import sac_trainer
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
from maze.train.utils.train_utils import load_states, states_of
from tests.train.parallelization.toy_envs import PassOn, RandomWalkCoreEnv, random_walk_env, two_step_env
from tests.train.trainers.sac.sac_models import build_model, learner_of

CHOOSE, CUT = ActorID("choose", 0), ActorID("cut", 0)


def learner_with_constant_values(critic, values, gamma=0.9):
    """Critics and targets that always answer the same; no entropy."""
    model = build_model(two_step_env(), critic)
    for key, value in values.items():
        for pair in (model.critic.networks[key], model.critic.target_networks[key]):
            for network in pair:
                for name, parameter in network.named_parameters():
                    parameter.data.fill_(value if name == "heads.0.bias" else 0.0)
    config = SACAlgorithmConfig(entropy_tuning=False, entropy_coef=0.0, gamma=gamma)
    return learner_of(model, config, [CHOOSE, CUT], seed=0)


def one_step(rewards, terminated=False, n_substeps=None, has_next_step=True):
    return TransitionBatch(
        actors=[CHOOSE, CUT],
        observations=[{"time": torch.zeros(1, 1)}, {"choice": torch.zeros(1, 2)}],
        actions=[{"item": torch.zeros(1, dtype=torch.int64)}, {"where": torch.full((1, 2), 0.5)}],
        rewards=torch.tensor([rewards]),
        next_observations=[{"time": torch.ones(1, 1)}, {"choice": torch.ones(1, 2)}],
        terminated=torch.tensor([terminated]),
        n_substeps=None if n_substeps is None else torch.tensor([n_substeps]),
        has_next_step=torch.tensor([has_next_step]),
    )


def terms_of(report):
    """Event, group and value of all that an update has to report."""
    of_losses = [term for losses, _ in report for term in losses.terms]
    return of_losses + [(*name, norm) for _, norms in report for name, norm in norms.items()]


def critic_losses(learner, batch):
    learner.critic_learns_alone = True
    terms = terms_of(learner.learn(batch))
    return {key: value.item() for event, key, value in terms if event == "critic_value_loss"}


def test_sub_steps_of_a_step_are_not_discounted_and_steps_are():
    learner = learner_with_constant_values("", {"choose": 5.0, "cut": 7.0})
    losses = critic_losses(learner, one_step([1.0, 2.0]))
    assert losses["choose"] == pytest.approx((1.0 + 7.0 - 5.0) ** 2, rel=1e-5)
    assert losses["cut"] == pytest.approx((2.0 + 0.9 * 5.0 - 7.0) ** 2, rel=1e-5)


def test_a_termination_ends_the_last_sub_step_only():
    learner = learner_with_constant_values("", {"choose": 5.0, "cut": 7.0})
    losses = critic_losses(learner, one_step([1.0, 2.0], terminated=True))
    assert losses["choose"] == pytest.approx((1.0 + 7.0 - 5.0) ** 2), "the second sub-step still followed"
    assert losses["cut"] == pytest.approx((2.0 - 7.0) ** 2)


@pytest.mark.parametrize(("terminated", "follows"), [(True, 0.0), (False, 7.0)])
def test_an_episode_that_ends_in_mid_step_has_no_second_sub_step(terminated, follows):
    learner = learner_with_constant_values("", {"choose": 5.0, "cut": 7.0})
    losses = critic_losses(learner, one_step([1.0, 0.0], terminated=terminated, n_substeps=1, has_next_step=False))
    assert losses["choose"] == pytest.approx((1.0 + follows - 5.0) ** 2)
    assert "cut" not in losses, "no action was taken there"
    assert not any(p.grad.any() for p in learner.critic.networks["cut"].parameters())


def test_a_shared_critic_values_the_step_as_a_whole():
    learner = learner_with_constant_values("Shared", {0: 5.0})
    assert critic_losses(learner, one_step([1.0, 2.0]))[0] == pytest.approx((3.0 + 0.9 * 5.0 - 5.0) ** 2)
    learner = learner_with_constant_values("Shared", {0: 5.0})
    ended = one_step([1.0, 2.0], terminated=True, has_next_step=False)
    assert critic_losses(learner, ended)[0] == pytest.approx((3.0 - 5.0) ** 2)


def test_a_shared_critic_learns_nothing_from_a_step_whose_next_observations_are_unknown():
    learner = learner_with_constant_values("Shared", {0: 5.0})
    assert critic_losses(learner, one_step([1.0, 2.0], has_next_step=False)) == {}
    assert not any(p.grad.any() for p in learner.critic.parameters())


def flat_learner(**config):
    env = random_walk_env()
    return learner_of(build_model(env), SACAlgorithmConfig(**config), [ActorID(0, 0)], seed=0)


def flat_batch(n=8, reward=1.0):
    generator = torch.Generator().manual_seed(0)
    observation = torch.randn(n, 3, generator=generator)
    return TransitionBatch(
        actors=[ActorID(0, 0)],
        observations=[{"position": observation}],
        actions=[{"push": torch.rand(n, 3, generator=generator)}],
        rewards=torch.full((n, 1), reward),
        next_observations=[{"position": observation + 1}],
        terminated=torch.zeros(n, dtype=torch.bool),
        n_substeps=None,
        has_next_step=None,
    )


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def moved(before, after):
    return [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]


def test_while_the_critic_learns_alone_policy_and_entropy_coefficient_stay():
    learner = flat_learner()
    policy, critic = copies(learner.model.policy.parameters()), copies(learner.critic.parameters())
    alpha = learner.alphas()[0].clone()
    learner.critic_learns_alone = True
    learner.learn(flat_batch())
    learner.critic_learns_alone = False
    assert not any(moved(policy, learner.model.policy.parameters()))
    assert learner.alphas()[0] == alpha
    assert all(moved(critic, learner.critic.parameters()))
    learner.learn(flat_batch())
    assert all(moved(policy, learner.model.policy.parameters()))
    assert learner.alphas()[0] != alpha


def test_the_policy_step_leaves_the_critics_gradients_alone():
    learner = flat_learner(lr=1e-12)
    learner.critic_learns_alone = True
    learner.learn(flat_batch())
    alone = copies([p.grad for p in learner.critic.parameters()])
    fresh = flat_learner(lr=1e-12)
    fresh.learn(flat_batch())
    assert not any(moved(alone, [p.grad for p in fresh.critic.parameters()]))


def test_target_networks_follow_every_so_many_batches():
    learner = flat_learner(target_update_interval=2, tau=1.0)
    targets = [p for pair in learner.critic.target_networks.values() for p in pair.parameters()]
    before = copies(targets)
    learner.learn(flat_batch())
    assert not any(moved(before, targets))
    learner.learn(flat_batch())
    assert not any(moved(copies(learner.critic.parameters()), targets))


def test_a_fixed_entropy_coefficient_stays():
    learner = flat_learner(entropy_tuning=False, entropy_coef=0.3)
    terms = terms_of(learner.learn(flat_batch()))
    assert learner.alphas()[0].item() == pytest.approx(0.3)
    assert "entropy_loss" not in [event for event, _, _ in terms]


def test_a_loss_that_is_not_finite_stops_before_anything_moves():
    learner = flat_learner()
    before = copies(learner.model.parameters())
    with pytest.raises(NonFiniteError, match="critic_value_loss of critic 0 is inf"):
        learner.learn(flat_batch(reward=math.inf))
    assert not any(moved(before, learner.model.parameters()))


def test_distributions_without_gradients_through_actions_are_refused_by_head():
    beta = [{"action_space": "gym.spaces.Box", "distribution": "maze.distributions.beta.BetaProbabilityDistribution"}]
    model = build_model(random_walk_env(), distributions=beta)
    with pytest.raises(ConfigError, match=r"Action head `push`.*SquashedGaussian"):
        learner_of(model, SACAlgorithmConfig(), [ActorID(0, 0)], seed=0)


def structured_learner(critic="", **config):
    return learner_of(build_model(two_step_env(), critic), SACAlgorithmConfig(**config), [CHOOSE, CUT], seed=0)


def structured_batch(n=8):
    generator = torch.Generator().manual_seed(0)
    return TransitionBatch(
        actors=[CHOOSE, CUT],
        observations=[
            {"time": torch.rand(n, 1, generator=generator)},
            {"choice": torch.rand(n, 2, generator=generator)},
        ],
        actions=[{"item": torch.arange(n) % 2}, {"where": torch.rand(n, 2, generator=generator)}],
        rewards=torch.rand(n, 2, generator=generator),
        next_observations=[
            {"time": torch.rand(n, 1, generator=generator)},
            {"choice": torch.rand(n, 2, generator=generator)},
        ],
        terminated=torch.arange(n) == 3,
        n_substeps=torch.where(torch.arange(n) == 5, 1, 2),
        has_next_step=torch.arange(n) != 3,
    )


def nobody_cut(n=8):
    """All episodes ended with the first sub-step."""
    batch = structured_batch(n)
    batch.terminated = torch.ones(n, dtype=torch.bool)
    batch.n_substeps = torch.ones(n, dtype=torch.int64)
    batch.has_next_step = torch.zeros(n, dtype=torch.bool)
    return batch


@pytest.mark.parametrize("critic", ["", "Shared"])
def test_a_sub_step_that_no_row_of_a_batch_has_reports_nothing_and_learns_nothing(critic):
    learner = structured_learner(critic)
    before = copies(learner.model.policy.networks["cut"].parameters())
    terms = terms_of(learner.learn(nobody_cut()))
    reported = {event for event, key, _ in terms if key == "cut"}
    assert reported <= {"policy_grad_norm", "critic_grad_norm", "entropy_coef", "entropy_loss"}
    assert {"policy_loss", "policy_entropy", "policy_mean_logp"} <= {
        event for event, key, _ in terms if key == "choose"
    }
    assert not any(moved(before, learner.model.policy.networks["cut"].parameters()))


def test_critic_statistics_leave_out_rows_without_loss():
    learner = structured_learner()
    batch = structured_batch()
    padded = batch.n_substeps == 1
    reported = []
    for size in (1.0, 1000.0):
        batch.observations[1]["choice"][padded] = size
        batch.actions[1]["where"][padded] = size
        fresh = structured_learner()
        fresh.critic_learns_alone = True
        terms = terms_of(fresh.learn(batch))
        reported.append({event: value.item() for event, key, value in terms if key == "cut"})
    assert reported[0] == pytest.approx(reported[1], rel=1e-5)
    own = torch.cat([batch.observations[1]["choice"], batch.actions[1]["where"]], -1)[~padded]
    inputs = {"choice": own[:, :2], "where": own[:, 2:]}
    values = torch.minimum(*(network(inputs)["q_value"] for network in learner.critic.networks["cut"]))
    assert reported[0]["critic_value"] == pytest.approx(values.mean().item(), rel=1e-4)


def parts_of(learner):
    return {**learner.optimizers, "entropy_coefs": learner.log_alphas, "generator": learner.generator}


@pytest.mark.parametrize("entropy_tuning", [True, False])
@pytest.mark.parametrize("frozen", ["policy", "critic"])
def test_a_frozen_half_stays_while_the_other_one_learns(frozen, entropy_tuning):
    model = build_model(random_walk_env())
    halves = {"policy": model.policy, "critic": model.critic}
    for parameter in halves[frozen].parameters():
        parameter.requires_grad_(False)
    learner = learner_of(model, SACAlgorithmConfig(entropy_tuning=entropy_tuning), [ActorID(0, 0)], seed=0)
    before = {name: copies(half.parameters()) for name, half in halves.items()}
    alpha = learner.alphas()[0].clone()
    learner.learn(flat_batch())
    for name, half in halves.items():
        assert set(moved(before[name], half.parameters())) == {name != frozen}
    assert (learner.alphas()[0] != alpha) == entropy_tuning
    restored = learner_of(model, SACAlgorithmConfig(entropy_tuning=entropy_tuning), [ActorID(0, 0)], seed=1)
    load_states(parts_of(restored), states_of(parts_of(learner)))
    assert restored.alphas() == learner.alphas()


def test_the_time_of_policy_losses_counts_as_time_of_losses(monkeypatch):
    learner, batch = flat_learner(), flat_batch()
    learner.learn(batch)
    learner.seconds_of_learning = dict.fromkeys(learner.seconds_of_learning, 0.0)
    now = itertools.count()
    monkeypatch.setattr(sac_trainer.time, "perf_counter", lambda: float(next(now)))
    learner.learn(batch)
    # the clock goes on by one between two looks: critic's losses, its step, policy's losses, its step, targets
    assert learner.seconds_of_learning == {"time_loss_computation": 2.0, "time_backprob": 3.0}


class FromNextMask(torch.nn.Module):
    """Logits and values by the mask that is observed: what is not allowed has the least logit, and an absurd value."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        allowed = x["mask"] > 0
        logits = torch.where(allowed, 0.0 * self.weight, torch.finfo(torch.float32).min)
        return {"move": logits, "move_q_values": torch.where(allowed, 2.0 + 0.0 * self.weight, 1e6)}


def test_the_target_counts_what_is_allowed_next_and_not_what_is_allowed_now():
    action_spaces = {0: spaces.Dict({"move": spaces.Discrete(3)})}
    mapper = DistributionMapper(action_spaces[0], [])
    policy = TorchPolicy({0: FromNextMask()}, mapper, "cpu")
    critic = TorchStepStateActionCritic({0: FromNextMask()}, 1, "cpu", {0: True}, action_spaces)
    config = SACAlgorithmConfig(entropy_tuning=False, entropy_coef=0.5, gamma=0.9)
    learner = learner_of(TorchActorCritic(policy, critic, "cpu"), config, [ActorID(0, 0)], seed=0)
    now, later = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    batch = TransitionBatch(
        actors=[ActorID(0, 0)],
        observations=[{"mask": now}],
        actions=[{"move": torch.tensor([0, 2])}],
        rewards=torch.tensor([[1.0], [1.0]]),
        next_observations=[{"mask": later}],
        terminated=torch.tensor([False, False]),
        n_substeps=None,
        has_next_step=None,
    )
    (found,) = learner.critic_targets(batch, [learner.draw(0, batch.observations[0])])
    torch.testing.assert_close(found.target, torch.tensor([1 + 0.9 * (2 + 0.5 * math.log(2)), 1 + 0.9 * 2]))
    terms = {event: value.item() for event, _, value in terms_of(learner.learn(batch))}
    assert terms["critic_value"] == pytest.approx(2.0)
    assert terms["policy_loss"] == pytest.approx(-2.0), "one action is allowed in each row: no entropy"


def test_bounded_actions_are_squashed_by_default_and_unbounded_ones_are_not():
    heads = spaces.Dict(
        {"push": spaces.Box(-1, 1, (3,)), "free": spaces.Box(-np.inf, 1, (1,)), "gear": spaces.Discrete(2)}
    )
    mapper = DistributionMapper(heads, SACAlgorithmConfig.distributions)
    classes = {head: mapper.distribution_class(head) for head in heads}
    assert classes["push"] is SquashedGaussianProbabilityDistribution
    assert classes["free"] is DiagonalGaussianProbabilityDistribution


class MildGaussian(DiagonalGaussianProbabilityDistribution):
    """A Gaussian of a user's own, with no more bounds than any other."""


def test_actions_of_any_unbounded_distribution_reach_the_critic_within_their_bounds():
    mapping = [{"action_space": "gym.spaces.Box", "distribution": MildGaussian}]
    model = build_model(random_walk_env(), distributions=mapping)
    learner = learner_of(model, SACAlgorithmConfig(), [ActorID(0, 0)], seed=0)
    draw = learner.draw(0, {"position": torch.zeros(200, 3)})
    assert draw.actions["push"].abs().max() == 1.0
    assert draw.log_probs["push"].unique().numel() > 100, "those of what was drawn"


class NormalizingCritic(torch.nn.Module):
    """Takes batches with one dimension, as convolutions and normalization do."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)
        self.layer = torch.nn.Linear(6, 1)

    def forward(self, x):
        return {"q_value": self.layer(self.norm(torch.cat([x["position"], x["push"], x["gear"]], -1)))}


def test_critics_that_take_one_batch_dimension_judge_choices_beside_continuous_actions():
    heads = spaces.Dict({"push": spaces.Box(-1, 1, (1,), np.float32), "gear": spaces.Discrete(2)})
    env = random_walk_env()
    model = build_model(MazeEnv(RandomWalkCoreEnv(), {0: PassOn(heads)}, env.observation_conversion_dict))
    critic = TorchStepStateActionCritic({0: NormalizingCritic()}, 1, "cpu", {0: False}, {0: heads})
    learner = learner_of(TorchActorCritic(model.policy, critic, "cpu"), SACAlgorithmConfig(), [ActorID(0, 0)], seed=0)
    batch = flat_batch()
    batch.actions = [{"push": torch.rand(8, 1), "gear": torch.arange(8) % 2}]
    before = copies(model.policy.parameters())
    learner.learn(batch)
    assert all(moved(before, model.policy.parameters()))
