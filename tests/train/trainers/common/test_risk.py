"""Risk in training: losses and returns by hand, and policies that avoid rare large losses."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from maze.api.run_context import RunContext
from maze.core.agent.returns import Trajectories
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import StatsContext
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.stats_utils import tail_values
from maze.train.parallelization.vector_env.batched_vector_env import BatchedVectorEnv
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.common.actor_critic.risk import TailReturns, running_returns
from maze.train.trainers.common.config_classes import Risk
from maze.train.trainers.common.learning import quantile_huber_loss, widen
from maze.train.trainers.dqn.dqn_algorithm_config import DQNAlgorithmConfig
from maze.train.trainers.dqn.dqn_trainer import ActionQuantileNetwork, factors_of, is_allowed
from maze.train.trainers.impala.impala_algorithm_config import ImpalaAlgorithmConfig
from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig
from maze.train.trainers.ppo.ppo_trainer import PPO
from maze.train.utils.train_utils import from_plain
from tests.train.parallelization.toy_envs import coming_and_going_env, counting_env, hierarchical_env, two_step_env
from tests.train.trainers.common.recurrent_models import SHARED, recurrent_model
from tests.train.trainers.common.test_structured_training import build_model


class Gamble(BatchedCoreEnv):
    """Bold (1) earns 1, and loses 12 in one of 25 steps; safe (0) earns 0.3."""

    def __init__(self, n_envs, length=4):
        seen = spaces.Dict(seen=spaces.Box(0, 1, (1,), np.float32))
        super().__init__(n_envs, {0: spaces.Dict(bold=spaces.Discrete(2))}, {0: seen}, length)

    def reset_rows(self, rows):
        pass

    def step(self, actions):
        loses = self.random.uniform() < 0.04
        return np.where(actions["bold"] == 1, 1.0 - 12.0 * loses, 0.3), np.zeros(self.n_envs, bool)

    def observe(self, out):
        out["seen"][:, 0] = 1.0
        super().observe(out)


# -- objective ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "risk"),
    [
        ("cvar:0.1", Risk(0.1)),
        ("cvar:1", Risk(1.0)),
        ("0.25*mean + 0.75*cvar:.05", Risk(0.05, 0.25)),
        ("0*mean+1*cvar:0.5", Risk(0.5)),
    ],
)
def test_objectives_are_read(text, risk):
    assert Risk.parse(text) == risk


@pytest.mark.parametrize("text", ["cvar", "cvar:0", "cvar:1.5", "0.5*mean+0.6*cvar:0.1", "0.5*mean", "mean", "", 0.1])
def test_other_objectives_are_refused(text):
    with pytest.raises(ConfigError, match=r"algorithm\.risk: expected `cvar:<level>` or"):
        PPOAlgorithmConfig(risk=text)


def test_weights_of_quantiles():
    assert Risk(0.5).weights(4) == [0.5, 0.5, 0.0, 0.0]
    assert Risk(0.3).weights(5) == pytest.approx([2 / 3, 1 / 3, 0, 0, 0])  # one and a half of five quantiles
    assert Risk(0.25, 0.5).weights(4) == pytest.approx([0.5 + 0.125, 0.125, 0.125, 0.125])
    assert Risk(1.0).weights(2) == [0.5, 0.5]


def test_settings_that_contradict_risk_are_refused_and_the_latest_model_is_kept():
    with pytest.raises(ConfigError, match=r"algorithm\.risk: expected none with IMPALA"):
        ImpalaAlgorithmConfig(risk="cvar:0.1")
    with pytest.raises(ConfigError, match=r"algorithm\.risk: expected `reward_centering=0`"):
        PPOAlgorithmConfig(risk="cvar:0.1", reward_centering=0.1)
    for config in (PPOAlgorithmConfig, DQNAlgorithmConfig):
        assert config(risk="cvar:0.1").rollout_evaluator["keep"] == "latest"
        own = {"n_episodes": 3, "objective": "kpi/waste"}
        assert config(risk="cvar:0.1", rollout_evaluator=own).rollout_evaluator == own


# -- mathematics -------------------------------------------------------------------------------------------------------


def test_quantile_huber_loss_by_hand():
    quantiles, targets = torch.tensor([0.0, 2.0]), torch.tensor([1.0, 4.0])  # levels 0.25 and 0.75
    # errors 1, 4 and -1, 2; Huber losses 0.5, 3.5 and 0.5, 1.5; weights 0.25, 0.25 and 0.25, 0.75
    assert quantile_huber_loss(quantiles, targets).item() == pytest.approx((0.125 + 0.875 + 0.125 + 1.125) / 4)
    # half-width 2: 0.25, 3 and 0.25, 1
    assert quantile_huber_loss(quantiles, targets, 2.0).item() == pytest.approx((0.0625 + 0.75 + 0.0625 + 0.75) / 4)
    assert quantile_huber_loss(quantiles, targets, 0.0).item() == pytest.approx((0.25 + 1.0 + 0.25 + 1.5) / 4)


def test_the_loss_without_a_quadratic_part_is_least_at_the_quantiles():
    samples = torch.arange(1.0, 101.0)
    quantiles = nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.Adam([quantiles], lr=1.0)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 5.0 * (1 - step / 200)
        optimizer.zero_grad()
        quantile_huber_loss(quantiles, samples, 0.0).backward()
        optimizer.step()
    assert quantiles.tolist() == pytest.approx([10.5, 30.5, 50.5, 70.5, 90.5], abs=1.0)


def test_the_tail_and_its_quantile_are_the_cvar():
    returns = torch.tensor([5.0, -10.0, 3.0, 4.0, -2.0, 6.0, 7.0, 8.0, 9.0, 1.0])
    for quantile in (-2.0, 0.0, 1.0):  # any quantile of level 0.2
        assert quantile + tail_values(returns, quantile, 0.2).mean() == pytest.approx((-10 - 2) / 2)
    assert 3.0 + tail_values(returns, 3.0, 0.2).mean() < -6.0, "a lower bound"


def test_returns_of_running_episodes_are_carried_on():
    rewards = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    ended = np.array([[0, 1], [1, 0], [0, 0]], bool)
    so_far, returns = running_returns(rewards, ended, np.array([10.0, 20.0]))
    assert so_far.tolist() == [[10.0, 20.0], [11.0, 0.0], [0.0, 4.0], [5.0, 10.0]]
    assert returns.tolist() == [22.0, 14.0]


def trajectories(values, following, rewards, ended):
    ends = torch.tensor(ended)
    return Trajectories(
        [torch.tensor(values)], [torch.tensor(following)], [torch.tensor(rewards)], True, ends, torch.zeros_like(ends)
    )


def test_advantages_of_the_tail_by_hand():
    # one environment, two steps, two quantiles; returns below -1 count, twice
    found = TailReturns(0.5, 0.5, torch.Generator(), quantile=-1.0, so_far=torch.tensor([[0.0], [-1.0], [0.0]]))(
        trajectories([[[-4.0, 2.0]], [[-3.0, 1.0]]], [[[-3.0, 1.0]], [[9.0, 9.0]]], [[-1.0], [-2.0]], [[False], [True]])
    )
    # values: returns -4 and 2 are worth -3 and 0 below the quantile: -3; then -4 and 0: -3; the return is -3: -4
    assert found.advantages[0].flatten().tolist() == [0.0 + 0.5 * -1.0, -1.0]


@pytest.mark.parametrize(("gae_lambda", "first"), [(1.0, [-3.0, -3.0]), (0.0, [-4.0, 0.0])])
def test_samples_of_the_rest_of_the_return_contain_rewards_or_quantiles(gae_lambda, first):
    found = TailReturns(0.5, gae_lambda, torch.Generator(), so_far=torch.tensor([[0.0], [-1.0], [0.0]]))(
        trajectories([[[-4.0, 2.0]], [[-3.0, 1.0]]], [[[-3.0, 1.0]], [[9.0, 9.0]]], [[-1.0], [-2.0]], [[False], [True]])
    )
    assert set(found.targets[0][0].flatten().tolist()) == set(first)
    assert set(found.targets[0][1].flatten().tolist()) == {-2.0}
    assert found.advantages[0][1].item() == pytest.approx(-2.0 - -1.0), "without a quantile those of the mean"


def test_values_are_weighted_means_of_quantiles_and_masked_actions_stay_masked():
    space = spaces.Dict(one=spaces.Discrete(3), several=spaces.MultiDiscrete([2, 4]))

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.torso, self.one, self.several = nn.Linear(2, 8), nn.Linear(8, 3), nn.Linear(8, 6)

        def forward(self, observation):
            features = self.torso(observation["seen"]).relu()
            one = self.one(features).masked_fill(torch.tensor([False, True, False]), torch.finfo(torch.float32).min)
            return {"one": one, "several": self.several(features)}

    class Value(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 1)

        def forward(self, observation):
            return {"value": self.net(observation["seen"])}

    network = ActionQuantileNetwork(Policy(), Value(), factors_of(space), Risk(0.1, 0.3).weights(7))
    seen = {"seen": torch.randn(5, 2)}
    for values, quantiles in zip(network(seen), network.estimates(seen), strict=True):
        allowed = is_allowed(values)
        assert torch.allclose((quantiles @ network.weights)[allowed], values[allowed], rtol=1e-4, atol=1e-5)
    assert (network.estimates(seen)[0][:, 1] < -1e37).all()
    with pytest.raises(ConfigError, match=r"algorithm\.risk: expected a linear layer .* at the end of the network"):
        widen(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), 7, "the network")


# -- learning ----------------------------------------------------------------------------------------------------------


def gamble_trainer(trainer_class, n_updates, **settings):
    env = BatchedVectorEnv(Gamble(64))
    env.seed(list(range(64)))
    common = {"n_epochs": 1, "epoch_length": n_updates, "n_rollout_steps": 12, "lr": 0.01, "gamma": 0.95}
    if trainer_class is PPO:
        common |= {"batch_size": 256, "n_optimization_epochs": 2}
    model = build_model(env, "Step")
    return trainer_class(common | settings, RolloutGenerator(env), None, model, None, seed=1)


def share_of_bold(trainer):
    policy = trainer.model.policy
    seen = {"seen": np.ones((400, 1), np.float32)}
    return policy.compute_actions(seen, trainer.rollout_generator.env.actor_ids()[0])["bold"].mean()


@pytest.mark.parametrize(
    ("trainer_class", "risk", "is_bold"),
    [
        (PPO, None, True),
        (PPO, "cvar:0.1", False),
        (PPO, "0.3*mean+0.7*cvar:0.1", False),
        (A2C, None, True),
        (A2C, "cvar:0.1", False),
    ],
)
def test_rare_large_losses_are_avoided_for_a_lower_mean(trainer_class, risk, is_bold):
    trainer = gamble_trainer(trainer_class, 25 if trainer_class is PPO else 60, risk=risk, n_quantiles=20)
    trainer.train()
    assert share_of_bold(trainer) > 0.8 if is_bold else share_of_bold(trainer) < 0.2


@pytest.mark.parametrize("make_env", [two_step_env, hierarchical_env, coming_and_going_env])
@pytest.mark.parametrize("critic", ["Step", "Shared"])
def test_sub_steps_and_varying_actors_learn_quantiles(make_env, critic):
    env = SequentialVectorEnv([make_env] * 3)
    env.seed([0, 1, 2])
    settings = {"n_epochs": 1, "epoch_length": 4, "n_rollout_steps": 12, "batch_size": 16, "n_optimization_epochs": 2}
    settings |= {"risk": "cvar:0.5", "constraints": ["reward <= 0.5"], "reward_scaling": True, "gae_lambda": 0.9}
    trainer = PPO(settings, RolloutGenerator(env), None, build_model(env, critic), None, seed=0)
    if critic == "Step" and make_env is coming_and_going_env:
        with pytest.raises(ConfigError, match=r"algorithm\.risk: expected a shared critic"):
            trainer.train()
        return
    before = [parameter.clone() for parameter in trainer._risk.critic.parameters()]
    trainer.train()
    assert np.isfinite(trainer._risk.quantile)
    assert all(not torch.equal(one, two) for one, two in zip(before, trainer._risk.critic.parameters(), strict=True))


def test_returns_of_episodes_that_a_resumed_run_does_not_continue_are_dropped():
    def trained(state):
        env = SequentialVectorEnv([partial(counting_env, ((5, "terminated"),))] * 2)  # without seeds
        settings = {"n_epochs": 2, "n_rollout_steps": 3, "epoch_length": 2, "risk": "cvar:0.5", "reward_scaling": True}
        settings["constraints"] = ["reward <= 0"]
        trainer = A2C(settings, RolloutGenerator(env), None, build_model(env, "Shared"), None, seed=0)
        if state is not None:
            trainer.load_training_state(state)
        trainer.train(n_epochs=1)
        return trainer.training_state()

    parts = trained({**trained(None), "is_finished": True})["parts"]
    assert set(from_plain(parts["risk"]["_episodes"]).tolist()) == {15.0}
    assert parts["constraints: reward <= 0"]["value"] == 15.0


@pytest.mark.parametrize("critic", [None, SHARED])
def test_a_quantile_critic_has_hidden_states_of_its_own(critic):
    env = SequentialVectorEnv([two_step_env] * 3)
    env.seed([0, 1, 2])
    model = recurrent_model(env, critic)
    settings = {"n_epochs": 1, "n_rollout_steps": 8, "batch_size": 8, "sequence_length": 3, "n_quantiles": 5}
    settings |= {"constraints": ["reward <= 0"], "risk": "cvar:0.5"}
    trainer = PPO(settings, RolloutGenerator(env), None, model, None, seed=0)
    batch = trainer._valued(trainer._collect())
    for part in batch.shuffled(8, trainer.generator):
        for minibatch in part.parts:
            outputs, _ = minibatch.evaluate(model)
            for position, (one, costs) in enumerate(zip(trainer._further, minibatch.costs, strict=True)):
                for value, old in zip(one.predicted(minibatch, position, outputs), costs.old_values, strict=True):
                    assert value.shape == old.shape
                    assert torch.allclose(value, old, atol=1e-6), "unrolled from the stored states"


def test_rollouts_that_leave_environments_out_are_refused():
    class FirstTwo(SequentialVectorEnv):
        n_rollout_envs = 2

    env = FirstTwo([two_step_env] * 3)
    with pytest.raises(ConfigError, match=r"found rollouts of 2 of 3\. Use runner\.placement\.wait_for=1"):
        PPO({"risk": "cvar:0.5"}, RolloutGenerator(env), None, build_model(env, "Step"), None, seed=0)


def gamble_env():
    return BatchedMazeEnv(partial(Gamble, length=1))


@pytest.mark.parametrize(("risk", "lowest", "highest"), [("cvar:1", 0.2, 0.9), ("cvar:0.1", -4.6, -0.7)])
def test_dqn_values_actions_by_the_tail_of_their_returns(risk, lowest, highest, tmp_path):
    settings = {"n_epochs": 1, "epoch_length": 300, "lr": 0.02, "batch_size": 128, "initial_buffer_size": 2000}
    settings |= {"gamma": 0.0, "n_quantiles": 25}
    algorithm = DQNAlgorithmConfig(risk=risk, rollout_evaluator=None, dueling=False, final_epsilon=1.0, **settings)
    with StatsContext():
        seeds = {"seeding.env_base_seed": 1, "seeding.agent_base_seed": 1}
        context = RunContext(gamble_env, str(tmp_path / "run"), algorithm=algorithm, overrides=seeds, silent=True)
        context.train()
    (safe, bold) = context.policy.networks[0]({"seen": torch.ones(1, 1)})["bold"][0].tolist()
    assert safe == pytest.approx(0.3, abs=0.1)
    assert lowest < bold < highest, "0.52 is the mean; -3.8 is the CVaR; last values vary"


def test_worker_processes_give_the_same_weights():
    weights = []
    for make in (SequentialVectorEnv, partial(SubprocVectorEnv, n_workers=2)):
        env = make([two_step_env] * 3)
        try:
            env.seed([0, 1, 2])
            settings = {"n_epochs": 1, "epoch_length": 3, "n_rollout_steps": 12, "risk": "0.5*mean+0.5*cvar:0.5"}
            torch.manual_seed(0)
            trainer = A2C(settings, RolloutGenerator(env), None, build_model(env, "Shared"), None, seed=0)
            trainer.train()
            weights.append([*trainer.model.parameters(), *trainer._risk.critic.parameters()])
        finally:
            env.close()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
