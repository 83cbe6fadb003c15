"""Statistics of environments, from the step to the printed table."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import EnvironmentContractError
from maze.core.log_events.log_events_writer import LogEventsWriter
from maze.core.log_events.log_events_writer_registry import LogEventsWriterRegistry
from maze.core.log_events.monitoring_events import DiscreteActionEvents
from maze.core.log_stats.log_stats import LogStatsConsumer, LogStatsKey, LogStatsLevel, StatsContext, increment_log_step
from maze.core.log_stats.log_stats_env import LogStatsEnv
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.wrapper import Wrapper
from maze.utils.log_stats_utils import SimpleStatsLoggingSetup
from tests.core.log_stats.stats_test_env import (
    FOUR_STEPS,
    FOUR_STRUCTURED_STEPS,
    CuttingEvents,
    InventoryEvents,
    RawPieceUsage,
    act,
    cutting_env,
)

HEADER = [
    " step|path" + " " * 84 + "|" + " " * 15 + "value",
    "=====|" + "=" * 88 + "|" + "=" * 20,
]


def row(step, prefix, cells):
    interface, event, name, value = cells
    return f"{step:5}|{prefix:<22}{interface:<22}{event:<22}{name or '·' * 22:<22}|{value:>20}"


FLAT_ROWS = [
    ("DiscreteActionEvents", "action", "substep_0/cut_order", "[len:4, μ:0.5]"),
    ("DiscreteActionEvents", "action", "substep_0/piece_idx", "[len:4, μ:2.0]"),
    ("BaseEnvEvents", "reward", "median_step_count", "4.000"),
    ("BaseEnvEvents", "reward", "mean_step_count", "4.000"),
    ("BaseEnvEvents", "reward", "total_step_count", "4.000"),
    ("BaseEnvEvents", "reward", "total_episode_count", "1.000"),
    ("BaseEnvEvents", "reward", "episode_count", "1.000"),
    ("BaseEnvEvents", "reward", "std", "0.000"),
    ("BaseEnvEvents", "reward", "mean", "-6.000"),
    ("BaseEnvEvents", "reward", "min", "-6.000"),
    ("BaseEnvEvents", "reward", "max", "-6.000"),
    ("InventoryEvents", "piece_replenished", "mean_episode_total", "3.000"),
    ("InventoryEvents", "pieces_in_inventory", "step_max", "5.000"),
    ("InventoryEvents", "pieces_in_inventory", "step_mean", "4.000"),
    ("CuttingEvents", "valid_cut", "mean_episode_total", "2.000"),
    ("CuttingEvents", "invalid_cut", "mean_episode_total", "2.000"),
    ("BaseEnvEvents", "kpi", "max/raw_piece_usage_..", "0.750"),
    ("BaseEnvEvents", "kpi", "min/raw_piece_usage_..", "0.750"),
    ("BaseEnvEvents", "kpi", "std/raw_piece_usage_..", "0.000"),
    ("BaseEnvEvents", "kpi", "mean/raw_piece_usage..", "0.750"),
]


def test_the_documented_example_prints_the_documented_table(capsys):
    env = LogStatsWrapper(cutting_env(episode_length=100), logging_prefix="main")
    with SimpleStatsLoggingSetup(env):
        env.reset()
        for action in FOUR_STEPS:
            env.step(action)
    assert capsys.readouterr().out.splitlines() == HEADER + [row(1, "main", cells) for cells in FLAT_ROWS]


def test_a_multi_step_environment_prints_rows_per_sub_step_in_the_documented_order(capsys):
    env = LogStatsWrapper.wrap(cutting_env(is_flat=False), logging_prefix="train")
    with SimpleStatsLoggingSetup(env):
        env.reset()
        for action in FOUR_STRUCTURED_STEPS:
            env.step(action)
    # Each environment step's reward is that of its two sub-steps: -6 + 4 * 0.5
    expected = [
        ("DiscreteActionEvents", "action", "substep_0/piece_idx", "[len:4, μ:2.0]"),
        *FLAT_ROWS[2:8],
        *[("BaseEnvEvents", "reward", name, "-4.000") for name in ("mean", "min", "max")],
        ("DiscreteActionEvents", "action", "substep_1/cut_order", "[len:4, μ:0.5]"),
        ("DiscreteActionEvents", "action", "substep_1/cut_rotation", "[len:4, μ:1.0]"),
        *FLAT_ROWS[11:],
    ]
    # Names longer than 20 characters are cut, `substep_1/cut_rotation` among them.
    expected = [(*cells[:2], cells[2] if len(cells[2]) <= 20 else cells[2][:20] + "..", cells[3]) for cells in expected]
    expected[-4:] = FLAT_ROWS[-4:]
    assert capsys.readouterr().out.splitlines() == HEADER + [row(1, "train", cells) for cells in expected]


def run_episode(env, actions=FOUR_STEPS):
    env.reset()
    for action in actions:
        env.step(action)


def epoch_values(env):
    env.write_epoch_stats()
    return {
        (key.event.__name__, key.output_name): value
        for key, value in env.get_stats(LogStatsLevel.EPOCH).last_stats.items()
        if key.event is not DiscreteActionEvents.action
    }


def test_an_episode_is_published_at_the_reset_that_follows_and_only_once():
    env = LogStatsWrapper(cutting_env())
    run_episode(env)
    assert not env.get_stats(LogStatsLevel.EPISODE).last_stats
    env.reset()
    assert env.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPISODE, name="sum") == -6
    env.reset()  # no step since the last reset: nothing to count
    env.reset()
    assert epoch_values(env)["reward", "episode_count"] == 1


def test_publishing_at_once_is_not_repeated_by_the_following_reset_or_close():
    env = LogStatsWrapper(cutting_env())
    run_episode(env)
    env.publish_episode()
    env.reset()
    env.close()
    stats = epoch_values(env)
    assert stats["reward", "episode_count"] == 1
    assert stats["valid_cut", "mean_episode_total"] == 2


@pytest.mark.parametrize("kpis", [None, {"waste": "low"}, {"waste": None}, {"waste": np.array([1, 2])}])
def test_kpis_that_are_not_numbers_by_name_are_refused_with_their_calculator(monkeypatch, kpis):
    monkeypatch.setattr(RawPieceUsage, "calculate_kpis", lambda *_: kpis)
    env = LogStatsWrapper(cutting_env())
    run_episode(env)
    with pytest.raises(EnvironmentContractError, match=r"RawPieceUsage.calculate_kpis\(\) must return numbers by name"):
        env.reset()


def test_an_episode_that_is_reset_in_its_middle_counts_with_the_steps_it_had():
    env = LogStatsWrapper(cutting_env())
    run_episode(env, FOUR_STEPS[:3])
    run_episode(env, FOUR_STEPS)
    env.reset()
    stats = epoch_values(env)
    assert stats["reward", "mean_step_count"] == 3.5
    assert stats["reward", "mean"] == (-4 - 6) / 2
    assert stats["kpi", "max"] == pytest.approx(3 / 3)


def test_an_episode_that_is_reset_in_the_middle_of_a_step_counts_the_sub_steps_taken():
    env = LogStatsWrapper(cutting_env(is_flat=False))
    run_episode(env, FOUR_STRUCTURED_STEPS[:3])
    env.reset()
    stats = epoch_values(env)
    assert stats["reward", "total_step_count"] == 2
    assert stats["reward", "mean"] == (0.5 - 1) + 0.5


def test_closing_publishes_a_finished_episode():
    env = LogStatsWrapper(cutting_env())
    run_episode(env)
    env.close()
    assert epoch_values(env)["reward", "episode_count"] == 1


def test_clearing_epoch_statistics_drops_finished_episodes():
    env = LogStatsWrapper(cutting_env())
    run_episode(env)
    env.reset()
    env.clear_epoch_stats()
    run_episode(env)
    env.reset()
    stats = epoch_values(env)
    assert stats["reward", "episode_count"] == stats["reward", "total_episode_count"] == 1


def test_a_missing_statistic_is_an_error_that_lists_those_there_are():
    env = LogStatsWrapper(cutting_env())
    run_episode(env)
    env.reset()
    env.write_epoch_stats()
    with pytest.raises(KeyError, match=r"BaseEnvEvents\.reward/median.*BaseEnvEvents\.reward/mean"):
        env.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, name="median")


@pytest.mark.parametrize(
    ("is_flat", "actions", "reward"), [(True, FOUR_STEPS[:2], -2), (False, FOUR_STRUCTURED_STEPS[:4], -1.5)]
)
def test_the_last_steps_events_contain_its_actions_and_its_reward(is_flat, actions, reward):
    env = LogStatsWrapper(cutting_env(is_flat=is_flat))
    run_episode(env, actions)
    heads = [r.attributes for r in env.get_last_step_events(DiscreteActionEvents.action)]
    assert {head["name"]: head["value"] for head in heads if head["name"] != "cut_rotation"} == {
        "piece_idx": 0,
        "cut_order": 0,
    }
    assert [r.attributes for r in env.get_last_step_events(BaseEnvEvents.reward)] == [{"value": reward}]
    assert [r.interface_method for r in env.get_last_step_events([CuttingEvents.invalid_cut, CuttingEvents.valid_cut])]
    assert len(env.get_last_step_events()) == len(heads) + 3


class Kept(LogEventsWriter):
    def __init__(self):
        self.logs = []

    def write(self, episode_event_log):
        self.logs.append(episode_event_log)


@pytest.mark.parametrize(("is_flat", "actions"), [(True, FOUR_STEPS), (False, FOUR_STRUCTURED_STEPS)])
def test_event_writers_get_one_step_log_per_environment_step_with_the_reset_in_the_first(is_flat, actions):
    with StatsContext():
        writer = Kept()
        LogEventsWriterRegistry.register_writer(writer)
        env = LogStatsWrapper(cutting_env(is_flat=is_flat))
        run_episode(env, actions)
        episode_id = env.get_episode_id()
        env.reset()
    (log,) = writer.logs
    assert log.episode_id == episode_id
    assert [step.env_time for step in log.step_event_logs] == [0, 1, 2, 3]
    n_replenished = [len(step.query_events(InventoryEvents.piece_replenished)) for step in log.step_event_logs]
    assert n_replenished == [2, 0, 1, 0]
    bonus = 0 if is_flat else 0.5
    rewards = [record.attributes["value"] for record in log.query_events(BaseEnvEvents.reward)]
    assert rewards == [-1 + bonus, -2 + bonus, -1 + bonus, -2 + bonus]
    actions_taken = log.query_events(DiscreteActionEvents.action)
    assert [r.attributes["value"] for r in actions_taken if r.attributes["name"] == "piece_idx"] == [3, 0, 4, 1]
    (kpi,) = log.query_events(BaseEnvEvents.kpi)
    assert kpi.attributes == {"name": "raw_piece_usage_per_step", "value": 0.75}


def test_without_kpis_and_writers_no_event_log_is_kept():
    env = LogStatsWrapper(cutting_env(has_kpis=False))
    run_episode(env)
    assert len(env.get_episode_event_log().step_event_logs) == 1  # from now on
    run_episode(env)
    assert len(env.get_episode_event_log().step_event_logs) == 4


@pytest.mark.parametrize("is_flat", [True, False])
def test_after_its_last_step_the_log_of_an_episode_is_complete_and_reading_does_not_change_it(is_flat):
    def content(log):
        return [(time, record.interface_method, record.attributes) for time, record in log.timed_events()]

    actions = FOUR_STEPS if is_flat else FOUR_STRUCTURED_STEPS
    cuts = [CuttingEvents.valid_cut, CuttingEvents.invalid_cut]
    with StatsContext():
        writer = Kept()
        LogEventsWriterRegistry.register_writer(writer)
        env, unseen = LogStatsWrapper(cutting_env(is_flat)), LogStatsWrapper(cutting_env(is_flat))
        run_episode(unseen, actions)
        env.reset()
        for number, action in enumerate(actions):
            env.step(action)
            n_cuts = len(env.get_episode_event_log().query_events(cuts))
            assert n_cuts == (number + 1 if is_flat else (number + 1) // 2)
        before = env.get_episode_event_log()
        assert content(before) == content(env.get_episode_event_log())
        for event in (BaseEnvEvents.reward, InventoryEvents.pieces_in_inventory):
            assert [len(step.query_events(event)) for step in before.step_event_logs] == [1, 1, 1, 1]
        assert len(before.query_events(BaseEnvEvents.kpi)) == 1
        assert epoch_values(env) == {}
        for one in (unseen, env):
            one.reset()
    unseen_log, published = writer.logs
    assert content(published) == content(before) == content(unseen_log)
    assert epoch_values(env) == epoch_values(unseen) != {}


def test_log_requested_during_an_episode_contains_the_whole_last_step():
    env = LogStatsWrapper(cutting_env(has_kpis=False))
    env.reset()
    for action in FOUR_STEPS[:2]:
        env.step(action)
    for _ in range(2):
        (step,) = env.get_episode_event_log().step_event_logs
        assert step.env_time == 1
        assert len(step.query_events(BaseEnvEvents.reward)) == 1
        assert len(step.query_events(DiscreteActionEvents.action)) == 2
        assert len(step.query_events(InventoryEvents.pieces_in_inventory)) == 1
    env.step(FOUR_STEPS[2])
    assert [step.env_time for step in env.get_episode_event_log().step_event_logs] == [1, 2]


def test_the_reward_of_an_incomplete_step_is_unknown():
    env = LogStatsWrapper(cutting_env(is_flat=False))
    env.reset()
    for action in FOUR_STRUCTURED_STEPS[:3]:
        env.step(action)
    assert [record.attributes["name"] for record in env.get_last_step_events()] == ["piece_idx"]
    rewards = env.get_episode_event_log().query_events(BaseEnvEvents.reward)
    assert [record.attributes["value"] for record in rewards] == [-0.5]


class LateEvents(Wrapper):
    """Fires an event after the statistics wrapper inside has returned."""

    def step(self, action):
        result = self.env.step(action)
        self.env.core_env.cutting_events.valid_cut(piece=0, area=0)
        return result


def test_events_that_an_outer_wrapper_fires_after_the_step_are_counted():
    inner = LogStatsWrapper(cutting_env())
    run_episode(LateEvents(inner))
    inner.reset()
    assert epoch_values(inner)["valid_cut", "mean_episode_total"] == 2 + 4


class StepsWhileResetting(Wrapper):
    def reset(self):
        self.env.reset()
        self.env.step(act(0, 1))
        return self.env.step(act(0, 1))[0]


def test_steps_that_an_inner_wrapper_takes_while_resetting_are_not_counted():
    env = LogStatsWrapper(StepsWhileResetting(cutting_env(episode_length=100)))
    run_episode(env, FOUR_STEPS[:2])
    env.reset()
    stats = epoch_values(env)
    assert stats["reward", "mean_step_count"] == 2
    # One valid cut of the agent's own, and the last event of the reset, which belongs to the first step.
    assert stats["valid_cut", "mean_episode_total"] == 2


def test_two_statistics_wrappers_around_one_environment_agree():
    inner = LogStatsWrapper(cutting_env())
    outer = LogStatsWrapper(inner)
    run_episode(outer)
    outer.reset()
    assert epoch_values(inner) == epoch_values(outer)


def test_step_statistics_reach_their_consumers_at_every_step():
    class Consumer(LogStatsConsumer):
        def __init__(self):
            self.received = []

        def receive(self, stat):
            self.received.append(stat)

    env = LogStatsWrapper(cutting_env(has_kpis=False))
    consumer = Consumer()
    env.get_stats(LogStatsLevel.STEP).register_consumer(consumer)
    run_episode(env)
    reward = LogStatsKey(BaseEnvEvents.reward, None, None)
    assert [stats[reward] for stats in consumer.received] == [-1, -2, -1, -2]
    assert consumer.received[0][LogStatsKey(InventoryEvents.piece_replenished, None, None)] == 2
    assert env.get_stats_value(InventoryEvents.pieces_in_inventory, LogStatsLevel.STEP) == 5
    env.reset()
    assert epoch_values(env)["reward", "mean"] == -6


def test_the_wrapper_shows_what_it_wraps():
    env = LogStatsWrapper(cutting_env())
    assert isinstance(env, MazeEnv)
    assert isinstance(env, LogStatsEnv)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copied_environment_continues_the_episode_and_its_statistics_independently(copied):
    env = LogStatsWrapper(cutting_env())
    run_episode(env, FOUR_STEPS[:2])
    twin = copied(env)
    for action in FOUR_STEPS[2:]:
        twin.step(action)
    twin.reset()
    env.reset()
    assert epoch_values(twin)["reward", "mean"] == -6
    assert epoch_values(twin) == {}
    stats = epoch_values(env)
    assert stats["reward", "mean"] == -3
    assert stats["valid_cut", "mean_episode_total"] == 1


@pytest.mark.parametrize(("is_flat", "steps"), [(True, FOUR_STEPS), (False, FOUR_STRUCTURED_STEPS)])
def test_a_clone_continues_the_episode_in_progress_with_its_events(is_flat, steps):
    env, clone = (LogStatsWrapper(cutting_env(is_flat=is_flat)) for _ in range(2))
    for n_steps in range(1, len(steps)):
        run_episode(env, steps[:n_steps])
        run_episode(clone, steps[:2])
        clone.clone_from(env)
        clone.clear_epoch_stats()
        env.clear_epoch_stats()
        for each in (env, clone):
            for action in steps[n_steps:]:
                each.step(action)
            each.reset()
        expected = epoch_values(env)
        assert (expected["reward", "mean_step_count"], expected["valid_cut", "mean_episode_total"]) == (4, 2)
        assert epoch_values(clone) == expected


def test_event_writers_get_an_episode_from_the_environment_that_began_it_and_from_no_copy():
    with StatsContext():
        writer = Kept()
        LogEventsWriterRegistry.register_writer(writer)
        env, clone = LogStatsWrapper(cutting_env()), LogStatsWrapper(cutting_env())
        run_episode(env, FOUR_STEPS[:3])
        clone.reset()
        clone.clone_from(env)
        for each in (clone, env):
            each.step(FOUR_STEPS[3])
            each.reset()
    (log,) = writer.logs
    assert len(log.step_event_logs) == 4


def test_actions_that_the_space_does_not_describe_give_no_statistics_and_no_error():
    env = LogStatsWrapper(cutting_env(has_kpis=False))
    env.reset()
    env.step({"cut_order": np.array(1)})
    env.reset()
    assert epoch_values(env)["reward", "mean"] == -1


@settings(max_examples=50)
@given(
    episodes=st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), min_size=1, max_size=6), min_size=1, max_size=4
    ),
    is_flat=st.booleans(),
)
def test_environment_statistics_equal_a_naive_calculation(episodes, is_flat):
    env = LogStatsWrapper(cutting_env(is_flat=is_flat, episode_length=1000))
    for episode in episodes:
        env.reset()
        for piece, order in episode:
            if is_flat:
                env.step(act(piece, order))
            else:
                env.step({"piece_idx": piece})
                env.step({"cut_order": order, "cut_rotation": 0})
    env.reset()
    stats = epoch_values(env)
    bonus = 0 if is_flat else 0.5
    returns = [sum((-1 if order else -2) + bonus for _, order in episode) for episode in episodes]
    n_valid = [sum(order for _, order in episode) for episode in episodes]
    assert stats["reward", "mean"] == pytest.approx(np.mean(returns))
    assert stats["reward", "std"] == pytest.approx(np.std(returns))
    assert stats["reward", "total_step_count"] == sum(map(len, episodes))
    assert stats["piece_replenished", "mean_episode_total"] == pytest.approx(np.mean([n + 1 for n in n_valid]))
    assert stats.get(("valid_cut", "mean_episode_total"), 0) == pytest.approx(np.mean(n_valid))
    usage = [(n + 1) / len(episode) for n, episode in zip(n_valid, episodes, strict=True)]
    assert stats["kpi", "mean"] == pytest.approx(np.mean(usage))
    pieces = env.get_stats(LogStatsLevel.EPOCH).last_stats[
        LogStatsKey(DiscreteActionEvents.action, None, ("substep_0", "piece_idx"))
    ]
    assert pieces == [piece for episode in episodes for piece, _ in episode]


def test_finishing_a_log_step_completes_the_epoch_and_writes_it_once():
    class Kept(LogStatsConsumer):
        def __init__(self):
            self.received = []

        def receive(self, stat):
            self.received.append(stat)

    with StatsContext():
        env = LogStatsWrapper(cutting_env(), logging_prefix="train")
        env.epoch_stats.register_consumer(kept := Kept())
        run_episode(env)
        increment_log_step()  # with the episode that has just ended
        assert env.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, name="mean") == -6
        increment_log_step()
        env.reset()
        env.write_epoch_stats()
        assert [len(stats) > 0 for stats in kept.received] == [True, False]
        run_episode(env)
        env.reset()
        env.write_epoch_stats()
        increment_log_step()
        key = LogStatsKey(BaseEnvEvents.reward, "total_episode_count", None)
        assert [stats[key] for stats in kept.received if key in stats] == [1, 2]


def test_a_log_step_leaves_episodes_under_way_and_environments_of_other_contexts_alone():
    with StatsContext():
        outer = LogStatsWrapper(cutting_env())
        run_episode(outer)
        with StatsContext():
            env = LogStatsWrapper(cutting_env())
            env.reset()
            env.step(FOUR_STEPS[0])
            forgotten = LogStatsWrapper(cutting_env())
            del forgotten
            increment_log_step()
            assert not env.epoch_stats.last_stats
        assert not outer.epoch_stats.last_stats
