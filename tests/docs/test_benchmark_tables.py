"""Tables and charts of the benchmark pages are generated from the stored results."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import equal_settings, learning, speed
from benchmarks.page_tables import Bar, bar_chart
from maze.maze_cli import main

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"


def test_the_learning_page_shows_the_stored_results() -> None:
    page = (DOCS / "learning.md").read_text(encoding="utf-8")
    results = learning.read_results(DOCS / "learning.jsonl")
    assert page == learning.with_tables(page, results), (
        "run python benchmarks/learning.py --seeds 0 --results docs/benchmarks/learning.jsonl "
        "--tables docs/benchmarks/learning.md"
    )
    shown = [int(n_seeds) for n_seeds in re.findall(r" within [\d,]+ \| \d+ of (\d+) \|", page)]
    assert sum(shown) == len(results), "results that no table of the page shows"


def test_the_speed_page_shows_the_stored_results(tmp_path: Path) -> None:
    page = tmp_path / "speed.md"
    page.write_text(speed.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    speed.main(["--page", str(page)])
    for suffix in (".md", ".svg"):
        written = page.with_suffix(suffix).read_text(encoding="utf-8")
        assert written == speed.PAGE.with_suffix(suffix).read_text(encoding="utf-8"), "run python -m benchmarks.speed"
    named = {name for line in speed.read_results(speed.RESULTS) for name in line["figures"]}
    assert named <= {figure.name for figure in speed.FIGURES}, "results that no row of the table shows"


def test_the_page_of_equal_settings_shows_the_stored_rows(tmp_path: Path) -> None:
    kept, page = DOCS / "equal_settings.md", tmp_path / "equal_settings.md"
    page.write_text(kept.read_text(encoding="utf-8"), encoding="utf-8")
    equal_settings.write_page(page, kept.with_suffix(".jsonl"))
    for suffix in (".md", ".svg"):
        assert page.with_suffix(suffix).read_text("utf-8") == kept.with_suffix(suffix).read_text("utf-8")


def test_bars_of_a_chart_start_at_1_and_show_ranges() -> None:
    chart = bar_chart("t", [Bar("PPO & co", 4.0, 3.0, 5.0), Bar("slower", 0.5, 0.5, 0.5)])
    (left, width), (left_of_slower, width_of_slower) = (
        (float(x), float(w)) for x, w in re.findall(r'<rect class="ours" x="([\d.]+)" y="\d+" width="([\d.]+)"', chart)
    )
    assert left == pytest.approx(left_of_slower + width_of_slower, abs=0.2), "both bars touch the line at 1"
    assert width == pytest.approx(2 * width_of_slower, abs=0.2), "log2(4) = 2, log2(0.5) = -1"
    assert chart.count('class="range"') == 1
    assert "PPO &amp; co" in chart


def test_figures_of_speed_have_names_goals_and_benchmarks_that_write_them() -> None:
    assert len({figure.name for figure in speed.FIGURES}) == len(speed.FIGURES)
    for figure in speed.FIGURES:
        assert (figure.at_least is None) != (figure.at_most is None), figure.name
        source = (speed.DIRECTORY / figure.command.split()[0]).read_text(encoding="utf-8")
        shared = ("timing_main", "benchmarks.update_rates")  # whose commands have the option
        assert '"--json"' in source or any(name in source for name in shared), figure.command


def test_figures_of_several_runs_are_shown_by_their_median_and_range() -> None:
    figure = speed.FIGURES[0]
    assert figure.goal == "≥ 1.3"
    runs = [
        {"figures": {figure.name: {"PPO": ppo, "A2C": 1.25}}, "processor": maker, "busy": ppo > 2.0}
        for ppo, maker in ((2.0, "Intel"), (2.468, "AMD"), (1.5, "Intel"))
    ]
    first, second = [
        [cell.strip() for cell in row.strip("|").split(" | ")][2:5] for row in speed.table(runs).splitlines()[2:]
    ]
    assert first == ["2 (1.5 to 2.47)", "≥ 1.3", "3, AMD, Intel, 1 busy"]
    assert second[0] == "**1.25** (1.25 to 1.25)", "bold where the goal is missed"


@pytest.mark.slow
def test_a_benchmark_is_run_and_what_it_measured_is_kept_and_shown(tmp_path: Path) -> None:
    results, page = tmp_path / "speed.jsonl", tmp_path / "speed.md"
    page.write_text("<!-- results: speed -->\n<!-- end -->\n")
    speed.main(["structured_env", "--results", str(results), "--page", str(page)])
    (line,) = speed.read_results(results)
    assert line["command"] == "structured_env.py --quick"
    assert set(line["figures"]) == {"substeps"}
    assert all(0.1 < value < 10.0 for value in line["figures"]["substeps"].values())
    assert "(structured)" in page.read_text(encoding="utf-8")


def test_a_failing_benchmark_reports_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('out of luck')")
    monkeypatch.setattr(speed, "DIRECTORY", tmp_path)
    with pytest.raises(SystemExit, match=r"broken\.py --quick: no results, exit status 1\.(.|\n)*out of luck"):
        speed.run("broken.py --quick")


@pytest.fixture
def results() -> list[learning.Result]:
    returns = (480.0, 500.0, 490.0)
    return [learning.Result("cartpole_ppo", seed, 98_304, mean, 1.0, 500.0) for seed, mean in enumerate(returns)]


def test_means_have_intervals_over_seeds(results: list[learning.Result]) -> None:
    # standard deviation 10, t quantile with two degrees of freedom 4.303: 4.303 * 10 / sqrt(3)
    header, _, row = learning.table(results).splitlines()
    assert header == "| experiment | goal (steps) | seeds that reach it | steps | best policy |", "no empty columns"
    assert row == "| cartpole_ppo | 475 within 100,000 | 3 of 3 | 98,304 | 490.0 ± 24.8 |"
    assert "| 480.0 |" in learning.table(results[:1])


def test_stored_benchmark_runs_are_not_repeated(
    results: list[learning.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results[:2]))
    ran: list[int] = []

    def run_one(target: learning.Target, seed: int, keep: Path | None) -> learning.Result:
        assert keep is None
        ran.append(seed)
        return learning.Result(target.name, seed, 98_304, 470.0, 1.0, 500.0)

    monkeypatch.setattr(learning, "run_one", run_one)
    monkeypatch.setattr("sys.argv", ["learning.py", "cartpole_ppo", "--seeds", "3", "--results", str(kept)])
    assert learning.main() == 1, "the goal is missed on the third seed"
    assert ran == [2]
    assert [result.seed for result in learning.read_results(kept)] == [0, 1, 2]


@pytest.mark.slow
def test_stopped_runs_resume_at_the_same_update(tmp_path: Path) -> None:
    def target(n_epochs: int) -> learning.Target:
        small = (
            f"algorithm.n_epochs={n_epochs}",
            "algorithm.epoch_length=1",
            "algorithm.rollout_evaluator.n_episodes=1",
        )
        return learning.Target("cartpole_ppo", "CartPole-v1", 475.0, 10_000, n_seeds=1, overrides=small)

    first, steps_of_first, seconds = learning.train(target(1), 0, tmp_path)
    assert len(first) == 1
    assert seconds is not None
    # as if it had been stopped after its first epoch of two
    config = first[0] / ".hydra" / "config.yaml"
    config.write_text(config.read_text().replace("n_epochs: 1\n", "n_epochs: 2\n"))
    both, steps_of_both, seconds = learning.train(target(2), 0, tmp_path)
    assert both[:1] == first
    assert len(both) == 2
    assert steps_of_both == 2 * steps_of_first
    assert seconds is None, "times of parts are not times of runs"
    assert learning.train(target(2), 0, tmp_path) == (both, steps_of_both, None), "what is done is not done again"


def test_policies_are_judged_in_their_runs_wrappers_by_the_environments_own_rewards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    wrappers = "maze.core.wrappers"
    assert not main(
        [
            *("-cn", "conf_train", "env.name=CartPole-v1", "algorithm=ppo", "runner=dev", "runner.concurrency=2"),
            *("algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=8", "model=auto"),
            *("model.recurrence=carried", "critic=template_state", "algorithm.rollout_evaluator.n_episodes=1"),
            # observations of another shape, without which the policy cannot act, and rewards that are not judgement
            (
                f"+wrappers={{{wrappers}.observation_stack_wrapper.ObservationStackWrapper: {{stack_config: "
                f"[{{observation: observation, keep_original: false, tag: stacked, delta: false, stack_steps: 2}}]}}, "
                f"{wrappers}.reward_scaling_wrapper.RewardScalingWrapper: {{scale: 0.001}}}}"
            ),
            f"hydra.run.dir={run}",
        ]
    )
    returns = learning.evaluate(run, n_episodes=3)
    assert all(value >= 8 and value == int(value) for value in returns), "one for each step"
    assert learning.evaluate(run, n_episodes=1, seed=987_655) == returns[1:2], "no memory of the episode before"
