"""`maze-run --report`."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.log_stats.log_stats import LogStatsKey
from maze.maze_cli import main
from maze.report.page import Page, page_section, table
from maze.report.progress import Progress
from maze.report.run_page import REPORT_FILE, trials_section
from tests.report.browser import NARROW, WIDE, OpenPage, accessibility_faults, cut_off, looked_at

MEAN = LogStatsKey(BaseEnvEvents.reward, "mean", None)


def make_run(directory: Path, level: float, lr: float = 0.1, seed: int = 1, **algorithm: Any) -> Path:
    """A run whose evaluations rise from 0 to a level."""
    directory.mkdir(parents=True)
    target = "maze.train.trainers.ppo.ppo_algorithm_config.PPOAlgorithmConfig"
    config = {
        "env": {"name": "CartPole-v1"},
        "algorithm": {"_target_": target, "lr": lr, **algorithm},
        "seeding": {"env_base_seed": seed},
    }
    (directory / "hydra_config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (directory / "command.txt").write_text("maze-run -cn conf_train algorithm=ppo\n", encoding="utf-8")
    (directory / "latest.pt").touch()
    progress = Progress()
    for epoch in range(5):
        progress.add("eval", epoch + 1, epoch + seed, epoch * 100, {MEAN: level * epoch / 4})
        progress.finish_step()
    progress.write(directory)
    return directory


def row_of(page: str, label: str) -> list[str]:
    """The texts in the row of a table that begins with a label."""
    found = re.search(rf"<tr><td[^>]*>{re.escape(label)}</td>(.*?)</tr>", page.replace("<wbr>", ""), re.DOTALL)
    assert found is not None
    return re.findall(r"<td[^>]*>(.*?)</td>", found[1])


def test_the_report_of_a_single_run_is_regenerated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", 8.0)
    assert main(["--report", str(run)]) == 0
    assert str(run / REPORT_FILE) in capsys.readouterr().out
    page = (run / REPORT_FILE).read_text(encoding="utf-8")
    assert "CartPole-v1, ppo" in page
    assert "maze-run -cn conf_train algorithm=ppo input_dir=" in page


def test_seeds_of_one_experiment_are_one_line_with_an_interval(tmp_path: Path) -> None:
    """Final returns 7, 8, 9: mean and interquartile mean are 8."""
    runs = [make_run(tmp_path / str(seed), 6.0 + seed, seed=seed) for seed in (1, 2, 3)]
    page = tmp_path / "page.html"
    assert main(["--report", *map(str, runs), "--output", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "3 seeds of one experiment" in text
    n_runs, final, robust, highest, steps = row_of(text, "CartPole-v1, ppo")
    assert (n_runs, final, highest, steps) == ("3", "8", "8", "400")
    assert robust == "8 [5.5159, 10.484]", "4.303 / sqrt(3) to each side: Student's t with two degrees of freedom"


def test_the_report_of_several_runs_leaves_their_own_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / str(seed), 6.0, seed=seed) for seed in (1, 2)]
    assert main(["--report", str(runs[0])]) == 0
    own = (runs[0] / REPORT_FILE).read_bytes()
    monkeypatch.chdir(tmp_path)
    assert main(["--report", *map(str, runs)]) == 0
    assert (runs[0] / REPORT_FILE).read_bytes() == own
    assert "2 seeds of one experiment" in Path(REPORT_FILE).read_text(encoding="utf-8")


def test_runs_are_named_by_their_differences(tmp_path: Path) -> None:
    """A directory stands for the runs in it; what has no statistics is left out by name."""
    for seed, (lr, level) in enumerate([(0.1, 1.0), (0.1, 3.0), (0.2, 4.0)]):
        make_run(tmp_path / "runs" / str(seed), level, lr, seed)
    (make_run(tmp_path / "runs" / "9", 1.0) / "progress.csv").unlink()
    page = tmp_path / "page.html"
    assert main(["--report", str(tmp_path / "runs"), f"--output={page}"]) == 0
    text = page.read_text(encoding="utf-8")
    assert "3 runs, 2 settings" in text
    assert row_of(text, "lr=0.1")[:2] == ["2", "2"]
    assert row_of(text, "lr=0.2")[:2] == ["1", "4"]
    assert text.index("lr=0.2") < text.index("lr=0.1"), "the better one comes first"


def sweep_page(sweep: Path) -> Path:
    """The page of a sweep over two parameters, of which one decides."""
    rows: list[list[Any]] = []
    for trial in range(12):
        lr, other = (0.1, 0.2, 0.3)[trial % 3], ("a", "</svg><b>")[trial % 2]
        make_run(sweep / str(trial), 100 * lr, lr, note=other)
        rows.append([trial, lr, other, 1, 100 * lr, "", "", 1.0, "completed", "", trial])
    rows.sort(key=lambda row: -float(row[4]))
    with (sweep / "results.csv").open("w", encoding="utf-8", newline="") as file:
        columns = ["objective", "objective_std", "violation", "duration", "status", "error", "run_dir"]
        csv.writer(file).writerows([["trial", "algorithm.lr", "algorithm.note", "seeds", *columns], *rows])
    (sweep / "optuna_study.log").write_text("", encoding="utf-8")
    assert main(["--report", str(sweep)]) == 0
    return sweep / REPORT_FILE


def test_a_sweep_has_the_table_of_its_trials(tmp_path: Path) -> None:
    page = sweep_page(tmp_path / "sweep").read_text(encoding="utf-8")
    assert "<b>" not in page
    assert "Sweep sweep" in page
    trials = page[page.index("<h2>Trials") :]
    assert trials[: trials.index("</table>")].count("<tr>") == 1 + 12


def test_repeated_runs_of_a_resumed_sweep_count_once(tmp_path: Path) -> None:
    """The run 1 was interrupted and repeated as run 2; run 3 of the next trial is still running."""
    for run, level in enumerate([2.0, 9.0, 4.0, 3.0]):
        make_run(tmp_path / "sweep" / str(run), level, seed=run)
    (tmp_path / "sweep" / "3" / "run.json").write_text('{"state": "running"}', encoding="utf-8")
    table = "trial,seeds,objective,status,run_dir\n0,0 1,3.0,completed,0 2\n"
    (tmp_path / "sweep" / "results.csv").write_text(table, encoding="utf-8")
    assert main(["--report", str(tmp_path / "sweep")]) == 0
    page = (tmp_path / "sweep" / REPORT_FILE).read_text(encoding="utf-8")
    assert row_of(page, "CartPole-v1, ppo")[:2] == ["3", "3"], "runs and the mean of their returns"


@pytest.mark.parametrize("content", ["", "trial\n" + "1" * 200_000, "\xff"])
def test_an_unreadable_table_of_trials_is_left_out(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(content, encoding="latin-1")
    assert trials_section(tmp_path) is None


@pytest.mark.parametrize(
    "config",
    [
        "env: &x {name: *x}\nalgorithm: &y [*y]\n",
        "a: &a [x,x]\nb: &b [*a,*a]\nalgorithm: {lr: [*b,*b]}\n",
        "- 1\n",
        "\x00",
    ],
)
def test_configurations_that_expand_endlessly_are_omitted(tmp_path: Path, config: str) -> None:
    runs = [make_run(tmp_path / str(seed), 1.0, seed=seed) for seed in (1, 2)]
    (runs[0] / "hydra_config.yaml").write_text(config, encoding="utf-8")
    assert main(["--report", str(runs[0])]) == 0
    assert main(["--report", *map(str, runs), f"--output={tmp_path / 'page.html'}"]) == 0
    assert "2 runs, 2 settings" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [[], ["--output"], ["nowhere"], ["--color"], ["nowhere", "--output", "x"]])
def test_wrong_usage_exits_with_status_2(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--report", *arguments]) == 2


def test_a_report_that_cannot_be_written_is_an_error_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", 8.0)
    page = tmp_path / "missing" / "page.html"
    assert main(["--report", str(run), "--output", str(page)]) == 2
    assert capsys.readouterr().err == f"ConfigError: --report: {page}: No such file or directory.\n"


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_the_pages_of_several_runs_draw_in_a_browser(
    tmp_path: Path, open_page: OpenPage, width: int, scheme: str
) -> None:
    runs = [make_run(tmp_path / str(seed), 6.0 + seed, lr=0.1 * (seed % 2), seed=seed) for seed in range(4)]
    path = tmp_path / "page.html"
    assert main(["--report", *map(str, runs), "--output", str(path)]) == 0
    page = open_page(path, width=width, scheme=scheme)
    looked_at(page)
    assert page.locator("figure.large path.line").count() == 2
    latest = page.locator("table.sortable").first.locator("th", has_text="latest return")
    for order in ("descending", "ascending"):
        latest.locator("button").focus()
        page.keyboard.press("Enter")
        assert latest.get_attribute("aria-sort") == order
    assert page.locator("table.sortable").first.locator("tbody td").first.inner_text() == "lr=0.0"
    assert cut_off(page) == []
    assert accessibility_faults(page) == []


@pytest.mark.slow
def test_tables_are_sorted_with_unknown_values_at_the_end(tmp_path: Path, open_page: OpenPage) -> None:
    inf, nan = float("inf"), float("nan")
    names = {"a": -5.0, "b": "", "c": 3.0, "d": inf, "e": nan, "f": -inf, "g": None, "h": 20.0}
    page = tmp_path / "page.html"
    Page("t", "", [page_section("s", table(("name", "objective"), names.items()))]).write(page)
    opened = open_page(page)
    for known in ("dhcaf", "fachd"):
        opened.locator("th", has_text="objective").locator("button").click()
        shown = "".join(opened.locator("tbody td:first-child").all_inner_texts())
        assert (shown[:5], sorted(shown[5:])) == (known, ["b", "e", "g"])


@pytest.mark.slow
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_page_of_a_sweep_is_rendered(tmp_path: Path, open_page: OpenPage, width: int) -> None:
    page = open_page(sweep_page(tmp_path / "sweep"), width=width)
    looked_at(page)
    page.emulate_media(media="print")
    assert page.locator("table.sortable").first.locator("th").first.inner_text() == "trial", "on paper as well"
    page.emulate_media(media="screen")
    assert cut_off(page) == []
    assert accessibility_faults(page) == []
