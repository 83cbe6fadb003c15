"""Statistics contexts and the writers, their behaviour on a full disk included."""

# Event interfaces have no abstract methods: topics implement all of them.

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
from abc import ABC
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.log_events.log_events_writer_registry import LogEventsWriterRegistry
from maze.core.log_events.log_events_writer_tsv import LogEventsWriterTSV
from maze.core.log_events.monitoring_events import ActionEvents, DiscreteActionEvents, ObservationEvents, RewardEvents
from maze.core.log_stats.event_decorators import define_epoch_stats, define_plot
from maze.core.log_stats.log_stats import (
    GlobalLogState,
    LogStatsAggregator,
    LogStatsKey,
    LogStatsLevel,
    LogStatsWriter,
    StatsContext,
    get_stats_logger,
    increment_log_step,
    log_stats,
    register_log_stats_writer,
)
from maze.core.log_stats.log_stats_writer_console import LogStatsWriterConsole, format_value
from maze.core.log_stats.log_stats_writer_tensorboard import LogStatsWriterTensorboard
from maze.utils.log_stats_utils import clear_global_state, setup_logging
from maze.utils.tensorboard_reader import read_event_file, tensorboard_to_pandas

STATS = {
    LogStatsKey(BaseEnvEvents.reward, "mean", None): 21.5,
    LogStatsKey(BaseEnvEvents.kpi, "max", ("usage",)): np.float64(0.25),
    LogStatsKey(DiscreteActionEvents.action, None, ("substep_0", "action")): [0, 1, 1],
}


class Kept(LogStatsWriter):
    def __init__(self):
        self.written = []
        self.is_closed = False

    def write(self, path, step, stats):
        self.written.append((path, step, stats))

    def close(self):
        self.is_closed = True


def test_statistics_are_written_with_the_number_of_the_log_step():
    with StatsContext() as stats:
        writer = Kept()
        register_log_stats_writer(writer)
        steps_seen = []
        stats.hooks.append(lambda: steps_seen.append(GlobalLogState.global_step))
        logger = get_stats_logger("train")
        logger.receive(STATS)
        log_stats(STATS, "eval")
        increment_log_step()
        logger.receive(STATS)
    assert [(path, step) for path, step, _ in writer.written] == [("train", 1), ("eval", 1), ("train", 2)]
    assert steps_seen == [1]
    assert writer.is_closed


def test_nested_statistics_contexts_are_separate():
    with StatsContext() as outer:
        outer_writer = Kept()
        register_log_stats_writer(outer_writer)
        increment_log_step()
        with StatsContext():
            inner_writer = Kept()
            register_log_stats_writer(inner_writer)
            log_stats(STATS, "inner")
            assert GlobalLogState.global_log_stats_writers == [inner_writer]
        log_stats(STATS, "outer")
        assert outer.step == 2
        assert not outer_writer.is_closed
    assert [(path, step) for path, step, _ in inner_writer.written] == [("inner", 1)]
    assert [(path, step) for path, step, _ in outer_writer.written] == [("outer", 2)]


def test_runs_in_two_threads_do_not_share_statistics():
    barrier = threading.Barrier(2)
    written = {}

    def run(name):
        with StatsContext():
            writer = Kept()
            register_log_stats_writer(writer)
            barrier.wait()
            log_stats(STATS, name)
            increment_log_step()
            barrier.wait()
            log_stats(STATS, name)
            written[name] = [(path, step) for path, step, _ in writer.written]

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written == {"a": [("a", 1), ("a", 2)], "b": [("b", 1), ("b", 2)]}


def test_a_worker_thread_logs_into_the_run_that_is_open():
    with StatsContext(), StatsContext():
        writer = Kept()
        register_log_stats_writer(writer)
        thread = threading.Thread(target=log_stats, args=(STATS, "worker"))
        thread.start()
        thread.join()
    assert [path for path, _, _ in writer.written] == ["worker"]


def test_without_any_setup_statistics_go_nowhere_without_an_error():
    clear_global_state()
    log_stats(STATS, "train")
    increment_log_step()
    clear_global_state()
    assert GlobalLogState.global_step == 1


def test_clearing_the_global_state_closes_writers_and_removes_hooks():
    with StatsContext():
        writer = Kept()
        register_log_stats_writer(writer)
        GlobalLogState.hook_on_log_step.append(pytest.fail)
        GlobalLogState.global_step = 7
        clear_global_state()
        increment_log_step()
        log_stats(STATS, "train")
        assert GlobalLogState.global_step == 2
    assert writer.is_closed
    assert not writer.written


def test_the_console_prints_one_header_per_log_step_and_prefix(capsys):
    console = LogStatsWriterConsole()
    one = {LogStatsKey(BaseEnvEvents.reward, None, None): 1}
    for path, step in (("train", 1), ("train", 1), ("eval", 1), ("eval", 2)):
        console.write(path, step, one)
    console.write("eval", 3, {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith(" step|path") for line in lines].count(True) == 3
    assert len(lines) == 3 * 2 + 4
    row = (
        "    1|train                 BaseEnvEvents         reward                " + "·" * 22 + "|" + " " * 15 + "1.000"
    )
    assert lines[2] == lines[3] == row


def test_long_names_are_cut_so_that_columns_stay_in_line(capsys):
    class MultiStepActorCriticEvents(ABC):
        def a_name_of_twenty_one_(self, value):
            pass

    LogStatsWriterConsole().write(
        "p" * 30, 12345, {LogStatsKey(MultiStepActorCriticEvents.a_name_of_twenty_one_, "x", (0, "y")): 2}
    )
    assert capsys.readouterr().out.splitlines()[2] == (
        "12345|"
        + "p" * 20
        + "..MultiStepActorCritic..a_name_of_twenty_one..x/0/y"
        + " " * 17
        + "|"
        + " " * 15
        + "2.000"
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "3.000"),
        (np.float32(-0.0004), "-0.000"),
        (np.array([2.5]), "[len:1, μ:2.5]"),
        (np.array(2.5), "2.500"),
        ([1, 2], "[len:2, μ:1.5]"),
        (([1, 2, 3], 5), "[len:3, μ:2.0]"),
        ([(1, 4), (3, 4)], "[len:2, μ:2.0]"),
        ([np.array([1.0, 2.0]), np.array([3.0])], "[len:3, μ:2.0]"),
        (float("nan"), "nan"),
        ("text", "text"),
    ],
)
def test_values_are_shown_as_documented(value, expected):
    assert format_value(value) == expected


def test_a_console_without_greek_letters_shows_question_marks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    LogStatsWriterConsole().write("train", 1, {LogStatsKey(BaseEnvEvents.reward, None, None): [1, 2]})
    assert raw.getvalue().decode("ascii").endswith("?" * 22 + "|" + " " * 6 + "[len:2, ?:1.5]\n")


def event_file(directory):
    (file,) = directory.glob("events.out.tfevents.*")
    return file


def test_tensorboard_files_hold_documented_sections_histograms_texts_and_figures(tmp_path, monkeypatch):
    class Events(ABC):
        @define_plot(lambda value: pytest.fail("of another statistic"), input_name="other")
        @define_plot(lambda value, groups: None if groups else 1 / 0)
        @define_epoch_stats(max)
        def odd(self, value):
            pass

    monkeypatch.setattr(sys, "argv", ["maze-run", "-cn", "conf_train", "env.name=Cart Pole"])
    actions = LogStatsKey(ActionEvents.discrete_action, None, (0, 0, "action"))
    continuous = LogStatsKey(ActionEvents.continuous_action, None, (0, 0, "force"))
    with StatsContext():
        setup_logging(OmegaConf.create({"algorithm": {"lr": 0.5}}), log_dir=tmp_path)
        log_stats(STATS, "train")
        log_stats({actions: ([0, 2, 2], 4), continuous: [np.array([0.0, 1.0]), np.array([0.5, 1.0])]}, "train")
        log_stats({LogStatsKey(Events.odd, None, ("group",)): 1}, "train")
        increment_log_step()
        log_stats(STATS, "eval")
    table = tensorboard_to_pandas(event_file(tmp_path))
    assert table["value"].to_dict() == {
        ("train_BaseEnvEvents/reward/mean", 1): 21.5,
        ("train_BaseEnvEvents/kpi/max/usage", 1): 0.25,
        ("train_Events/odd/group", 1): 1.0,
        ("eval_BaseEnvEvents/reward/mean", 2): 21.5,
        ("eval_BaseEnvEvents/kpi/max/usage", 2): 0.25,
        # the step that is not over yet counts when it is
        ("Results/best_reward", 1): 21.5,
        ("Results/final_reward", 1): 21.5,
    }
    values = {v.tag: v for e in read_event_file(event_file(tmp_path)).events for v in e.summary.value if e.step < 2}
    histogram = values["train_DiscreteActionEvents/action/substep_0/action"].histo
    assert (histogram.num, histogram.sum, sum(histogram.bucket)) == (3, 2, 3)
    texts = {tag: v.tensor.string_val[0].decode() for tag, v in values.items() if tag.endswith("/text_summary")}
    assert texts == {
        "job_config/text_summary": "    algorithm:\n      lr: 0.5",
        "command/text_summary": "    maze-run -cn conf_train 'env.name=Cart Pole'",
    }
    images = {
        v.tag for e in read_event_file(event_file(tmp_path)).events for v in e.summary.value if v.HasField("image")
    }
    actions = "train_ActionEvents/discrete_action/0/0/action", "train_ActionEvents/continuous_action/0/0/force"
    assert images == {f"{tag}/figure" for tag in actions}


def test_tensorboard_itself_reads_the_files(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with StatsContext():
        setup_logging("lr: 0.5", log_dir=tmp_path, tensorboard_render_figure=False)
        log_stats(STATS, "train")
    accumulator = event_accumulator.EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [event.value for event in accumulator.Scalars("train_BaseEnvEvents/reward/mean")] == [21.5]
    assert accumulator.Histograms("train_DiscreteActionEvents/action/substep_0/action")[0].histogram_value.num == 3
    assert set(accumulator.Tags()["tensors"]) == {"job_config/text_summary", "command/text_summary"}


@pytest.mark.parametrize(
    "rewards",
    [
        [0.3, 0.1 + 0.2],  # the same sum in another order
        [1e17, 1e17],  # floats of this size are 16 apart
        [0.0, 5e-324],
        [-2.0, 3.0],
    ],
)
def test_rewards_that_differ_by_rounding_have_a_histogram_and_a_figure(tmp_path, rewards):
    with StatsContext():
        setup_logging("lr: 0.5", log_dir=tmp_path)
        log_stats({LogStatsKey(RewardEvents.reward_original, None, None): rewards}, "train")
    values = {v.tag: v for event in read_event_file(event_file(tmp_path)).events for v in event.summary.value}
    histogram = values["train_RewardEvents/reward_original"].histo
    assert (histogram.min, histogram.max, sum(histogram.bucket)) == (*rewards, len(rewards))
    assert all(np.diff(histogram.bucket_limit) > 0)
    assert values["train_RewardEvents/reward_original/figure"].HasField("image")


def test_a_figure_that_cannot_be_rendered_causes_one_warning(tmp_path, caplog):
    class Events(ABC):
        @define_plot(lambda value: 1 / 0)
        @define_epoch_stats(max)
        def broken(self, value):
            pass

    with StatsContext():
        register_log_stats_writer(LogStatsWriterTensorboard(tmp_path, tensorboard_render_figure=True))
        for _ in range(3):
            log_stats({LogStatsKey(Events.broken, None, None): 1}, "train")
            increment_log_step()
    assert len(caplog.records) == 1
    assert "Events/broken" in caplog.text
    assert len(tensorboard_to_pandas(tmp_path)) == 3


def test_setting_up_again_replaces_the_earlier_writers_and_starts_at_step_one(tmp_path, capsys):
    with StatsContext() as stats:
        setup_logging(None, tmp_path / "a")
        other = Kept()
        register_log_stats_writer(other)
        log_stats(STATS, "train")
        increment_log_step()
        setup_logging(None, tmp_path / "b")
        log_stats(STATS, "train")
        assert len(stats.writers) == 3
    assert capsys.readouterr().out.count("step|path") == 2
    assert [step for _, step, _ in other.written] == [1, 1]
    assert tensorboard_to_pandas(tmp_path / "b").index[0] == ("train_BaseEnvEvents/reward/mean", 1)


def five_steps(directory):
    writer = LogStatsWriterTensorboard(directory, tensorboard_render_figure=False)
    for step in range(1, 6):
        writer.write("x", step, {LogStatsKey(BaseEnvEvents.reward, None, None): step})
    writer.close()
    return event_file(directory)


def test_a_cut_off_event_file_is_read_up_to_the_cut_and_the_loss_is_reported(tmp_path, caplog):
    file = five_steps(tmp_path)
    file.write_bytes(file.read_bytes()[:-3])
    table = tensorboard_to_pandas(file)
    assert table["value"].tolist() == [1, 2, 3, 4]
    assert str(file) in caplog.text


def test_every_single_flipped_byte_is_noticed_and_the_records_before_it_are_read(tmp_path):
    file = five_steps(tmp_path)
    intact = file.read_bytes()
    expected = read_event_file(file).events
    for position in range(len(intact)):
        damaged = bytearray(intact)
        damaged[position] ^= 0x10
        file.write_bytes(damaged)
        content = read_event_file(file)
        assert content.events == expected[: len(content.events)]
        assert len(content.events) < len(expected)
        assert content.damage, position


@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html>" * 20])
def test_an_empty_or_foreign_event_file_gives_an_empty_table(tmp_path, content, caplog):
    file = tmp_path / "events.out.tfevents.1"
    file.write_bytes(content)
    assert len(tensorboard_to_pandas(file)) == 0
    assert ("is damaged" in caplog.text) == bool(content)


@pytest.mark.parametrize("fault", ["full disk", "no directory"])
def test_a_full_disk_causes_one_warning_and_never_an_error(tmp_path, caplog, monkeypatch, fault):
    directory = tmp_path / "file" / "logs"
    if fault == "full disk":
        if not Path("/dev/full").exists():
            pytest.skip("needs /dev/full")
        full = open("/dev/full", "wb")  # noqa: SIM115  # the writer closes it
        monkeypatch.setattr(Path, "open", lambda self, *_, **__: full)
    else:
        (tmp_path / "file").write_text("not a directory")
    healthy = Kept()
    with caplog.at_level(logging.WARNING), StatsContext() as stats:
        register_log_stats_writer(LogStatsWriterTensorboard(directory, tensorboard_render_figure=False))
        register_log_stats_writer(healthy)
        for _ in range(3):
            log_stats(STATS, "train")
            increment_log_step()
        assert stats.step == 4
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "LogStatsWriterTensorboard" in caplog.text
    assert len(healthy.written) == 3
    if fault == "full disk":
        assert full.closed


def test_setting_up_logging_in_an_unwritable_directory_is_one_warning(tmp_path, caplog, capsys):
    (tmp_path / "file").write_text("not a directory")
    with StatsContext():
        setup_logging({"a": 1}, tmp_path / "file" / "logs")
        log_stats(STATS, "train")
        increment_log_step()
    assert len(caplog.records) == 1
    assert "21.500" in capsys.readouterr().out


def test_event_logs_on_a_full_disk_are_one_warning(tmp_path, caplog):
    from maze.core.log_events.episode_event_log import EpisodeEventLog

    (tmp_path / "file").write_text("not a directory")
    with StatsContext():
        LogEventsWriterRegistry.register_writer(LogEventsWriterTSV(tmp_path / "file"))
        for _ in range(3):
            LogEventsWriterRegistry.record_event_logs(EpisodeEventLog("id"))
    assert len(caplog.records) == 1


def test_errors_unrelated_to_the_disk_are_raised():
    class Broken(LogStatsWriter):
        def write(self, path, step, stats):
            raise ValueError("a bug")

    with StatsContext():
        register_log_stats_writer(Broken())
        with pytest.raises(ValueError, match="a bug"):
            log_stats(STATS, "train")


def test_monitoring_events_keep_distributions_by_group():
    epoch = LogStatsAggregator(LogStatsLevel.EPOCH)
    episode = LogStatsAggregator(LogStatsLevel.EPISODE, epoch)
    step = LogStatsAggregator(LogStatsLevel.STEP, episode)
    actions, observations, rewards = (
        step.create_event_topic(interface) for interface in (ActionEvents, ObservationEvents, RewardEvents)
    )
    for value in (1, 3):
        actions.discrete_action(step_key=0, agent_name=0, name="a", value=value, action_dim=4)
        actions.continuous_action(step_key=0, agent_name=0, name="c", value=np.full(2, value))
        observations.observation_original(step_key=0, agent_name=0, name="o", value=np.full(3, value))
        rewards.reward_original(value)
        step.reduce()
    episode.reduce()
    stats = {key.event.__name__: value for key, value in epoch.reduce().items()}
    assert stats["discrete_action"] == ([1, 3], 4)
    assert np.stack(stats["continuous_action"]).tolist() == [[1, 1], [3, 3]]
    assert format_value(stats["observation_original"]) == "[len:6, μ:2.0]"
    assert stats["reward_original"] == [1, 3]


def test_importing_the_statistics_brings_no_heavy_package():
    code = (
        "import sys, maze.core.log_stats.log_stats, maze.core.log_events.monitoring_events, "
        "maze.utils.log_stats_utils, maze.core.wrappers.log_stats_wrapper, maze.utils.tensorboard_reader\n"
        "print([m for m in ('torch', 'matplotlib', 'pandas', 'tensorboard', 'hydra', 'omegaconf') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_figures_stay_out_of_pyplots_registry():
    import matplotlib as mpl

    from maze.core.log_events import log_create_figure_functions as figures

    mpl.use("agg")
    import matplotlib.pyplot as plt

    plt.close("all")  # of tests before

    for function, value in (
        (figures.create_categorical_plot, [(0, 3), (2, 3)]),
        (figures.create_categorical_plot, [0.5, 1.5]),
        (figures.create_histogram, [1, 2, 3]),
        (figures.create_relative_bar_plot, [(0, 3), (2, 3)]),
        (figures.create_violin_distribution, [np.array([0.0, 1.0]), np.array([0.0, 2.0])]),
    ):
        figure = function(value, groups=("a",))
        png = io.BytesIO()
        figure.savefig(png)
        assert png.getvalue().startswith(b"\x89PNG")
    bars = figures.create_relative_bar_plot([(0, 3), (2, 3), (2, 3)]).axes[0].patches
    assert [round(bar.get_height(), 3) for bar in bars] == [0.333, 0.0, 0.667]
    (outline,) = figures.create_relative_bar_plot([(0, 200), (7, 200)]).axes[0].patches
    assert np.flatnonzero(outline.get_data().values).tolist() == [0, 7]
    assert (outline.get_data().values[7], outline.get_data().edges[7:9].tolist()) == (0.5, [6.5, 7.5])
    assert not plt.get_fignums()


def test_writers_and_hooks_of_the_active_context_can_be_assigned_read_and_appended():
    calls = []
    with StatsContext() as context:
        own_hooks = [lambda: calls.append("first")]
        GlobalLogState.hook_on_log_step = own_hooks
        GlobalLogState.hook_on_log_step.append(lambda: calls.append("second"))
        assert GlobalLogState.hook_on_log_step is own_hooks
        GlobalLogState.global_log_stats_writers = [recorder := Kept()]
        assert GlobalLogState.global_log_stats_writers == context.writers == [recorder]
        LogEventsWriterRegistry.writers = [event_writer := object()]
        assert LogEventsWriterRegistry.writers == context.event_writers == [event_writer]
        with StatsContext():
            assert LogEventsWriterRegistry.writers == GlobalLogState.global_log_stats_writers == []
            assert GlobalLogState.hook_on_log_step == []
        log_stats({}, "train")
        increment_log_step()
        assert len(recorder.written) == 1
        clear_global_state()
        assert GlobalLogState.hook_on_log_step == []
    assert calls == ["first", "second"]
    assert len(own_hooks) == 2  # a list that was handed in stays as it is
