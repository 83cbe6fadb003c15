"""Constraints in training: multipliers, costs of rollouts, and policies that keep them."""

import logging
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze.core.agent.returns import GAE
from maze.core.agent.torch_state_critic import TorchStepStateCritic
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.core.errors import ConfigError, NonFiniteError
from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats
from maze.core.log_stats.log_stats import LogStatsKey
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.train.parallelization.distributed_actors.env_groups import in_groups
from maze.train.parallelization.vector_env.batched_vector_env import BatchedVectorEnv
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv, in_sequence
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.common.actor_critic.cost_critics import (
    PID,
    LearnedConstraint,
    combined_advantage,
    pid_step,
    sum_of_ended,
)
from maze.train.trainers.common.actor_critic.valuation import value_rollout
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.model_selection.model_selection_base import (
    Constraint,
    SelectionCriterion,
    statistic_source,
)
from maze.train.trainers.impala.impala_algorithm_config import ImpalaAlgorithmConfig
from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig
from maze.train.trainers.ppo.ppo_trainer import PPO
from tests.train.parallelization.toy_envs import coming_and_going_env, hierarchical_env, two_step_env
from tests.train.parallelization.toy_policies import make_policy
from tests.train.trainers.common.recurrent_models import SHARED, recurrent_model
from tests.train.trainers.common.test_structured_training import build_model
from tests.train.trainers.common.test_valuation_structured import A0, A1, Tick, model_with, rollout_of

REWARD = BaseEnvEvents.reward


class MachineEvents:
    """Events of :class:`Machine`."""

    @define_epoch_stats(np.mean, output_name="mean")
    @define_episode_stats(np.mean)
    @define_step_stats(sum)
    def wear(self, value):
        """Averaged over steps."""

    @define_epoch_stats(np.mean, output_name="mean")
    @define_epoch_stats(max, output_name="max")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def fault(self, value):
        """Summed over episodes; not fired in each step."""

    @define_epoch_stats(np.mean, output_name="mean")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def use(self, value):
        """Summed over episodes."""

    @define_epoch_stats(max)
    @define_episode_stats(max)
    @define_step_stats(max)
    def peak(self, value):
        """Of an epoch the largest."""


class Machine(BatchedCoreEnv):
    """Fast (1) wears by 1, and earns 1, or 0.7 if it follows a fast step, which is a fault; slow does neither."""

    row_arrays = ("was_fast", "elapsed", "worn")
    event_interfaces = (MachineEvents,)

    def __init__(self, n_envs, length=5):
        seen = spaces.Dict(was_fast=spaces.Box(0, 1, (1,), np.float32))
        super().__init__(n_envs, {0: spaces.Dict(fast=spaces.Discrete(2))}, {0: seen}, length)
        self.was_fast, self.worn = np.zeros(n_envs), np.zeros(n_envs)

    def reset_rows(self, rows):
        self.was_fast[rows] = self.worn[rows] = 0.0

    def step(self, actions):
        fast = actions["fast"].astype(float)
        self.worn += fast
        faulty = (fast * self.was_fast) > 0
        self.was_fast = fast
        self.fire(MachineEvents.wear, value=fast)
        self.fire(MachineEvents.use, value=fast)
        self.fire(MachineEvents.fault, where=faulty, value=2.0)
        return fast - 0.3 * faulty, np.zeros(self.n_envs, bool)

    def observe(self, out):
        out["was_fast"][:, 0] = self.was_fast
        super().observe(out)

    def kpis(self, rows):
        return {"share": self.worn[rows] / self.elapsed[rows], **super().kpis(rows)}


def machine_env():
    return BatchedMazeEnv(partial(Machine, length=5))


# -- mathematics -------------------------------------------------------------------------------------------------------


def test_a_multiplier_follows_the_three_terms_of_its_control():
    # smoothed: 0.4, then 0.5 * 0.4 + 0.5 * 0.8 = 0.6; integral: 0.04, then 0.12; change of the smoothed one: 0.2
    first = pid_step(PID(), 0.4, (1.0, 0.1, 2.0), limit=10.0, smoothing=0.5)
    assert first == pytest.approx(PID(0.04, 0.4, 0.44))
    second = pid_step(first, 0.8, (1.0, 0.1, 2.0), limit=10.0, smoothing=0.5)
    assert second == pytest.approx(PID(0.12, 0.6, 0.6 + 0.12 + 0.4))
    held = pid_step(second, -1.0, (1.0, 0.1, 2.0), limit=10.0, smoothing=0.5)  # smoothed -0.2, falling
    assert held == pytest.approx(PID(0.02, -0.2, 0.0)), "neither multiplier nor integral are negative"
    assert pid_step(PID(0.0, 9.0), 9.0, (1.0, 1.0, 0.0), limit=3.0).multiplier == 3.0
    assert pid_step(PID(2.9, 9.0), 9.0, (1.0, 1.0, 0.0), limit=3.0).integral == 3.0, (
        "it would take long to shrink again"
    )


def test_the_advantage_of_the_lagrangian_is_weighted():
    advantage = combined_advantage(
        torch.tensor([2.0, 1.0]), [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 4.0])], [2, 1]
    )
    assert advantage.tolist() == [0.0, -0.75]


def test_running_episodes_count_when_they_end():
    values = np.array([[1.0, 1.0], [2.0, 1.0], [4.0, 1.0], [8.0, 1.0]])
    ended = np.array([[0, 0], [1, 0], [1, 0], [0, 0]], bool)
    total, running = sum_of_ended(values, ended, np.array([0.5, 10.0]))
    assert (total, running.tolist()) == (0.5 + 1 + 2 + 4, [8.0, 14.0])
    total, running = sum_of_ended(values[:2], np.ones((2, 2), bool), running)
    assert (total, running.tolist()) == (8 + 3 + 14 + 2, [0.0, 0.0])


# -- sources -----------------------------------------------------------------------------------------------------------


def test_a_statistic_is_found_among_values_of_steps_or_episodes():
    wear, fault, share = (statistic_source(name) for name in ("wear", "MachineEvents/fault/mean", "share"))
    assert (wear.at_end, wear.is_rate) == (False, True)
    assert (fault.at_end, fault.is_rate) == (False, False)
    assert (share.at_end, share) == (True, statistic_source("kpi/mean/share"))
    assert wear.of({LogStatsKey(MachineEvents.wear, None, None): 3.0}) == 3.0
    assert wear.of({LogStatsKey(MachineEvents.fault, None, None): 3.0}) == 0.0
    assert [one.of_some for one in (wear, fault, share)] == [False, False, True]
    occurrence = share._replace(is_occurrence=True)
    assert occurrence.of({LogStatsKey(BaseEnvEvents.kpi, None, ("share",)): 0.0}) == 1.0
    assert occurrence.of({}) == 0.0
    with pytest.raises(ConfigError, match="'peak' is not a mean over episodes"):
        statistic_source("peak")


DEFINITION = """
class CellEvents:
    @define_epoch_stats(np.mean)
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def scrap(self, value):
        pass
"""


def test_events_may_be_defined_again_as_in_notebooks():
    for value in (1.0, 2.0):
        exec(DEFINITION, globals())
        event = globals()["CellEvents"].scrap
        assert statistic_source("scrap").of({LogStatsKey(event, None, None): value}) == value


def test_a_ratio_of_two_statistics():
    constraint = Constraint.parse("wear  per fault >= 0.5")
    assert (constraint.name, constraint.per, constraint.sign, constraint.bound) == ("wear", "fault", ">=", 0.5)
    logged = {LogStatsKey(MachineEvents.wear, "mean", None): 1.0, LogStatsKey(MachineEvents.fault, "mean", None): 4.0}
    logged[LogStatsKey(REWARD, "mean", None)] = 0.0
    assert SelectionCriterion(constraints=["wear per fault >= 0.5"]).judge(logged).violation == 0.25
    assert SelectionCriterion(constraints=["wear per fault <= 0.5"]).judge(logged).violation == 0.0


NAMES = ("wear", "fault", "share", "reward")
PLACEMENTS = {
    "in process": lambda: SequentialVectorEnv([machine_env] * 4),
    "processes": lambda: SubprocVectorEnv([machine_env] * 4, n_workers=2),
    "groups": lambda: in_groups(2, machine_env, 4, None, in_sequence),
    "batched": lambda: BatchedVectorEnv(Machine(4)),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_values_of_rollouts_add_up_to_the_statistics_of_their_episodes_in_every_placement(placement):
    env = PLACEMENTS[placement]()
    try:
        env.seed([1, 2, 3, 4])
        env.record_constrained(tuple(statistic_source(name) for name in NAMES))
        policy = make_policy(machine_env)
        generator = RolloutGenerator(env)
        columns = generator.collect(policy, generator.allocate(10, policy))  # two episodes of each environment
        fast = columns.substeps[0].actions["fast"].astype(float)
        wear, fault, share, reward = np.moveaxis(columns.constrained, -1, 0)
        assert np.array_equal(wear, fast)
        in_a_row = np.concatenate([np.zeros((1, 4)), fast[1:] * fast[:-1]])
        in_a_row[5] = 0.0
        assert np.array_equal(fault, 2.0 * in_a_row)
        assert reward == pytest.approx(fast - 0.3 * in_a_row)
        expected = np.zeros_like(share)
        expected[4], expected[9] = fast[:5].mean(0), fast[5:].mean(0)
        assert share == pytest.approx(expected)
    finally:
        env.close()


# -- learning ----------------------------------------------------------------------------------------------------------


def machine_trainer(trainer_class, constraints, n_updates, **settings):
    env = BatchedVectorEnv(Machine(32))
    env.seed(list(range(32)))
    common = {"n_epochs": 1, "epoch_length": n_updates, "n_rollout_steps": 10, "lr": 0.01, "gamma": 0.9}
    if trainer_class is PPO:
        common |= {"batch_size": 80, "n_optimization_epochs": 2}
    common |= {"constraints": constraints, "entropy_coef": 0.05}
    common |= settings
    return trainer_class(common, RolloutGenerator(env), None, build_model(env, "Step"), None, seed=1)


@pytest.mark.parametrize(
    ("trainer_class", "constraint"),
    [
        (PPO, "wear <= 0.62"),  # fast, slow, fast, slow, fast
        pytest.param(PPO, "share <= 0.62", marks=pytest.mark.long),
        pytest.param(A2C, "wear <= 0.62", marks=pytest.mark.long),
        (PPO, "fault per use <= 0.1"),
    ],
)
def test_a_policy_earns_as_much_as_its_constraint_allows(trainer_class, constraint):
    settings = {"lr": 0.004} if trainer_class is PPO else {"constraint_gains": [1.0, 0.02, 0.0]}
    trainer = machine_trainer(trainer_class, [constraint], 100 if trainer_class is PPO else 250, **settings)
    trainer.train()
    (learned,) = trainer._constraints
    assert learned.multiplier > 0.0
    assert learned.constraint.violation(learned.value) < 0.2, "with nothing to keep it, all steps are fast: 0.38"
    logged = trainer.episode_source().epoch_stats.last_stats
    assert logged[LogStatsKey(REWARD, "mean", None)] > 2.4, "3 is the most without a fault"


def test_satisfied_constraints_do_not_change_the_objective():
    trainer = machine_trainer(PPO, ["wear >= 0.1", "fault <= 20"], 50)
    trainer.train()
    assert [one.multiplier for one in trainer._constraints] == [0.0, 0.0]
    assert trainer._constraints[0].value > 0.9


def test_an_infeasible_constraint_is_reported(caplog):
    trainer = machine_trainer(PPO, ["wear >= 1.5"], 80, multiplier_limit=0.5)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (message,) = [record.getMessage() for record in caplog.records if "infeasible" in record.getMessage()]
    assert "'wear >= 1.5' seems to be infeasible" in message


@pytest.mark.parametrize("make_env", [two_step_env, hierarchical_env, coming_and_going_env])
@pytest.mark.parametrize("critic", ["Step", "Shared"])
@pytest.mark.parametrize("trainer_class", [A2C, PPO])
def test_sub_steps_and_varying_actors_learn_costs(make_env, critic, trainer_class):
    env = SequentialVectorEnv([make_env] * 3)
    env.seed([0, 1, 2])
    model = build_model(env, critic)
    settings = {"n_epochs": 1, "epoch_length": 3, "n_rollout_steps": 12, "constraints": ["reward <= 0.5"]}
    if trainer_class is PPO:
        settings |= {"batch_size": 16, "n_optimization_epochs": 2}
    trainer = trainer_class(settings, RolloutGenerator(env), None, model, None, seed=0)
    (learned,) = trainer._constraints
    before = [parameter.clone() for parameter in learned.critic.parameters()]
    trainer.train()
    assert np.isfinite(learned.value)
    assert all(not torch.equal(one, two) for one, two in zip(before, learned.critic.parameters(), strict=True))


def costs_of_a_kpi(ticks, *kpis, text="late <= 1"):
    """Return the value of a constraint and the targets of its cost critic, where KPIs have these values by tick."""
    columns = rollout_of([ticks], last=[(A0, 5)], n_keys=1)
    columns.constrained = np.zeros((len(ticks), 1, 2 * len(kpis)), np.float32)
    for index, values in enumerate(kpis):
        for tick, value in values.items():
            columns.constrained[tick, :, [index, len(kpis) + index]] = [[value], [1.0]]
    model = model_with(TorchStepStateCritic, n_keys=1)
    constraint = LearnedConstraint(text, PPOAlgorithmConfig(gae_lambda=1.0, constraint_margin=0.0), model)
    batch = value_rollout(model, columns, GAE(0.5, 0.5))
    constraint.learn(columns, batch, first=0, is_fixed=True)
    (part,) = batch.parts
    return constraint.value, part.costs[0].targets[0]


def test_nothing_follows_a_truncated_episode_in_the_costs_of_whole_episodes():
    # Both actors contributed to a KPI of 2, of which 1 is allowed: a cost of 1 (its scale is 1 as well), whatever the
    # final observation (8) is worth. The next episode continues behind the rollout, where the cost critic predicts 5.
    ends = Tick(A1, 6, 0, truncated=(A0, 8), actor_reward=0)
    ticks = [Tick(A0, 4, 0, is_complete=False, actor_reward=0), ends, Tick(A0, 7, 0, actor_reward=0)]
    assert costs_of_a_kpi(ticks, {1: 2.0})[1].tolist() == pytest.approx([1.0, 1.0, 5.0])


def test_costs_of_long_episodes_keep_their_proportions():
    # 20 and 40 beyond the limit, at the ends of 400 steps: their root mean square is sqrt(1000)
    episode = [*[Tick(A0, 0, 0)] * 399, Tick(A0, 0, 0, terminated=True)]
    _, found = costs_of_a_kpi([*episode, *episode], {399: 21.0, 799: 41.0})
    assert found[[0, 399]].tolist() == pytest.approx([20 / 1000**0.5] * 2)
    assert found[[400, 799]].tolist() == pytest.approx([40 / 1000**0.5] * 2)


def test_the_mean_of_a_kpi_is_that_of_the_episodes_that_have_it():
    # As the statistics of rollouts and evaluations count it: 5, not 5 / 3. Other episodes cost nothing; the cost of 4
    # is divided by the root mean square of 0, 4 and 0.
    value, costs = costs_of_a_kpi([Tick(A0, 0, 0, terminated=True)] * 3, {1: 5.0})
    assert value == 5.0
    assert costs.tolist() == pytest.approx([0.0, 3**0.5, 0.0])


def test_a_ratio_of_kpis_is_that_of_their_means_in_training_and_evaluation():
    # `late` is known in one episode, `done` in two: 6 / 3, not 6 / 6. A `done` of 2 allows a `late` of 2 * 1/2.
    late, done = {1: 6.0}, {0: 2.0, 1: 4.0}
    value, costs = costs_of_a_kpi([Tick(A0, 0, 0, terminated=True)] * 3, late, done, text="late per done <= 1")
    logged = {LogStatsKey(REWARD, "mean", None): 0.0}
    for name, values in (("late", late), ("done", done)):
        logged[LogStatsKey(BaseEnvEvents.kpi, "mean", (name,))] = np.mean([*values.values()])
    assert value == 2.0
    assert SelectionCriterion(constraints=["late per done <= 1"]).judge(logged).violation == value - 1.0
    assert costs.tolist() == pytest.approx(np.array([-1.0, 4.0, 0.0]) / (17 / 3) ** 0.5)


@pytest.mark.parametrize("constraint", ["share <= 1", "fault per share <= 1"])
def test_a_statistic_that_is_not_a_number_is_named(constraint, monkeypatch):
    kpis = Machine.kpis
    monkeypatch.setattr(Machine, "kpis", lambda self, rows: {**kpis(self, rows), "share": np.full(len(rows), np.nan)})
    with pytest.raises(NonFiniteError, match=r"`BaseEnvEvents/kpi/share` of `algorithm\.constraints` is nan"):
        machine_trainer(PPO, [constraint], 1).train()


@pytest.mark.parametrize("critic", [None, SHARED])
def test_a_critic_of_costs_has_hidden_states_of_its_own(critic):
    env = SequentialVectorEnv([two_step_env] * 3)
    env.seed([0, 1, 2])
    model = recurrent_model(env, critic)
    settings = {
        "n_epochs": 1,
        "n_rollout_steps": 8,
        "batch_size": 8,
        "constraints": ["reward <= 0", "reward per reward <= 2"],
    }
    trainer = PPO({**settings, "sequence_length": 3}, RolloutGenerator(env), None, model, None, seed=0)
    batch = trainer._valued(trainer._collect())
    for part in batch.shuffled(8, trainer.generator):
        for minibatch in part.parts:
            outputs, _ = minibatch.evaluate(model)
            for position, (one, costs) in enumerate(zip(trainer._constraints, minibatch.costs, strict=True)):
                for value, old in zip(one.predicted(minibatch, position, outputs), costs.old_values, strict=True):
                    assert torch.allclose(value, old, atol=1e-6), "unrolled from the stored states"


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"constraints": "wear <= 1"}, "algorithm.constraints: expected a list"),
        ({"constraints": ["wear < "]}, "constraints: cannot read 'wear < '"),
        ({"constraints": ["wear == 1"]}, "algorithm.constraints: expected `<=` or `>=`, found 'wear == 1'"),
        ({"constraints": ["fault per wear <= 0.1"]}, "expected two averages over steps or two totals of episodes"),
        ({"constraints": ["wear per share <= 0.1"]}, "expected two averages over steps or two totals of episodes"),
        ({"constraints": ["wear <= 1", "wear >= 0"]}, "expected one constraint per statistic"),
        ({"constraint_gains": [1, 2]}, "algorithm.constraint_gains: expected a proportional, an integral"),
        ({"multiplier_limit": 0}, "algorithm.multiplier_limit"),
    ],
)
def test_malformed_constraints_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        machine_trainer(A2C, **{"constraints": [], "n_updates": 1, **settings})


def test_evaluations_select_by_the_same_constraints():
    config = PPOAlgorithmConfig(rollout_evaluator={"n_episodes": 3}, constraints=["wear <= 1"])
    assert config.rollout_evaluator == {"n_episodes": 3, "constraints": ["wear <= 1"]}
    own = {"n_episodes": 3, "constraints": ["wear <= 2"]}
    assert PPOAlgorithmConfig(rollout_evaluator=own, constraints=["wear <= 1"]).rollout_evaluator == own
    with pytest.raises(ConfigError, match="IMPALA"):
        ImpalaAlgorithmConfig(constraints=["wear <= 1"])


def test_training_episodes_select_by_the_same_constraints_where_there_is_no_evaluation():
    trainer = machine_trainer(A2C, ["wear <= -1", "kpi/share <= 2"], n_updates=2)
    trainer.model_selection = BestModelSelection(None, trainer.model)
    trainer.train()
    worn = trainer.episode_source().epoch_stats.last_stats[LogStatsKey(MachineEvents.wear, "mean", None)]
    assert trainer.model_selection.best_violation == pytest.approx(worn + 1.0)
    assert not trainer.model_selection.keeps_latest


def test_training_episodes_do_not_select_by_means_with_risk():
    trainer = machine_trainer(A2C, [], n_updates=2, risk="cvar:0.5")
    trainer.model_selection = BestModelSelection(None, trainer.model)
    trainer.train()
    assert trainer.model_selection.keeps_latest
