from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.base_env import TRUNCATION_KEY
from maze.core.env.structured_env import ACTORS_DONE_KEY, ActorID
from maze.core.errors import CheckpointError, ConfigError, ConfigImportError
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.config_utils import EnvFactory
from maze.core.utils.stored_config import refuse_foreign_targets
from maze.core.wrappers.trajectory_recording_wrapper import FrameRecordingWrapper
from maze.interop.pettingzoo_env import AgentReturns, PettingZooEnv, make_pettingzoo_env
from maze.maze_cli import main
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.utils.check_env import check_env
from tests.interop.pettingzoo_envs import Duel, Survivors


class Scripted:
    """Takes actions as they are written down."""

    def __init__(self, actions):
        self.actions = list(actions)

    def needs_state(self):
        return False

    def needs_env(self):
        return False

    def seed(self, seed):
        pass

    def compute_action(self, observation, maze_state=None, env=None, actor_id=None, deterministic=False):
        return {"action": self.actions.pop(0)}


def played(env, actions):
    """What came of each sub-step."""
    env.reset()
    steps = []
    for action in actions:
        actor = env.actor_id()
        observation, reward, done, info = env.step({"action": action})
        complete = env.core_env.is_step_complete()
        shares = env.get_actor_rewards().tolist() if complete else None
        steps.append((actor, observation, reward, done, info, shares))
    return steps


def test_agents_of_one_name_share_a_policy_and_act_in_turn():
    env = PettingZooEnv(Duel())
    assert env.agent_counts_dict == {"player": 2}
    assert list(env.observation_space) == ["action_mask", "observation"]
    actors = [step[0] for step in played(env, [0, 0, 0])]
    assert actors == [ActorID("player", 0), ActorID("player", 1), ActorID("player", 0)]


def test_the_mask_in_the_infos_becomes_an_observation():
    env = PettingZooEnv(Duel(goal=3))
    assert env.reset()["action_mask"].tolist() == [1, 1]
    assert env.step({"action": 1})[0]["action_mask"].tolist() == [1, 0]
    assert list(PettingZooEnv(Duel(), action_mask=False).observation_space) == ["observation"]


def test_a_reward_caused_by_another_agents_move_is_credited_to_the_own_last_move():
    # 2, 4, 5: player 0 makes the last move, which begins a step in which player 1 has not acted
    *_, third = played(PettingZooEnv(Duel()), [1, 1, 0])
    assert third[2:4] == (0.0, True)
    assert third[5] == [-1.0, 1.0]
    # 1, 3, 4, 5: player 1 makes it, and all belongs to the step
    *_, third, fourth = played(PettingZooEnv(Duel()), [0, 1, 0, 0])
    assert third[5] is None
    assert fourth[5] == [-1.0, 1.0]


def test_rewards_may_be_arrays_of_one_number():
    class Arrays(Duel):
        def step(self, action):
            super().step(action)
            self.rewards = {agent: np.array([reward]) for agent, reward in self.rewards.items()}

    env, expected = PettingZooEnv(Arrays()), PettingZooEnv(Duel())
    for each in (env, expected):
        each.seed(1)
        each.reset()
    for _ in range(3):
        action = {"action": 1}
        found, (_, reward, done, _) = env.step(action), expected.step(action)
        assert (found[1], found[2]) == (reward, done)
        if done:
            break
    assert done
    assert env.get_actor_rewards().tolist() == expected.get_actor_rewards().tolist()


def test_rollouts_contain_the_reward_of_each_action():
    envs = SequentialVectorEnv([lambda: PettingZooEnv(Duel())] * 2)
    envs.seed([0, 0])
    generator = RolloutGenerator(envs)
    policy = RandomPolicy(envs.action_spaces_dict)
    policy.compute_action = Scripted([1, 1, 1, 1, 0, 0, 0, 0] * 10).compute_action
    columns = generator.collect(policy, generator.allocate(n_steps=2))
    assert columns.actor_rewards is not None
    assert columns.actor_rewards.tolist() == [[0, 0], [-1, -1], [1, 1]]
    assert columns.terminated[:, 0].tolist() == [False, False, True]


def test_records_of_a_single_environment_hold_it_as_well():
    generator = RolloutGenerator(PettingZooEnv(Duel()), terminate_on_done=True)
    record = generator.rollout(Scripted([1, 1, 0]), n_steps=None)
    rewards = [one.reward for step in record.step_records for one in step.substep_records]
    assert rewards == [0.0, -1.0, 1.0]


def test_agents_of_a_parallel_environment_see_the_beginning_of_the_step_and_earn_at_its_end():
    steps = played(PettingZooEnv(Survivors(((9, False), (9, False)))), [0, 2, 1, 1])
    assert [step[1]["observation"].tolist() for step in steps] == [[1, 0], [0, 1], [1, 1], [0, 2]]
    assert [step[2] for step in steps] == [0.0, 3.0, 0.0, 6.0]
    assert [step[5] for step in steps] == [None, [1.0, 2.0], None, [2.0, 4.0]]


def test_actions_are_counted_from_where_the_environment_counts_them():
    inner = Survivors(((9, False), (9, False)))
    played(PettingZooEnv(inner), [0, 2])
    assert inner.last == {"agent_0": 1, "agent_1": 3}


def test_terminated_agents_do_not_act_again_and_are_distinguished_from_truncated_ones():
    steps = played(PettingZooEnv(Survivors()), [0] * 7)
    assert [step[0].agent_id for step in steps] == [0, 1, 2, 1, 2, 1, 2]
    assert [step[3] for step in steps] == [False] * 6 + [True]
    assert [step[4].get(ACTORS_DONE_KEY) for step in steps] == [None, None, [2], None, None, None, [1]]
    last = steps[-1]
    assert last[4][TRUNCATION_KEY] is True  # of agent 2, whose last observation is given
    assert last[1]["observation"].tolist() == [2, 3]
    assert last[5] == [6.0, 9.0]


def test_rollouts_mark_the_last_decision_of_terminated_agents():
    envs = SequentialVectorEnv([lambda: PettingZooEnv(Survivors())])
    envs.seed([0])
    generator = RolloutGenerator(envs)
    columns = generator.collect(RandomPolicy(envs.action_spaces_dict), generator.allocate(n_steps=3))
    assert columns.actor_done is not None
    assert columns.actor_done[:7, 0].tolist() == [True, False, False, False, False, True, False]
    assert columns.actor_rewards[:7, 0].tolist() == [1, 2, 3, 4, 6, 6, 9]


def test_an_episode_in_which_all_terminate_has_terminated():
    *_, last = played(PettingZooEnv(Survivors(((1, False), (1, False)))), [0, 0])
    assert last[3] is True
    assert TRUNCATION_KEY not in last[4]


def test_returns_of_agents_are_kpis():
    env = PettingZooEnv(Survivors())
    played(env, [0] * 7)
    log = EpisodeEventLog("episode")
    log.episode_events.extend(env.get_step_events())
    kpis = AgentReturns().calculate_kpis(log, None)
    assert kpis == {"return_agent_0": 1.0, "return_agent_1": 12.0, "return_agent_2": 18.0}


def test_with_random_opponents_one_agent_acts_and_only_its_rewards_count():
    env = PettingZooEnv(Duel(), random_opponents=1.0)
    env.seed(3)
    acted, returns = set(), []
    for _ in range(20):
        observation, done, total = env.reset(), False, 0.0
        of_episode = set()
        while not done:
            of_episode.add(env.actor_id().agent_id)
            observation, reward, done, _ = env.step({"action": int(observation["action_mask"][1])})
            assert env.get_actor_rewards().tolist() == [reward]
            total += reward
        assert len(of_episode) == 1
        assert total in (1.0, -1.0)
        acted |= of_episode
        log = EpisodeEventLog("episode")
        log.episode_events.extend(env.get_step_events())
        assert AgentReturns().calculate_kpis(log, None) == {"return_against_random": total}
        returns.append(total)
    assert acted == {0, 1}
    assert set(returns) == {1.0, -1.0}


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_canary_share_is_between_0_and_1(share):
    with pytest.raises(ConfigError, match="random_opponents: expected a number of at least 0 and at most 1"):
        PettingZooEnv(Duel(), random_opponents=share)


@pytest.mark.parametrize(
    ("policies", "counts"),
    [
        ("by_name", {"player": 2}),
        ("shared", {"agent": 2}),
        ("separate", {"player_0": 1, "player_1": 1}),
        ({"player_0": "white", "player_1": "black"}, {"white": 1, "black": 1}),
    ],
)
def test_shared_policies_can_be_configured(policies, counts):
    assert PettingZooEnv(Duel(), policies=policies).agent_counts_dict == counts


@pytest.mark.parametrize(
    ("policies", "message"),
    [("alone", "expected by_name, shared"), ({"player_0": "white"}, "a policy for each of the agents")],
)
def test_invalid_policy_assignments_are_refused(policies, message):
    with pytest.raises(ConfigError, match=message):
        PettingZooEnv(Duel(), policies=policies)


class Unequal(Survivors):
    """The first agent has another choice than the others."""

    def action_space(self, agent):
        return spaces.Discrete(2 if agent == "agent_0" else 3, start=1)


def test_actions_of_different_spaces_have_names_of_their_own():
    inner = Unequal(((9, False), (9, False), (9, False)))
    env = PettingZooEnv(inner, policies={"agent_0": "first", "agent_1": "rest", "agent_2": "rest"})
    assert {key: list(space) for key, space in env.action_spaces_dict.items()} == {
        "first": ["first_action"],
        "rest": ["rest_action"],
    }
    env.reset()
    for action in ({"first_action": 1}, {"rest_action": 2}, {"rest_action": 0}):
        env.step(action)
    assert inner.last == {"agent_0": 2, "agent_1": 3, "agent_2": 1}
    assert check_env(lambda: PettingZooEnv(Unequal()), n_steps=30).findings == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: PettingZooEnv(Duel()),
        lambda: PettingZooEnv(Survivors()),
        lambda: make_pettingzoo_env("classic/tictactoe_v3"),
        lambda: make_pettingzoo_env("mpe2/simple_spread_v3"),
        lambda: make_pettingzoo_env("tests.interop.pettingzoo_envs:Survivors"),
    ],
)
def test_the_checker_finds_nothing(make):
    assert check_env(make, n_steps=60).findings == []


def test_a_seed_starts_the_same_sequence():
    env = PettingZooEnv(Duel())
    env.seed(5)
    assert env.reset()["observation"].tolist() == [1.0]  # seed % 2
    env.seed(4)
    assert env.reset()["observation"].tolist() == [0.0]


def test_environments_are_found_by_instance_by_function_and_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "duels_of_mine", types.SimpleNamespace(env=Duel, other=Duel, nothing=1))
    for given in (Duel(), Duel):
        assert isinstance(EnvFactory(given)(), PettingZooEnv)
    for name in ("duels_of_mine:other",):
        assert isinstance(make_pettingzoo_env(name, goal=3), PettingZooEnv)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("classic/tictacto_v3", "Did you mean"),
        ("no_such_package_of_mine.game_v0", "cannot be imported"),
        ("no_such_game_v7", "no such environment.*Names are"),
    ],
)
def test_unresolvable_names_are_reported(name, message):
    with pytest.raises(ConfigError, match=message):
        make_pettingzoo_env(name)


def test_arguments_that_are_not_taken_are_named():
    with pytest.raises(ConfigError, match=r"cannot be made with the arguments .*goals"):
        make_pettingzoo_env("tests.interop.pettingzoo_envs:Duel", kwargs={"goals": 3})


def test_without_the_package_the_extra_is_named(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigImportError, match=r"maze-rl\[pettingzoo\]"):
        make_pettingzoo_env("classic/tictactoe_v3")


def test_an_environment_made_by_name_is_made_again_for_rendering():
    env = make_pettingzoo_env("tests.interop.pettingzoo_envs:Duel")
    env.set_render_mode("rgb_array")
    env.reset()
    assert env.core_env.env.render().shape == (4, 4, 3)
    with pytest.raises(ConfigError, match="was not made by name"):
        PettingZooEnv(Duel()).set_render_mode("rgb_array")


def test_the_frames_of_an_episode_are_recorded():
    env = FrameRecordingWrapper.wrap(make_pettingzoo_env("tests.interop.pettingzoo_envs:Duel"))
    env.reset()
    for action in (1, 1, 0):
        env.step({"action": action})
    frames = env.get_renderer()
    # the sub-steps of a step share its first frame
    assert [int(frames.pixels(time)[0, 0, 0]) for time in (0, 1, 2)] == [0, 4, 5]


SMALL = (
    "algorithm.n_epochs=1",
    "algorithm.epoch_length=1",
    "algorithm.n_rollout_steps=4",
    "algorithm.rollout_evaluator.n_episodes=4",
    "runner.concurrency=2",
)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["simple_spread_ppo", "simple_speaker_listener_ppo", "tictactoe_ppo"])
def test_prepared_experiments_train(experiment, tmp_path):
    random_games = ["env.random_opponents=1"] if experiment.startswith("tic") else []  # its objective needs some
    directory = f"hydra.run.dir={tmp_path}/run"
    assert main(["-cn", "conf_train", f"+experiment={experiment}", *SMALL, *random_games, directory]) == 0
    assert (tmp_path / "run" / "state_dict.pt").is_file()


@pytest.mark.long
def test_pistons_train_from_pixels(tmp_path):
    few = ["+env.kwargs.max_cycles=3", "algorithm.rollout_evaluator.n_episodes=1"]
    directory = f"hydra.run.dir={tmp_path}/run"
    assert main(["-cn", "conf_train", "+experiment=pistonball_ppo", *SMALL[:3], *few, directory]) == 0


def test_untrusted_configuration_imports_nothing_but_pettingzoo_environments():
    target = "maze.interop.pettingzoo_env.make_pettingzoo_env"
    refuse_foreign_targets({"_target_": target, "name": "mpe2/simple_spread_v3"}, Path("config.yaml"))
    for name in ("json.tool", "json.tool:main"):
        with pytest.raises(CheckpointError, match="Stored configurations may name classes of known kinds"):
            refuse_foreign_targets({"_target_": target, "name": name}, Path("config.yaml"))
