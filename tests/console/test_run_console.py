"""What a run shows of its statistics: a short table."""

from __future__ import annotations

import io
import re

import pytest

from maze.console.runs import Progressed, RunConsole, checked_verbosity
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStatsKey
from maze.core.log_stats.stats_format import significant
from maze.train.trainers.common.actor_critic.actor_critic_events import ActorCriticEvents


def reward(name):
    return LogStatsKey(BaseEnvEvents.reward, name, None)


def kpi(name, statistic="mean"):
    return LogStatsKey(BaseEnvEvents.kpi, statistic, (name,))


EPISODES = {reward("mean_step_count"): 20.0, reward("std"): 1.46512, reward("mean"): -71.95, reward("max"): -70.0}
KPIS = {kpi("usage", "std"): 0.0071, kpi("usage"): 0.36041, kpi("waste"): 12.0}
LEARNING = {
    LogStatsKey(ActorCriticEvents.time_rollout, None, None): 1.0,
    LogStatsKey(ActorCriticEvents.learning_rate, None, None): 0.00025,
    LogStatsKey(ActorCriticEvents.policy_grad_norm, None, (0,)): 0.5,
    LogStatsKey(ActorCriticEvents.policy_loss, None, (0,)): -0.01234567,
    LogStatsKey(ActorCriticEvents.policy_loss, None, (1,)): 1e-5,
    LogStatsKey(ActorCriticEvents.critic_value_loss, None, (0,)): 116.708,
}
PROGRESSED = Progressed(3, 50, 12_000, 4.219, "2,843 environment steps/s", "9 min", "-71.95")


def console(*stats, **arguments):
    console = RunConsole(**arguments)
    console.write("eval", 3, {reward("mean"): -71.0, reward("std"): 0.5})
    for some in stats:
        console.write("train", 3, some)
    return console


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.00025, "2.5e-4"),
        (0.0123456, "0.01235"),
        (-71.95, "-71.95"),
        (0.1 + 0.2, "0.3"),
        (1234.5678, "1,235"),
        (1234567.0, "1,234,567"),
        (98064.25, "98,064"),
        (2.0**40, "1.1e12"),
        (9.99999, "10"),
        (0.0, "0"),
        (-1e-12, "-1e-12"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers_have_four_significant_digits_and_none_is_rounded_to_nothing(number, text):
    assert significant(number) == text


def test_the_table_has_returns_lengths_kpis_and_losses_of_each_prefix():
    assert console(EPISODES, KPIS, LEARNING).cells() == {
        "return": {"train": "-71.95 ± 1.47", "eval": "-71 ± 0.5"},
        "episode length": {"train": "20", "eval": "-"},
        "usage": {"train": "0.3604 ± 0.0071", "eval": "-"},
        "waste": {"train": "12", "eval": "-"},
        "policy_loss": {"train": "-0.01235 / 1e-5", "eval": "-"},
        "critic_value_loss": {"train": "116.7", "eval": "-"},
        "policy_grad_norm": {"train": "0.5", "eval": "-"},
        "learning_rate": {"train": "2.5e-4", "eval": "-"},
    }


def test_there_are_at_most_eight_rows_of_statistics_three_of_them_kpis():
    many = {kpi(f"k{number}"): 1.0 for number in range(5)}
    labels = [*console(EPISODES, many, LEARNING).cells()]
    assert len(labels) <= 8
    assert [label for label in labels if label.startswith("k")] == ["k0", "k1", "k2"]


def test_the_table_has_a_heading_the_best_score_and_the_rate():
    head, columns, first, *_, rate, duration = console(EPISODES, KPIS, LEARNING).table(PROGRESSED)
    assert head == "epoch 3/50, 12,000 environment steps, best -71.95, about 9 min left"
    assert columns.split() == ["train", "eval"]
    assert re.split(r"\s{2,}", first.strip()) == ["return", "-71.95 ± 1.47", "-71 ± 0.5"]
    assert (rate.split(), duration.split()) == (["environment", "steps/s", "2,843"], ["time", "4.22", "s"])


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [30, 80, 120])
def test_no_line_of_a_terminal_is_wider_than_it(width, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    many = {kpi("a very long name of an indicator of this environment"): 1.0, kpi("x" * 200): 2.0}
    console(EPISODES, many, LEARNING).epoch_done(PROGRESSED)
    lines = terminal.getvalue().splitlines()
    assert lines[0].startswith("epoch 3/50")
    assert len(lines) > 6
    assert max(map(len, lines)) <= width


def test_rows_are_chosen_by_name_event_or_column():
    rows = ("waste", "learning_rate", "policy_loss", "BaseEnvEvents/reward/max", "usgae")
    shown = console(EPISODES, KPIS, LEARNING, rows=rows)
    assert [figures["train"] for figures in shown.cells().values()] == ["12", "2.5e-4", "-0.01235 / 1e-5", "-70", "-"]


def test_tables_come_at_intervals_and_the_last_one_at_the_end(capsys):
    now = [0.0]
    shown = console(EPISODES, interval=5.0, clock=lambda: now[0])
    for epoch in range(1, 9):
        shown.epoch_done(PROGRESSED._replace(epoch=epoch))
        now[0] += 2.0
    shown.finish()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert [line.partition(",")[0] for line in lines] == [f"epoch {epoch}/50" for epoch in (1, 4, 7, 8)]
    shown.finish()
    assert capsys.readouterr().out == ""


def test_statistics_of_an_earlier_log_step_are_not_shown_as_those_of_this_one():
    shown = console(EPISODES)
    shown.write("train", 4, LEARNING)
    assert shown.cells()["policy_loss"]["train"] == "-0.01235 / 1e-5"
    assert shown.cells()["return"]["train"] == "-"


@pytest.mark.parametrize("value", [3, -1, "2", True, None, 1.5, 1.0])
def test_other_verbosities_are_refused(value):
    with pytest.raises(ConfigError, match=r"^verbose: expected 0 .*, 1 .* or 2 .*, found "):
        checked_verbosity(value)
