"""The report that a run keeps about itself."""

from __future__ import annotations

import base64
import csv
import json
import logging
import re
from contextlib import suppress
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maze.console.runs import RunConsole
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.log_stats.log_stats import LogStatsKey, StatsContext
from maze.core.log_stats.log_stats_writer_console import LogStatsWriterConsole
from maze.core.log_stats.log_stats_writer_tensorboard import LogStatsWriterTensorboard
from maze.core.log_stats.stats_format import significant
from maze.report.page import RunData
from maze.report.progress import PROGRESS_FILE, Progress, read_progress
from maze.report.run_page import REPORT_FILE, ReportWriter, RunFacts, run_page
from maze.utils.tensorboard_reader import tensorboard_to_pandas
from tests.report.browser import NARROW, WIDE, OpenPage, accessibility_faults, cut_off, looked_at
from tests.report.test_progress import HOSTILE

MEAN = LogStatsKey(BaseEnvEvents.reward, "mean", None)
FACTS = RunFacts("run", "CartPole, ppo")


class Clock:
    """Return a given time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(stats: StatsContext, value: float, path: str = "train") -> None:
    stats.write({MEAN: value}, path)
    stats.finish_step()


def test_the_run_record_is_written_early_every_ten_seconds_and_at_the_end(tmp_path: Path) -> None:
    clock = Clock()
    writer = ReportWriter(tmp_path, FACTS, clock=clock)
    with StatsContext() as stats:
        stats.register_writer(writer)
        seen = []
        for clock.now in (0.0, 1.0, 9.9, 10.0, 19.0, 20.5):
            step(stats, clock.now)
            seen.append(len(list(read_progress(tmp_path).rows())))
        assert seen == [1, 1, 1, 4, 4, 6]
        assert 'state running">' in (tmp_path / REPORT_FILE).read_text(encoding="utf-8")
        step(stats, 7.0)
    assert len(list(read_progress(tmp_path).rows())) == 7
    assert 'state ended">' in (tmp_path / REPORT_FILE).read_text(encoding="utf-8")


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt(), "interrupted"), (ValueError(HOSTILE), "failed")])
def test_the_run_record_contains_how_the_run_ended(tmp_path: Path, error: BaseException, state: str) -> None:
    def failing_run() -> None:
        with StatsContext() as stats:
            stats.register_writer(ReportWriter(tmp_path, FACTS))
            step(stats, 1.0)
            raise error

    with pytest.raises(type(error)):
        failing_run()
    page = (tmp_path / REPORT_FILE).read_text(encoding="utf-8")
    assert f'state {state}">' in page
    assert "<img" not in page
    assert ("ValueError: waste" in page) == (state == "failed")


def test_resumed_run_includes_rows_and_time_of_the_earlier_run(tmp_path: Path) -> None:
    clock = Clock()
    for number, steps in ((1, (1, 2, 3)), (2, (3, 4))):  # the first one was killed in its third epoch
        (tmp_path / str(number)).mkdir()
        earlier = read_progress(tmp_path / "1") if number == 2 else None
        with StatsContext() as stats:
            stats.register_writer(ReportWriter(tmp_path / str(number), FACTS, earlier, clock=clock))
            for stats.step in steps:
                clock.now += 5.0
                step(stats, number)
    rows = list(read_progress(tmp_path / "2").rows())
    assert [(index, seconds) for _, index, seconds, *_ in rows] == [(1, 5), (2, 10), (3, 15), (4, 20)]
    assert [values["BaseEnvEvents/reward/mean"] for *_, values in rows] == [1, 1, 2, 2]


def test_a_run_without_logged_statistics_has_no_report(tmp_path: Path) -> None:
    with StatsContext() as stats:
        stats.register_writer(ReportWriter(tmp_path, FACTS))
    assert list(tmp_path.iterdir()) == []


def test_error_in_the_report_is_logged_once_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no picture")

    monkeypatch.setattr("maze.report.run_page.run_page", broken)
    with caplog.at_level(logging.WARNING), StatsContext() as stats:
        stats.register_writer(ReportWriter(tmp_path, FACTS, interval=0.0))
        for _ in range(3):
            step(stats, 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "ReportWriter cannot write (RuntimeError: no picture); it is disabled for this run."
    ]


@pytest.mark.parametrize(("error", "state"), [(RuntimeError("no picture"), None), (KeyboardInterrupt(), "interrupted")])
def test_only_the_run_decides_the_last_state_of_the_report(
    error: BaseException, state: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the report is none of the run; an interruption while the report is written is one."""
    errors = [error]

    def broken_once(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return run_page(*args, **kwargs)

    monkeypatch.setattr("maze.report.run_page.run_page", broken_once)
    with suppress(KeyboardInterrupt), StatsContext() as stats:
        stats.register_writer(ReportWriter(tmp_path, FACTS, interval=0.0))
        step(stats, 1.0)
    file = tmp_path / REPORT_FILE
    assert not file.exists() if state is None else f'state {state}">' in file.read_text(encoding="utf-8")


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.events: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.events += [name for name, _ in attrs if name.startswith("on")]


def hostile_page(tmp_path: Path) -> Path:
    progress = Progress()
    key = LogStatsKey(BaseEnvEvents.kpi, "mean", (HOSTILE,))
    for epoch in range(1, 4):
        progress.add("train", epoch, epoch, epoch * 10, {key: epoch, MEAN: 2.0 * epoch})
        progress.add(HOSTILE, epoch, epoch, epoch * 10, {key: epoch})
        progress.finish_step()
    texts = ((HOSTILE, HOSTILE),)
    facts = RunFacts(HOSTILE, HOSTILE, None, texts, texts, HOSTILE, texts)
    run_page(facts, progress, "ended", datetime(2026, 1, 1), HOSTILE).write(tmp_path / REPORT_FILE)
    return tmp_path / REPORT_FILE


def test_names_and_texts_of_users_stay_text(tmp_path: Path) -> None:
    found = _Tags()
    found.feed(hostile_page(tmp_path).read_text(encoding="utf-8"))
    assert "img" not in found.tags
    assert found.tags.count("script") == 2  # data, and the page's own
    assert found.events == []


@pytest.mark.slow
def test_the_page_renders_and_is_usable_with_the_keyboard(tmp_path: Path, open_page: OpenPage) -> None:
    page = open_page(hostile_page(tmp_path))
    figure = page.locator("figure").first
    figure.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert re.search(r"train 4.*at 20", figure.locator("[role=status]").text_content() or "") is not None
    assert page.locator("img").count() == 0


@pytest.mark.slow
def test_labels_of_an_axis_are_few_round_and_different(tmp_path: Path, open_page: OpenPage) -> None:
    page = open_page(hostile_page(tmp_path))

    def labels(low: float, high: float, count: int = 4, *more: Any) -> list[str]:
        found: list[list[Any]] = page.evaluate("range => ticks(...range)", [low, high, count, *more])
        return [label for _, label in found]

    assert labels(0, 1) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert labels(11.312, 11.4) == ["11.32", "11.34", "11.36", "11.38", "11.4"]
    assert labels(1, 5, 8, "step", 1) == ["1", "2", "3", "4", "5"], "there is no log step 1.5"
    assert labels(-1.7e308, 1.7e308) == ["-1e308", "0", "1e308"]
    ranges = [(0.69314, 0.693147), (-1e-9, 1e-9), (99990, 100010), (1e6, 1.0001e6), (-0.004, -0.001), (1e15, 3e15)]
    for low, high in ranges:
        found = labels(low, high)
        assert 2 <= len(set(found)) == len(found) <= 9


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_has_no_serious_accessibility_fault(tmp_path: Path, open_page: OpenPage, scheme: str) -> None:
    page = open_page(hostile_page(tmp_path), scheme=scheme)
    looked_at(page)
    assert accessibility_faults(page) == []


@pytest.mark.slow
def test_planted_page_faults_are_found(tmp_path: Path, open_page: OpenPage) -> None:
    """What the two checks are for, in frames as well; otherwise they would agree with everything."""
    inner = "<html lang=en><title>t</title><p style='color: #ddd'>pale</p>"
    wide = "<main><h1>h</h1><img src='data:,'><div style='width: 2000px'>wide</div></main>"
    frame = f'<iframe sandbox="allow-scripts" title="t" srcdoc="{inner}"></iframe>'
    (tmp_path / "bad.html").write_text(f"<html lang=en><title>t</title><body>{wide}{frame}</body>", encoding="utf-8")
    page = open_page(tmp_path / "bad.html")
    page.frame_locator("iframe").locator("p").wait_for()
    assert {fault.partition(":")[0] for fault in accessibility_faults(page)} == {"image-alt", "color-contrast"}
    assert any(fault.startswith("DIV") for fault in cut_off(page))


def page_of_a_strangers_run(directory: Path, columns: dict[str, list[str]]) -> Path:
    """The page of a run with files from an untrusted source."""
    from maze.maze_cli import main

    directory.mkdir()
    rows = [["step", "path", "seconds", "env_steps", *columns]]
    rows += [
        [str(row), "train", str(row), str(10 * row), *cells]
        for row, cells in enumerate(zip(*columns.values(), strict=True))
    ]
    with (directory / PROGRESS_FILE).open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    for name in ("hydra_config.yaml", "command.txt", "run.json", "versions.json"):
        (directory / name).write_text(f"env: {{name: {json.dumps(HOSTILE)}}}\nalgorithm: [{json.dumps(HOSTILE)}]\n")
    (directory / "run.json").write_text(json.dumps({"state": HOSTILE}))
    assert main(["--report", str(directory)]) == 0
    return directory / REPORT_FILE


LARGEST = "1.7976931348623157e308"


@pytest.mark.slow
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_page_of_untrusted_files_contains_no_active_content(tmp_path: Path, open_page: OpenPage, width: int) -> None:
    """No code of it runs, no request leaves the page, all of it is drawn, and it fits the window."""
    columns = {
        f"A/{HOSTILE}": ["1", "2", "3"],
        "A/" + "x" * 10_000: ["1", "2", "3"],
        "A/\u202eright to left\u2028\x00": ["1", "2", "3"],
        "__proto__": ["1", "2", "3"],
        "A/largest": ["0", LARGEST, f"-{LARGEST}"],
        "A/close": ["1e17", "100000000000000016", "1e17"],
        "A/tiny": ["5e-324", "1e-300", "0"],
        "A/none": ["nan", "inf", "-inf"],
        "A/words": ["</script>", "1e999", ""],
        "A/b/share_0": ["0.5", "", "1"],
        "A/b/share_1": ["0.5", "", ""],
        "BaseEnvEvents/reward/mean": ["1", LARGEST, "2"],
        "BaseEnvEvents/reward/std": ["1", LARGEST, "2"],
    }
    page = open_page(page_of_a_strangers_run(tmp_path / "run", columns), width=width)
    looked_at(page)
    n_figures = page.locator("figure[data-chart]").count()
    assert page.locator("figure[data-chart] > :nth-child(2)").count() == n_figures
    assert page.locator("img, figure path[d*=NaN], figure path[d*=Infinity]").count() == 0
    assert cut_off(page) == []
    stack = page.locator("figure", has_text="b (train)")
    assert re.search(r"0 1\s*1 0", stack.locator(".legend").inner_text()) is not None, (
        "what did not occur has a share of 0"
    )


def long_history(n_epochs: int, n_statistics: int) -> Progress:
    progress = Progress()
    rng = np.random.default_rng(1)
    keys = [LogStatsKey(BaseEnvEvents.kpi, "mean", (f"indicator_{index}",)) for index in range(n_statistics)]
    for epoch in range(n_epochs):
        values = rng.random(n_statistics)
        progress.add("train", epoch + 1, epoch, epoch * 100, dict(zip(keys, values.tolist(), strict=True)))
        progress.finish_step()
    return progress


def test_a_thousand_epochs_of_two_hundred_statistics_stay_below_three_megabytes(tmp_path: Path) -> None:
    page = run_page(FACTS, long_history(1000, 200), "ended", datetime(2026, 1, 1)).text()
    assert len(page.encode()) < 3e6
    longer = run_page(FACTS, long_history(3000, 200), "ended", datetime(2026, 1, 1)).text()
    assert len(longer.encode()) < 3e6


def test_the_first_and_the_last_row_of_a_long_history_are_shown() -> None:
    data = RunData.of("run", long_history(1234, 1), n_points=100)
    steps = np.frombuffer(base64.b64decode(data.paths["train"]["step"]), "<f8")
    assert (len(steps), steps[0], steps[-1]) == (100, 1, 1234)


def test_table_page_tensorboard_and_console_show_the_same_statistics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the last digit that each has: all, all, those of 32 bits, three behind the point, and four digits."""
    values = [0.1 + 0.2, 1e-12, -123456.789, 2.0**40 + 1, 1 / 3, 98064, float(np.nextafter(1.0, 2.0))]
    keys = [LogStatsKey(BaseEnvEvents.kpi, "mean", (f"k{index}",)) for index in range(len(values))]
    with StatsContext() as stats:
        for writer in (
            LogStatsWriterConsole(),
            LogStatsWriterTensorboard(tmp_path, tensorboard_render_figure=False),
            ReportWriter(tmp_path, FACTS),
            short := RunConsole(rows=[f"k{index}" for index in range(len(values))]),
        ):
            stats.register_writer(writer)
        stats.write(dict(zip(keys, values, strict=True)), "train")
        stats.finish_step()
    names = [f"BaseEnvEvents/kpi/mean/k{index}" for index in range(len(values))]
    assert [figures["train"] for figures in short.cells().values()] == [significant(value) for value in values]
    (row,) = list(read_progress(tmp_path).rows())
    assert [row[4][name] for name in names] == values
    page = (tmp_path / REPORT_FILE).read_text(encoding="utf-8")
    found = re.search(r'<script id="runs" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    columns = dict(json.loads(found[1])[0]["paths"]["train"]["columns"])
    assert [np.frombuffer(base64.b64decode(columns[name]), "<f8")[0] for name in names] == values
    frame = tensorboard_to_pandas(tmp_path)
    assert [frame.loc[(f"train_{name}", 1), "value"] for name in names] == [np.float32(value) for value in values]
    printed = [line.rpartition("|")[2].strip() for line in capsys.readouterr().out.splitlines() if "kpi" in line]
    assert printed == [f"{value:.3f}" for value in values]


def test_a_training_run_leaves_its_table(tmp_path: Path) -> None:
    from maze.api.run_context import RunContext
    from tests.api.shorter import SHORTER

    rc = RunContext(run_dir=str(tmp_path / "run"), algorithm="ppo", overrides=SHORTER["ppo"], silent=True)
    rc.train(n_epochs=2)
    page = (tmp_path / "run" / REPORT_FILE).read_text(encoding="utf-8")
    assert 'state ended">' in page
    rows = list(read_progress(tmp_path / "run").rows())
    assert [(path, step) for path, step, *_ in rows][:4] == [("eval", 1), ("train", 1), ("eval", 2), ("train", 2)]
    assert [env_steps for _, _, _, env_steps, _ in rows][:4] == [0, 8, 8, 16]
    assert (tmp_path / "run" / PROGRESS_FILE).is_file()


def test_steps_are_counted_where_an_update_takes_as_many_as_its_episodes_need(tmp_path: Path) -> None:
    from maze.api.run_context import RunContext
    from tests.api.shorter import SHORTER

    rc = RunContext(run_dir=str(tmp_path / "run"), algorithm="es", overrides=SHORTER["es"], silent=True)
    rc.train(n_epochs=2)
    train = read_progress(tmp_path / "run").paths["train"]
    assert list(train.env_steps) == list(train.columns["BaseEnvEvents/reward/total_step_count"])
