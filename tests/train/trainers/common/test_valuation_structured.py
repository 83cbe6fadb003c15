"""Returns of structured environments, worked out by hand: sub-steps, agents that come and go, hierarchies.

Everywhere gamma = lambda = 1/2. A is the advantage, V the value that a test writes into the observation; a target of
the critic is A + V. A step between environment steps is worth 1/2 V' and 1/4 A', one within an environment step V' and
A', without discount.
"""

from __future__ import annotations

from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from maze.core.agent.returns import GAE
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent.torch_state_critic import TorchDeltaStateCritic, TorchSharedStateCritic, TorchStepStateCritic
from maze.core.env.structured_env import ActorID
from maze.core.rollout.rollout_columns import FinalObservationEntry, RolloutColumns
from maze.distributions.distribution_mapper import DistributionMapper
from maze.train.trainers.common.actor_critic.valuation import value_rollout

ACTION_SPACE = gym.spaces.Dict({"action": gym.spaces.Discrete(2)})
FIRST, SECOND = ActorID(0, 0), ActorID(1, 0)
MANAGER, WORKER = FIRST, SECOND
A0, A1, A2 = (ActorID(0, agent) for agent in range(3))


class SumOfObservations(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return {"value": sum(x.values()) * self.scale}


class Indifferent(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return {"action": self.logits.expand(*next(iter(x.values())).shape[:-1], 2)}


class Tick(NamedTuple):
    """Who acted on which value, and what came of it."""

    actor: ActorID
    value: float
    reward: float
    is_complete: bool = True
    terminated: bool = False
    truncated: tuple[ActorID, float] | None = None
    """Who would have acted next, and the value of what it would have seen."""
    actor_reward: float | None = None
    actor_done: bool = False


def spaces_of(n_keys):
    return {key: gym.spaces.Dict({f"v{key}": gym.spaces.Box(-99, 99, (1,), np.float32)}) for key in range(n_keys)}


def model_with(critic_class, n_keys=2):
    mapper = DistributionMapper(action_space=ACTION_SPACE, distribution_mapper_config={})
    policy = TorchPolicy({key: Indifferent() for key in range(n_keys)}, mapper, "cpu")
    is_shared = critic_class is TorchSharedStateCritic
    networks = {key: SumOfObservations() for key in range(1 if is_shared else n_keys)}
    stacking = {"stack_observations": False} if is_shared else {}
    return TorchActorCritic(policy, critic_class(networks, spaces_of(n_keys), "cpu", **stacking), "cpu")


def rollout_of(envs, last, n_keys=2):
    """:param envs: Ticks of each environment; ``last`` holds actor and value after them."""
    n_ticks, n_envs = len(envs[0]), len(envs)
    columns = RolloutColumns(spaces_of(n_keys), dict.fromkeys(range(n_keys), ACTION_SPACE), n_envs, n_ticks)
    columns.clear()
    common = []
    for index in range(n_ticks):
        ticks = [env[index] for env in envs]
        for key, substep in columns.substeps.items():
            here = [env for env, tick in enumerate(ticks) if tick.actor.step_key == key]
            if here:
                for env in here:
                    substep.observation_rows[substep.n_rows][f"v{key}"][env] = ticks[env].value
                substep.add_row(index, None if len(here) == n_envs else here, [ticks[e].actor.agent_id for e in here])
        common.append(ticks[0].actor if len({tick.actor for tick in ticks}) == 1 else None)
        for env, tick in enumerate(ticks):
            columns.rewards[index, env] = tick.reward
            columns.step_complete[index, env] = tick.is_complete
            columns.terminated[index, env] = tick.terminated
            columns.truncated[index, env] = tick.truncated is not None
            if tick.truncated is not None:
                actor, value = tick.truncated
                observation = {f"v{actor.step_key}": np.array([value], np.float32)}
                columns.final_observations.append(FinalObservationEntry(index, env, actor, observation))
    if envs[0][0].actor_reward is not None:
        columns.actor_rewards = np.array([[tick.actor_reward for tick in env] for env in envs], np.float32).T
        columns.actor_done = np.array([[tick.actor_done for tick in env] for env in envs]).T
    for env, (actor, value) in enumerate(last):
        columns.next_rows()[actor.step_key][f"v{actor.step_key}"][env] = value
    columns.finish([actor for actor, _ in last], common)
    return columns


def valued(critic_class, columns):
    return value_rollout(model_with(critic_class, len(columns.substeps)), columns, GAE(gamma=0.5, gae_lambda=0.5))


# -- two sub-steps, always in the same order -----------------------------------------------------------------------


def two_substeps(actor_rewards=False):
    """Two steps in two environments; after the first one, one terminates and the other is cut off at a value of 8."""

    def step(first_value, second_value, first_reward, second_reward, **end):
        own = [{"actor_reward": reward} if actor_rewards else {} for reward in (first_reward, second_reward)]
        return [
            Tick(FIRST, first_value, first_reward, is_complete=False, **own[0]),
            Tick(SECOND, second_value, second_reward, **end, **own[1]),
        ]

    return rollout_of(
        [
            [*step(10, 4, 1, 2, terminated=True), *step(20, 5, 3, 4)],
            [*step(6, 2, 1, 2, truncated=(FIRST, 8)), *step(30, 3, 3, 4)],
        ],
        last=[(FIRST, 40), (FIRST, 2)],
    )


def test_shared_critic_with_two_substeps():
    (part,) = valued(TorchSharedStateCritic, two_substeps()).parts
    # It sees both sub-steps at once: V is 14 and 25, 8 and 33. Ends show one observation; the other one is that of the
    # step before: V(last) = 40 + 5 and 2 + 3, V(final) = 8 + 2.
    # terminated: 3 - 14 = -11             truncated: 3 + 10/2 - 8 = 0
    # then:       7 + 45/2 - 25 = 4.5                 7 + 5/2 - 33 = -23.5
    for advantage in part.advantages:
        assert advantage.tolist() == [-11, 0, 4.5, -23.5]
    assert [target.tolist() for target in part.targets] == [[3, 8, 29.5, 9.5]]


def test_step_critic_with_two_substeps_that_share_their_rewards():
    (part,) = valued(TorchStepStateCritic, two_substeps()).parts
    # first:  3 - 10 = -7                  3 + 8/2 - 6 = 1
    #         7 + 40/2 - 20 = 7            7 + 2/2 - 30 = -22
    # second: 3 - 4 = -1                   3 + 8/2 - 2 = 5
    #         7 + 40/2 - 5 = 22            7 + 2/2 - 3 = 5
    assert [advantage.tolist() for advantage in part.advantages] == [[-7, 1, 7, -22], [-1, 5, 22, 5]]
    assert [target.tolist() for target in part.targets] == [[3, 7, 27, 8], [3, 7, 27, 8]]


def test_step_critic_with_two_substeps_that_have_rewards_of_their_own():
    (part,) = valued(TorchStepStateCritic, two_substeps(actor_rewards=True)).parts
    # first:  1 - 10 = -9                  1 + 8/2 - 6 = -1
    #         3 + 40/2 - 20 = 3            3 + 2/2 - 30 = -26
    # second, whose next decision is unknown at an end, so that its latest value is used:
    #         2 - 4 = -2                   2 + 2/2 - 2 = 1
    #         4 + 5/2 - 5 = 1.5            4 + 3/2 - 3 = 2.5
    assert [advantage.tolist() for advantage in part.advantages] == [[-9, -1, 3, -26], [-2, 1, 1.5, 2.5]]
    assert [target.tolist() for target in part.targets] == [[1, 5, 23, 4], [2, 3, 6.5, 5.5]]


def test_delta_critic_with_two_substeps():
    (part,) = valued(TorchDeltaStateCritic, two_substeps()).parts
    # The second output is the first one's value plus a difference: 14 and 25, 8 and 33. Both aim at the return of the
    # whole step, which the first value bootstraps: 3 and 27, 3 + 8/2 = 7 and 8.
    assert [values.tolist() for values in part.old_values] == [[10, 6, 20, 30], [14, 8, 25, 33]]
    assert [target.tolist() for target in part.targets] == [[3, 7, 27, 8], [3, 7, 27, 8]]
    assert [advantage.tolist() for advantage in part.advantages] == [[-7, 1, 7, -22], [-11, -1, 2, -25]]


@pytest.mark.parametrize("critic_class", [TorchStepStateCritic, TorchSharedStateCritic])
def test_episodes_that_end_in_mid_sequence(critic_class):
    columns = rollout_of(
        [
            [Tick(FIRST, 4, 1, terminated=True), Tick(FIRST, 2, 0, is_complete=False), Tick(SECOND, 6, 1)],
            # the end completes the step in which it comes
            [Tick(FIRST, 4, 1, truncated=(SECOND, 8)), Tick(FIRST, 2, 0, is_complete=False), Tick(SECOND, 6, 1)],
        ],
        last=[(FIRST, 4), (FIRST, 2)],
    )
    first, second = valued(critic_class, columns).parts
    # last tick:  1 + 4/2 - 6 = -3           1 + 2/2 - 6 = -4
    # in between: 0 + 6 - 2 - 3 = 1          0 + 6 - 2 - 4 = 0
    # first tick: 1 - 4 = -3                 1 + 8/2 - 4 = 1
    assert second.advantages[0].tolist() == [-3, -4]
    assert first.advantages[0].tolist() == [-3, 1, 1, 0]


# -- hierarchies: the environments of a batch are at different sub-steps -------------------------------------------


@pytest.mark.parametrize("critic_class", [TorchStepStateCritic, TorchSharedStateCritic])
def test_a_hierarchy_whose_tasks_take_a_step_each(critic_class):
    columns = rollout_of(
        [
            [Tick(FIRST, 4, 1), Tick(SECOND, 6, 2, terminated=True), Tick(FIRST, 8, 3)],
            [Tick(SECOND, 2, 5), Tick(SECOND, 4, 1, truncated=(FIRST, 12)), Tick(SECOND, 6, 0)],
        ],
        last=[(SECOND, 10), (FIRST, 16)],
    )
    first, second = valued(critic_class, columns).parts
    # tick 2:  3 + 10/2 - 8 = 0              0 + 16/2 - 6 = 2
    # tick 1:  2 - 6 = -4                    1 + 12/2 - 4 = 3
    # tick 0:  1 + 6/2 - 4 - 4/4 = -1        5 + 4/2 - 2 + 3/4 = 5.75
    assert first.advantages[0].tolist() == [-1, 0]
    assert first.targets[0].tolist() == [3, 8]
    assert second.advantages[0].tolist() == [5.75, -4, 3, 2]
    assert second.targets[0].tolist() == [7.75, 2, 7, 8]


@pytest.mark.parametrize("critic_class", [TorchStepStateCritic, TorchSharedStateCritic])
def test_a_hierarchy_whose_manager_decides_within_the_first_step_of_a_worker(critic_class):
    columns = rollout_of(
        [
            [Tick(MANAGER, 4, 0, is_complete=False), Tick(WORKER, 6, 2), Tick(WORKER, 8, 1)],
            [Tick(WORKER, 2, 1), Tick(MANAGER, 4, 0, is_complete=False), Tick(WORKER, 6, 3, truncated=(MANAGER, 10))],
        ],
        last=[(MANAGER, 12), (MANAGER, 99)],
    )
    manager, worker = valued(critic_class, columns).parts
    # tick 2:  1 + 12/2 - 8 = -1             3 + 10/2 - 6 = 2
    # tick 1:  2 + 8/2 - 6 - 1/4 = -0.25     0 + 6 - 4 + 2 = 4
    # tick 0:  0 + 6 - 4 - 0.25 = 1.75       1 + 4/2 - 2 + 4/4 = 2
    assert manager.advantages[0].tolist() == [1.75, 4]
    assert worker.advantages[0].tolist() == [2, -0.25, -1, 2]


# -- agents that come and go: 0 and 1, then 1 and 2, then 2 alone; in the next episode 0 and 1 -----------------------


def coming_and_going(*, ends, own_rewards=True):
    ticks = [
        Tick(A0, 4, 1, is_complete=False, actor_reward=1),
        Tick(A1, 6, 3, actor_reward=3),
        Tick(A1, 2, 2, is_complete=False, actor_reward=2),
        Tick(A2, 8, 5, actor_reward=5),
        Tick(A2, 10, 4, actor_reward=4, **ends),
        Tick(A0, 6, 7, is_complete=False, actor_reward=7),
        Tick(A1, 4, 1, actor_reward=1),
    ]
    return rollout_of([ticks if own_rewards else [t._replace(actor_reward=None) for t in ticks]], [(A0, 20)], n_keys=1)


@pytest.mark.parametrize("critic_class", [TorchStepStateCritic, TorchSharedStateCritic])
@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        # 1 + 20/2 - 4 = 7; 7 + 4 - 6 + 7 = 12; the episode's last step: 4 - 10 = -6; 5 + 10/2 - 8 - 6/4 = 0.5;
        # 2 + 8 - 2 + 0.5 = 8.5; 3 + 2/2 - 6 + 8.5/4 = 0.125; 1 + 6 - 4 + 0.125 = 3.125
        ({"terminated": True}, [3.125, 0.125, 8.5, 0.5, -6, 12, 7]),
        # the last step: 4 + 16/2 - 10 = 2; 5 + 10/2 - 8 + 2/4 = 2.5; 2 + 8 - 2 + 2.5 = 10.5;
        # 3 + 2/2 - 6 + 10.5/4 = 0.625; 1 + 6 - 4 + 0.625 = 3.625
        ({"truncated": (A2, 16)}, [3.625, 0.625, 10.5, 2.5, 2, 12, 7]),
    ],
)
def test_agents_with_common_rewards_form_one_stream(critic_class, ends, expected):
    (part,) = valued(critic_class, coming_and_going(ends=ends, own_rewards=False)).parts
    assert part.advantages[0].tolist() == expected


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        # agent 0: 1 - 4 = -3, it never acted again in its episode; then 7 + 20/2 - 6 = 11
        # agent 1: 2 - 2 = 0, and before 3 + 2/2 - 6 + 0 = -2; then 1 + 4/2 - 4 = -1 (its latest value stands in)
        # agent 2: 4 - 10 = -6, and before 5 + 10/2 - 8 - 6/4 = 0.5
        ({"terminated": True}, [-3, -2, 0, 0.5, -6, 11, -1]),
        # agent 2: 4 + 16/2 - 10 = 2, and before 5 + 10/2 - 8 + 2/4 = 2.5
        # agent 1: its latest value 2 stands in two steps later: 2 + 2/4 - 2 = 0.5, and
        #          before 3 + 2/2 - 6 + 0.5/4 = -1.875
        # agent 0: 1 + 4/8 - 4 = -2.5
        ({"truncated": (A2, 16)}, [-2.5, -1.875, 0.5, 2.5, 2, 11, -1]),
        # agent 2 leaves with the last step: nothing follows for it
        ({"truncated": (A0, 16), "actor_done": True}, [-1, -1.875, 0.5, 0.5, -6, 11, -1]),
    ],
)
def test_agents_with_rewards_of_their_own_have_streams_of_their_own(ends, expected):
    (part,) = valued(TorchStepStateCritic, coming_and_going(ends=ends)).parts
    assert part.advantages[0].tolist() == expected


def test_terminated_agent_has_no_next_decision_while_the_others_continue():
    columns = rollout_of(
        [
            [
                Tick(A0, 4, 0, is_complete=False, actor_reward=1, actor_done=True),
                Tick(A1, 6, 0, actor_reward=3),
                Tick(A1, 2, 0, actor_reward=2),
            ]
        ],
        last=[(A1, 8)],
        n_keys=1,
    )
    (part,) = valued(TorchStepStateCritic, columns).parts
    # agent 0: 1 - 4 = -3;  agent 1: 2 + 8/2 - 2 = 4, and before 3 + 2/2 - 6 + 4/4 = -1
    assert part.advantages[0].tolist() == [-3, -1, 4]


def test_decisions_with_unknown_rewards_only_bootstrap_earlier_ones():
    columns = rollout_of(
        [
            [Tick(A0, 4, 0, actor_reward=1), Tick(A0, 6, 0, is_complete=False, actor_reward=0)],
            [Tick(A1, 2, 0, actor_reward=1), Tick(A0, 8, 0, actor_reward=5)],
        ],
        last=[(A1, 99), (A0, 10)],
        n_keys=1,
    )
    batch = valued(TorchStepStateCritic, columns)
    (part,) = batch.parts
    # first environment: 1 + 6/2 - 4 = 0; second one: agent 1, 1 + 2/4 - 2 = -0.5; agent 0, 5 + 10/2 - 8 = 2
    assert part.advantages[0].tolist() == [0, -0.5, 2]
    assert part.substeps[0].observation["v0"][:, 0].tolist() == [4, 2, 8]
    assert part.targets[0].tolist() == [4, 1.5, 10]
