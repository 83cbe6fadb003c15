"""Aggregation on three levels."""

# Event interfaces have no abstract methods: topics implement all of them.

from __future__ import annotations

import itertools
from abc import ABC

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import ConfigError
from maze.core.log_stats.event_decorators import (
    define_episode_stats,
    define_epoch_stats,
    define_stats_grouping,
    define_step_stats,
    event_definition,
)
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsConsumer, LogStatsKey, LogStatsLevel
from maze.core.log_stats.reducer_functions import histogram


class CuttingEvents(ABC):
    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def invalid_cut(self, piece, area):
        """Several attributes, only counted."""

    @define_epoch_stats(np.mean, input_name="step_mean", output_name="step_mean")
    @define_epoch_stats(max, input_name="step_max", output_name="step_max")
    @define_episode_stats(np.mean, output_name="step_mean")
    @define_episode_stats(max, output_name="step_max")
    @define_step_stats(None)
    def pieces(self, value):
        """One value per step."""

    @define_epoch_stats(sum, input_name="area", output_name="area")
    @define_epoch_stats(max, input_name="largest", output_name="largest")
    @define_epoch_stats(np.mean, input_name="mean_count", output_name="mean_count")
    @define_episode_stats(sum, input_name="area", output_name="area")
    @define_episode_stats(max, input_name="largest", output_name="largest")
    @define_episode_stats(np.mean, input_name="count", output_name="mean_count")
    @define_step_stats(sum, input_name="area", output_name="area")
    @define_step_stats(max, input_name="width", output_name="largest")
    @define_step_stats(len, input_name="width", output_name="count")
    def cut(self, width, area):
        """Several statistics of several attributes."""

    @define_epoch_stats(sum, output_name="total", cumulative=True)
    @define_epoch_stats(np.median, output_name="median_so_far", cumulative=True)
    @define_epoch_stats(max, output_name="best_so_far", cumulative=True)
    @define_epoch_stats(len, output_name="n_so_far", cumulative=True)
    @define_epoch_stats(sum, output_name="this_epoch")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def profit(self, value):
        """Cumulative statistics."""

    @define_epoch_stats(sum, output_name="by_machine", group_by="machine")
    @define_epoch_stats(sum, output_name="by_both")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    @define_stats_grouping("machine", "shift")
    def waste(self, machine, shift, value):
        """Grouped, and coarser in one epoch statistic."""

    @define_epoch_stats(histogram)
    @define_episode_stats(histogram)
    @define_step_stats(None)
    def angle(self, value):
        """A distribution."""


class Hierarchy:
    """Three connected levels."""

    def __init__(self) -> None:
        self.epoch = LogStatsAggregator(LogStatsLevel.EPOCH)
        self.episode = LogStatsAggregator(LogStatsLevel.EPISODE, self.epoch)
        self.step = LogStatsAggregator(LogStatsLevel.STEP, self.episode)
        self.topic = self.step.create_event_topic(CuttingEvents)

    def run(self, *episodes):
        """Each episode is a list of steps, each step a list of calls ``(event name, arguments)``."""
        for steps in episodes:
            for calls in steps:
                for name, *arguments in calls:
                    getattr(self.topic, name)(*arguments)
                self.step.reduce()
            self.episode.reduce(n_periods=len(steps))
        return {(k.event.__name__, k.output_name, k.group): v for k, v in self.epoch.reduce().items()}


def test_counts_are_summed_over_steps_and_averaged_over_episodes():
    stats = Hierarchy().run(
        [[("invalid_cut", 1, 2), ("invalid_cut", 1, 2)], [], [("invalid_cut", 1, 2)]],  # 3
        [[("invalid_cut", 1, 2)]],  # 1
    )
    assert stats == {("invalid_cut", "mean_episode_total", None): 2.0}


def test_an_episode_without_the_event_counts_as_zero_in_the_mean_over_episodes():
    one, none = [("pieces", 1), ("invalid_cut", 1, 2)], [("pieces", 1)]
    for episodes in itertools.permutations([[one], [none], [none], [none]]):
        assert Hierarchy().run(*episodes)["invalid_cut", "mean_episode_total", None] == 0.25


def test_a_step_without_the_event_counts_as_zero_in_the_mean_over_steps():
    stats = Hierarchy().run([[("cut", 1, 1), ("cut", 1, 1)], [], [], []])
    assert stats["cut", "mean_count", None] == 0.5


def test_an_event_that_did_not_occur_in_the_epoch_is_reported_as_zero_once_it_is_known():
    levels = Hierarchy()
    levels.run([[("pieces", 1), ("invalid_cut", 1, 2)]])
    assert levels.run([[("pieces", 1)]])["invalid_cut", "mean_episode_total", None] == 0


def test_one_value_per_step_passes_through_and_rows_follow_the_decorators_from_the_method_upwards():
    stats = Hierarchy().run([[("pieces", 4)], [("pieces", 8)]], [[("pieces", 3)]])
    assert list(stats.items()) == [
        (("pieces", "step_max", None), 8),
        (("pieces", "step_mean", None), (6 + 3) / 2),
    ]


def test_several_values_in_one_step_pass_through_one_by_one():
    stats = Hierarchy().run([[("pieces", 4), ("pieces", 5)], [("pieces", 9)]])
    assert stats["pieces", "step_mean", None] == 6.0


def test_several_statistics_of_one_event_follow_their_input_and_output_names():
    stats = Hierarchy().run([[("cut", 2, 20), ("cut", 3, 30)], [("cut", 1, 10)]])
    assert stats == {
        ("cut", "mean_count", None): 1.5,
        ("cut", "largest", None): 3,
        ("cut", "area", None): 60,
    }


def test_cumulative_statistics_continue_over_epochs_without_dropped_episodes():
    levels = Hierarchy()
    levels.run([[("profit", 5)]], [[("profit", 1)]])
    levels.episode.add_value(CuttingEvents.profit, 1000)
    levels.episode.reduce()
    levels.epoch.clear_inputs()
    stats = levels.run([[("profit", 9)]])
    assert stats == {
        ("profit", "this_epoch", None): 9,
        ("profit", "n_so_far", None): 3,
        ("profit", "best_so_far", None): 9,
        ("profit", "median_so_far", None): 5,
        ("profit", "total", None): 15,
    }


def test_grouping_separates_and_group_by_joins_groups_again():
    stats = Hierarchy().run([[("waste", "a", 1, 10), ("waste", "a", 2, 5), ("waste", "b", 1, 1)]])
    assert stats == {
        ("waste", "by_both", ("a", 1)): 10,
        ("waste", "by_both", ("a", 2)): 5,
        ("waste", "by_both", ("b", 1)): 1,
        ("waste", "by_machine", ("a",)): 15,
        ("waste", "by_machine", ("b",)): 1,
    }


def test_rows_come_in_the_order_of_first_occurrence_of_event_and_group():
    stats = Hierarchy().run([[("waste", "b", 1, 1), ("pieces", 1), ("waste", "a", 1, 1)], [("angle", 1)]])
    assert [(name, group) for name, output, group in stats if output != "by_machine"] == [
        ("waste", ("b", 1)),
        ("pieces", None),
        ("pieces", None),
        ("waste", ("a", 1)),
        ("angle", None),
    ]


def test_statistic_keeps_its_value_when_the_aggregator_continues():
    levels = Hierarchy()
    first = levels.run([[("angle", 1)], [("angle", 2)]])
    levels.run([[("angle", 7)]])
    assert first["angle", None, None] == [1, 2]


def test_a_reduce_function_that_returns_its_argument_does_not_hand_out_the_internal_list():
    class Events(ABC):
        @define_epoch_stats(lambda values: values)
        def event(self, value):
            pass

    aggregator = LogStatsAggregator(LogStatsLevel.EPOCH)
    aggregator.create_event_topic(Events).event(1)
    stats = aggregator.reduce()
    assert list(stats.values()) == [[1]]


def test_events_can_enter_on_the_epoch_level_as_those_of_trainers_do():
    class TrainEvents(ABC):
        @define_epoch_stats(np.mean)
        @define_stats_grouping("substep_key")
        def policy_loss(self, substep_key, value):
            pass

    aggregator = LogStatsAggregator(LogStatsLevel.EPOCH)
    topic = aggregator.create_event_topic(TrainEvents)
    topic.policy_loss(substep_key=0, value=1.0)
    topic.policy_loss(substep_key=1, value=5.0)
    topic.policy_loss(substep_key=0, value=2.0)
    assert aggregator.reduce() == {
        LogStatsKey(TrainEvents.policy_loss, None, (0,)): 1.5,
        LogStatsKey(TrainEvents.policy_loss, None, (1,)): 5.0,
    }


def test_consumers_can_be_registered_and_removed():
    class Kept(LogStatsConsumer):
        def __init__(self):
            self.received = []

        def receive(self, stat):
            self.received.append(dict(stat))

    kept = Kept()
    aggregator = LogStatsAggregator(LogStatsLevel.EPOCH)
    aggregator.register_consumer(kept)
    aggregator.add_value(CuttingEvents.pieces, 3, name="step_max")
    aggregator.reduce()
    aggregator.remove_consumer(kept)
    aggregator.add_value(CuttingEvents.pieces, 4, name="step_max")
    aggregator.reduce()
    assert kept.received == [{LogStatsKey(CuttingEvents.pieces, "step_max", None): 3}]


def test_decorators_that_name_an_unknown_attribute_or_group_are_an_error_that_names_the_event():
    class Wrong(ABC):
        @define_step_stats(sum, input_name="weight")
        def attribute(self, value):
            pass

        @define_step_stats(len)
        @define_stats_grouping("colour")
        def grouping(self, value):
            pass

        @define_episode_stats(sum, group_by="colour")
        @define_step_stats(sum)
        def regrouping(self, value):
            pass

    levels = Hierarchy()
    topic = levels.step.create_event_topic(Wrong)
    with pytest.raises(ConfigError, match=r"Wrong\.attribute.*input_name='weight'.*attributes value"):
        topic.attribute(1)
    with pytest.raises(ConfigError, match=r"Wrong\.grouping.*'colour'.*value"):
        topic.grouping(1)
    topic.regrouping(1)
    with pytest.raises(ConfigError, match=r"Wrong\.regrouping.*'colour'.*grouped by nothing"):
        levels.step.reduce()


rewards = st.lists(
    st.lists(st.lists(st.integers(-50, 50), min_size=1, max_size=3), min_size=1, max_size=6), min_size=1, max_size=6
)


@given(epochs=st.lists(rewards, min_size=1, max_size=3))
def test_reward_statistics_equal_a_naive_calculation(epochs):
    epoch = LogStatsAggregator(LogStatsLevel.EPOCH)
    episode = LogStatsAggregator(LogStatsLevel.EPISODE, epoch)
    step = LogStatsAggregator(LogStatsLevel.STEP, episode)
    topic = step.create_event_topic(BaseEnvEvents)
    all_lengths: list[int] = []
    for episodes in epochs:
        for steps in episodes:
            for values in steps:
                for value in values:
                    topic.reward(value)
                step.reduce()
            episode.reduce()
        returns = [sum(map(sum, steps)) for steps in episodes]
        lengths = [len(steps) for steps in episodes]
        all_lengths += lengths
        assert {key.output_name: value for key, value in epoch.reduce().items()} == {
            "median_step_count": np.median(lengths),
            "mean_step_count": np.mean(lengths),
            "total_step_count": sum(all_lengths),
            "total_episode_count": len(all_lengths),
            "episode_count": len(lengths),
            "std": np.std(returns),
            "mean": np.mean(returns),
            "min": min(returns),
            "max": max(returns),
        }


occurrences = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=5)


@given(counts=occurrences.filter(lambda episodes: any(any(steps) for steps in episodes)))
def test_mean_totals_of_sparse_events_equal_the_documented_formula(counts):
    episodes = [[[("pieces", 1)] + [("invalid_cut", 0, 0)] * n for n in steps] for steps in counts]
    expected = sum(map(sum, counts)) / len(counts)
    assert Hierarchy().run(*episodes)["invalid_cut", "mean_episode_total", None] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], [1, 2]),
        ([[1], [2, 3]], [1, 2, 3]),
        ([np.array([1, 2]), np.array([3])], [1, 2, 3]),
        ([np.array([1, 255], np.uint8), [3]], [1, 255, 3]),
        ([[3], np.array([1, 255], np.uint8), np.array([0.5])], [3, 1, 255, 0.5]),
        ([np.array([[1, 2]], np.uint8)], [[1, 2]]),
        ([{"value": 1}.values(), {"value": 2}.values()], [1, 2]),
        ([{"value": 1, "action_dim": 4}, {"value": 3, "action_dim": 4}], ([1, 3], 4)),
        ([([1, 3], 4), ([0], 4)], ([1, 3, 0], 4)),
    ],
)
def test_histogram_flattens_values_of_all_levels(values, expected):
    assert histogram(values) == expected


def test_numbers_that_come_as_arrays_count_as_those_in_lists():
    count, total, angle = (
        LogStatsKey(BaseEnvEvents.reward, "count", None),
        LogStatsKey(BaseEnvEvents.reward, "sum", None),
        LogStatsKey(CuttingEvents.profit, None, None),
    )
    columns = [{count: [3, 4], total: [0.1, -2.7], angle: [1, 2]}, {count: [1], total: [0.3], angle: [7]}]
    as_lists, as_arrays = (LogStatsAggregator(LogStatsLevel.EPOCH) for _ in range(2))
    for _ in range(2):  # cumulative statistics go on
        for number, of_periods in enumerate(columns):
            as_lists.receive_columns(of_periods, len(of_periods[count]))
            as_arrays.receive_columns(
                {key: np.array(values) for key, values in of_periods.items()}, len(of_periods[count])
            )
            single = {key: values[0] for key, values in of_periods.items()}
            as_lists.receive(single)
            as_arrays.receive(single)
            if number:
                assert as_arrays.state() == as_lists.state()
                as_arrays.receive_columns({key: np.array(values) for key, values in columns[0].items()}, 2)
                as_lists.receive_columns(columns[0], 2)
        assert as_arrays.reduce() == as_lists.reduce()
    for received in (columns[0], {key: np.array(values) for key, values in columns[0].items()}):
        as_arrays.receive_columns(received, 2)
    as_arrays.clear_inputs()
    assert not as_arrays.has_received
    assert not any(values for row in as_arrays.state()["rows"] for values in row["inputs"].values())


@pytest.mark.parametrize("values", [*itertools.permutations([0.5, np.nan, 1.0])])
def test_a_kpi_that_is_unknown_in_some_episodes_is_unknown_whatever_their_order(values):
    """Python's own `min` and `max` return NaN only where it comes first."""
    epoch = LogStatsAggregator(LogStatsLevel.EPOCH)
    for value in values:
        epoch.receive({LogStatsKey(BaseEnvEvents.kpi, None, ("cost_per_order",)): value})
    found = {key.output_name: value for key, value in epoch.reduce().items()}
    assert found.keys() == {"mean", "std", "min", "max"}
    assert np.isnan([*found.values()]).all()


class Machines(ABC):
    @define_epoch_stats(np.mean)
    @define_episode_stats(sum)
    @define_step_stats(sum, input_name="profit")
    @define_step_stats(sum, input_name="waste")
    def unnamed(self, profit, waste):
        """Two inputs, no names."""

    @define_epoch_stats(max, output_name="best")
    @define_epoch_stats(np.mean, input_name="total_waste")
    @define_epoch_stats(np.mean, input_name="total_profit")
    @define_episode_stats(sum, input_name="profit", output_name="total")
    @define_episode_stats(sum, input_name="waste", output_name="total")
    @define_step_stats(sum, input_name="profit", output_name="profit")
    @define_step_stats(sum, input_name="waste", output_name="waste")
    def same_name(self, profit, waste):
        """Two inputs, one name; the level above asks for both, and for one that there is not."""

    @define_epoch_stats(max)
    @define_epoch_stats(min)
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def functions(self, value):
        """Two functions of the same input."""

    @define_epoch_stats(lambda values: values[0])
    @define_epoch_stats(lambda values: values[-1])
    @define_epoch_stats(sum, output_name="sum")
    @define_epoch_stats(sum, output_name="sum")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def alike(self, value):
        """Functions without a name, and one definition twice."""

    @define_epoch_stats(np.mean, input_name="time")
    @define_epoch_stats(np.mean, input_name="percent")
    def fired_on_the_epoch_level(self, time, percent):
        """As trainers do."""


def machine_stats(event, *calls):
    epoch = LogStatsAggregator(LogStatsLevel.EPOCH)
    episode = LogStatsAggregator(LogStatsLevel.EPISODE, epoch)
    step = LogStatsAggregator(LogStatsLevel.STEP, episode)
    for call in calls:
        getattr(step.create_event_topic(Machines), event)(*call)
        step.reduce()
        episode.reduce(n_periods=1)
    return {key.output_name: value for key, value in epoch.reduce().items()}


def test_statistics_that_differ_only_in_their_input_both_exist_up_to_the_epoch():
    assert machine_stats("unnamed", (1, 10), (3, 30)) == {"profit": 2.0, "waste": 20.0}


def test_statistics_of_one_name_are_available_by_their_full_names():
    with_full_names = machine_stats("same_name", (1, 10), (3, 30))
    assert with_full_names == {"total_profit": 2.0, "total_waste": 20.0}


def test_several_functions_of_one_input_are_named_after_the_functions():
    assert machine_stats("functions", (1,), (3,)) == {"min": 1, "max": 3}


def test_functions_without_a_name_are_numbered_and_a_repeated_definition_counts_once():
    assert machine_stats("alike", (1,), (3,)) == {"sum": 4, None: 3, "value_2": 1}


def test_events_of_trainers_are_named_after_their_inputs():
    epoch = LogStatsAggregator(LogStatsLevel.EPOCH)
    epoch.create_event_topic(Machines).fired_on_the_epoch_level(2.0, 50.0)
    stats = {key.output_name: value for key, value in epoch.reduce().items()}
    assert stats == {"percent": 50.0, "time": 2.0}


@given(
    stats=st.lists(
        st.tuples(
            st.sampled_from([sum, min, max]),
            st.sampled_from(["a", "b", None]),
            st.sampled_from(["a", "b", "a_b", "sum", None]),
        ),
        max_size=8,
        unique=True,
    )
)
def test_no_statistic_ever_replaces_another(stats):
    def event(self, a, b):
        """An event."""

    for function, input_name, output_name in stats:
        define_epoch_stats(function, input_name, output_name)(event)
    names = [stat.output_name for stat in event_definition(event).epoch]
    assert len(set(names)) == len(names) == len(stats)
    declared = [output_name for _, _, output_name in stats]
    for (_, _, output_name), name in zip(stats, names, strict=True):
        assert name == output_name or declared.count(output_name) > 1  # not renamed without need


def test_an_aggregator_restored_from_its_state_continues_exactly():
    def play(levels, n):
        for index in range(n):
            if index % 2:
                levels.topic.cut(2, 3)
            levels.topic.pieces(index)
            levels.step.reduce()
            levels.episode.reduce(n_periods=1)

    uninterrupted, first, second = Hierarchy(), Hierarchy(), Hierarchy()
    play(uninterrupted, 3)
    play(first, 3)
    second.epoch.load_state(first.epoch.state())
    play(uninterrupted, 4)
    play(second, 4)
    assert second.epoch.reduce() == uninterrupted.epoch.reduce()


def test_cumulative_statistics_of_a_copy_and_of_a_stored_state_are_independent_of_the_original():
    original, copy, restored = (LogStatsAggregator(LogStatsLevel.EPOCH) for _ in range(3))
    median = LogStatsKey(CuttingEvents.profit, "median_so_far", None)

    def epoch(aggregator, value):
        aggregator.add_value(CuttingEvents.profit, value)
        return aggregator.reduce()[median]

    assert epoch(original, 1) == 1
    copy.copy_inputs_from(original)
    state = original.state()
    assert epoch(copy, 101) == 51  # the median of 1 and 101
    assert epoch(original, 3) == 2  # of 1 and 3
    restored.load_state(state)
    assert epoch(restored, 5) == 3  # of 1 and 5


def test_a_statistic_without_values_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Two episode statistics have names, so that an epoch statistic must state which of them it reduces."""

    class SalesEvents(ABC):
        @define_epoch_stats(np.mean, output_name="unread")
        @define_epoch_stats(np.mean, input_name="total", output_name="read")
        @define_episode_stats(sum, output_name="total")
        @define_episode_stats(max, output_name="largest")
        @define_step_stats(None)
        def lost(self, units):
            """One value per sale."""

    epoch = LogStatsAggregator(LogStatsLevel.EPOCH)
    episode = LogStatsAggregator(LogStatsLevel.EPISODE, epoch)
    assert [found.message for found in caplog.records] == []
    for units in (1, 2):
        episode.add_value(SalesEvents.lost, units)
    episode.reduce()
    assert {key.output_name: value for key, value in epoch.reduce().items()} == {"read": 3}
    (warning,) = caplog.records
    assert "SalesEvents.lost: a statistic of each epoch has no values" in warning.message
    assert "input_name=None is no statistic of each episode; these are ['largest', 'total']." in warning.message
