"""Event logs of episodes and their tables."""

# Event interfaces have no abstract methods: topics implement all of them.

from __future__ import annotations

import csv
import json
from abc import ABC

import numpy as np
import pandas as pd
import pytest

from maze.core.events.event_collection import EventCollection
from maze.core.events.event_record import EventRecord
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_events.log_events_utils import SimpleEventLoggingSetup
from maze.core.log_events.log_events_writer import LogEventsWriter
from maze.core.log_events.log_events_writer_registry import LogEventsWriterRegistry
from maze.core.log_events.log_events_writer_tsv import LogEventsWriterTSV
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.log_stats.log_stats import StatsContext
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv


class Events(ABC):
    def cut(self, piece, note):
        pass

    def stopped(self):
        pass


def cut(piece, note=""):
    return EventRecord(Events, Events.cut, {"piece": piece, "note": note})


def stopped():
    return EventRecord(Events, Events.stopped, {})


def episode_log(episode_id="one"):
    log = EpisodeEventLog(episode_id)
    first = StepEventLog(0, EventCollection([cut((1, 2), 'with\ttab, "quotes"\nand a line')]))
    second = StepEventLog(1)
    second.append(stopped())
    second.extend([cut((3, 4))])
    log.step_event_logs += [first, second, StepEventLog(2)]
    log.episode_events.append(cut("summary"))
    return log


def test_queries_of_an_episode_go_over_all_steps_in_order():
    log = episode_log()
    assert [r.attributes["piece"] for r in log.query_events(Events.cut)] == [(1, 2), (3, 4), "summary"]
    methods = [r.interface_method for r in log.query_events(iter([Events.cut, Events.stopped]))]
    assert methods == [Events.cut, Events.stopped, Events.cut, Events.cut]


def test_each_event_has_its_table_with_one_row_per_occurrence(tmp_path):
    writer = LogEventsWriterTSV(tmp_path / "event_logs")
    writer.write(episode_log("one"))
    writer.write(episode_log("two"))
    assert sorted(file.name for file in (tmp_path / "event_logs").iterdir()) == ["Events.cut.tsv", "Events.stopped.tsv"]
    with (tmp_path / "event_logs" / "Events.cut.tsv").open(newline="") as stream:
        rows = list(csv.reader(stream, delimiter="\t"))
    assert rows[0] == ["episode_id", "env_time", "piece", "note"]
    assert rows[1] == ["one", "0", "(1, 2)", 'with\ttab, "quotes"\nand a line']
    assert [row[:3] for row in rows[2:]] == [
        ["one", "1", "(3, 4)"],
        ["one", "", "summary"],
        ["two", "0", "(1, 2)"],
        ["two", "1", "(3, 4)"],
        ["two", "", "summary"],
    ]


def test_arrays_are_written_with_all_their_numbers(tmp_path):
    log, pieces = EpisodeEventLog("one"), np.linspace(0.0, 1.0, 3000).reshape(2, 1500)
    log.episode_events.append(cut(pieces, np.array(3)))
    LogEventsWriterTSV(tmp_path).write(log)
    table = pd.read_csv(tmp_path / "Events.cut.tsv", sep="\t")
    np.testing.assert_array_equal(json.loads(table["piece"][0]), pieces)
    assert table["note"].tolist() == [3]


def test_writers_belong_to_the_active_context():
    class Kept(LogEventsWriter):
        def __init__(self):
            self.ids = []

        def write(self, episode_event_log):
            self.ids.append(episode_event_log.episode_id)

    outer, inner = Kept(), Kept()
    with StatsContext():
        LogEventsWriterRegistry.register_writer(outer)
        with StatsContext():
            LogEventsWriterRegistry.register_writer(inner)
            LogEventsWriterRegistry.record_event_logs(EpisodeEventLog("inside"))
        LogEventsWriterRegistry.record_event_logs(EpisodeEventLog("outside"))
        assert LogEventsWriterRegistry.writers == [outer]
    assert (inner.ids, outer.ids) == (["inside"], ["outside"])


def test_simple_event_logging_writes_all_episodes_of_the_block_the_last_one_included(tmp_path):
    env = LogStatsWrapper(GymMazeEnv("CartPole-v1"))
    env.seed(1)
    with SimpleEventLoggingSetup(env, log_dir=tmp_path):
        for n_steps in (3, 2):
            env.reset()
            for _ in range(n_steps):
                env.step({"action": 1})
    env.reset()
    env.step({"action": 1})
    env.reset()
    table = pd.read_csv(tmp_path / "BaseEnvEvents.reward.tsv", sep="\t")
    assert table["value"].tolist() == [1.0] * 5
    assert table["env_time"].tolist() == [0, 1, 2, 0, 1]
    assert table["episode_id"].nunique() == 2
    assert pd.read_csv(tmp_path / "DiscreteActionEvents.action.tsv", sep="\t")["value"].tolist() == [1] * 5
    assert not LogEventsWriterRegistry.writers


def test_a_failing_block_leaves_no_writer_behind(tmp_path):
    env = LogStatsWrapper(GymMazeEnv("CartPole-v1"))
    with pytest.raises(ValueError, match="stop"), SimpleEventLoggingSetup(env, log_dir=tmp_path):
        raise ValueError("stop")
    assert not LogEventsWriterRegistry.writers
