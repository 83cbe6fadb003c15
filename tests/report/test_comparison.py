"""Policies side by side in the same episodes."""

from __future__ import annotations

import csv
import itertools
import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from maze.core.agent.random_policy import RandomPolicy
from maze.core.errors import ConfigError
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.evaluation.comparison import Comparison, ContextComparison, PlayedEpisodes, comparison_page
from maze.evaluation.gate import GateRunner, read_thresholds
from maze.evaluation.runners import ComparisonRunner
from maze.maze_cli import main
from tests.api.shorter import SHORTER
from tests.report.browser import NARROW, WIDE, OpenPage, accessibility_faults, cut_off

GYM = "maze.core.wrappers.maze_gym_env_wrapper.GymMazeEnv"
HOSTILE = "</script><img src=x onerror=alert(1)>"


def played(name: str, *training_runs: list[float]) -> PlayedEpisodes:
    return PlayedEpisodes(name, {"return": np.array(training_runs)})


def test_differences_are_those_within_an_episode() -> None:
    """Episodes differ by 1000 from each other, the policies by 1 or 2: no doubt about the difference."""
    hard_or_easy = [1000.0 * index for index in range(20)]
    better = [value + 1 + index % 2 for index, value in enumerate(hard_or_easy)]
    comparison = Comparison([played("a", hard_or_easy), played("b", better)])
    reference, row = comparison.table
    assert reference.difference is None
    assert row.difference is not None
    assert row.improvement is not None
    assert row.difference.value == 1.5
    assert 1.0 < row.difference.low < 1.5 < row.difference.high < 2.0
    # (1 - p)^20 = 0.025: rarer defeats need not occur in 20 episodes
    assert row.improvement == pytest.approx((1.0, 0.025 ** (1 / 20), 1.0), abs=0.01)
    assert comparison.is_significant(row)
    assert row.mean.high - row.mean.low > 3000, "the means alone do not decide"


def test_equal_policies_differ_significantly_as_rarely_as_the_level_states() -> None:
    rng = np.random.default_rng(5)
    n_told_apart = 0
    for _ in range(200):
        values = rng.normal(size=(2, 30)) + 5 * rng.normal(size=30)
        comparison = Comparison([played("a", values[0].tolist()), played("b", values[1].tolist())])
        n_told_apart += comparison.is_significant(comparison.table[1])
    assert n_told_apart <= 16


def test_equally_good_runs_differ_significantly_as_rarely_as_the_level_states() -> None:
    """The means of three runs each differ by chance: the episodes alone would say that the policies differ."""
    rng = np.random.default_rng(6)
    n_told_apart = 0
    for _ in range(200):
        entries = [played(name, *(rng.normal(size=(3, 30)) + 3 * rng.normal(size=(3, 1))).tolist()) for name in "ab"]
        comparison = Comparison(entries)
        n_told_apart += comparison.is_significant(comparison.table[1])
    assert n_told_apart <= 14


def test_minimised_measures_and_several_runs_of_one_policy_are_compared() -> None:
    """Of the pairs, those of the first training are better in 2 of 2 episodes, of the second in 1 of 2."""
    comparison = Comparison([played("a", [3.0, 3.0]), played("b", [1.0, 2.0], [4.0, 1.0])], minimized=["return"])
    row = comparison.table[1]
    assert row.mean.value == 2.0
    assert row.improvement is not None
    assert row.improvement.value == 0.75
    assert 0.0 <= row.improvement.low <= row.improvement.high <= 1.0


def test_intervals_are_wider_if_runs_differ() -> None:
    alike = Comparison([played("a", *[[1.0, 2.0, 3.0, 4.0]] * 3)]).table[0].mean
    different = Comparison([played("a", *[[v + 1.0, v + 2.0, v + 3.0, v + 4.0] for v in (-5, 0, 5)])]).table[0].mean
    assert alike.value == different.value == 2.5
    assert different.high - different.low > 2 * (alike.high - alike.low)


def test_intervals_of_durations_are_not_negative() -> None:
    """One slow decision beside fast ones: the interval of the mean is wider than the mean."""
    slow = PlayedEpisodes("a", {name: np.array([[0.1, 0.1, 0.1, 9.0]]) for name in ("return", "ms")})
    of_return, of_duration = (row.mean for row in Comparison([slow], durations=["ms"]).table)
    assert of_return.low < 0.0 == of_duration.low
    assert of_return.high == of_duration.high


def test_only_measures_that_all_have_are_compared() -> None:
    first = PlayedEpisodes("a", {"return": np.zeros((1, 2)), "waste": np.ones((1, 2))})
    second = PlayedEpisodes("b", {"return": np.zeros((1, 2))})
    assert Comparison([first, second]).measures == ["return"]


def hostile_comparison(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    entries = [
        PlayedEpisodes(f"{HOSTILE}{index}", {HOSTILE: rng.normal(size=(1, 10)), "return": np.ones((1, 10))})
        for index in range(3)
    ]
    page = tmp_path / "page.html"
    comparison_page(Comparison(entries, [HOSTILE]), datetime(2026, 1, 1)).write(page)
    return page


def test_names_stay_text_in_the_page(tmp_path: Path) -> None:
    assert "<img" not in hostile_comparison(tmp_path).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_the_page_can_be_read_in_a_browser(tmp_path: Path, open_page: OpenPage, width: int, scheme: str) -> None:
    page = open_page(hostile_comparison(tmp_path), width=width, scheme=scheme)
    assert page.locator("img").count() == 0
    assert cut_off(page) == []
    assert accessibility_faults(page) == []
    sizes = page.evaluate(
        """() => [...document.querySelectorAll("figure svg text")].map(each => each.getBoundingClientRect().height)"""
    )
    assert min(sizes) >= 9, "letters stay large enough to read"


def test_measures_with_a_goal_state_which_policy_is_better() -> None:
    """More steps are neither, nor are KPIs whose goal is not stated."""
    measures = ("return", "steps", "waste", "profit", "speed")
    ours, theirs = (
        PlayedEpisodes(name, {each: np.full((1, 5), value) for each in measures})
        for name, value in (("a", 0.0), ("b", 1.0))
    )
    comparison = Comparison([ours, theirs], ["waste"], ["return", "profit"])
    text = comparison_page(comparison, datetime(2026, 1, 1)).text()
    row = text.partition('<td class="whole">b</td>')[2].partition("</tr>")[0]
    assert re.findall(r">1 (.)<", row) == ["▲", "*", "▼", "▲", "*"]
    goals = {each: comparison.goal(each) for each in measures}
    assert goals == {
        "return": " (more is better)",
        "steps": "",
        "waste": " (less is better)",
        "profit": " (more is better)",
        "speed": "",
    }
    assert Comparison([ours, theirs]).goal("speed") == ""
    assert "P(more)" in comparison.text().partition("speed")[2]


def test_a_single_episode_has_no_confidence_interval() -> None:
    comparison = Comparison([played("a", [1.0]), played("b", [2.0])])
    assert not comparison.is_significant(comparison.table[1])
    assert "nan" not in comparison.text()
    assert not re.search('="nan|>nan', comparison_page(comparison, datetime(2026, 1, 1)).text())


def test_nothing_is_stated_about_a_measure_that_is_unknown_in_some_episodes() -> None:
    """Such as costs per order in an episode without orders; the other measures are compared as usual."""
    known, better = [1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]
    pair = [PlayedEpisodes("a", {"return": np.array([known]), "cost": np.array([known])})]
    pair.append(PlayedEpisodes("b", {"return": np.array([better]), "cost": np.array([[0.0, np.nan, 1.0, 1.0]])}))
    comparison = Comparison(pair, minimized=["cost"])
    returns, cost = comparison.rows_of("return")[1], comparison.rows_of("cost")[1]
    assert returns.improvement is not None
    assert returns.improvement.value == 1.0
    for estimate in (cost.mean, cost.interquartile_mean, cost.difference, cost.improvement):
        assert estimate is not None
        assert np.isnan(estimate.value)
    assert not comparison.is_significant(cost)
    assert "nan" in comparison.text()
    assert "cost" in comparison_page(comparison, datetime(2026, 1, 1)).text()


# -- the command ------------------------------------------------------------------------------------------------


def compare(*arguments: str) -> int:
    return main(["-cn", "conf_compare", "hydra.run.dir=compared", "seeding.env_base_seed=1", *arguments])


def rows(name: str) -> list[dict[str, str]]:
    with Path("compared", name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_options_and_runs_are_compared_by_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    from maze.api.run_context import RunContext

    for seed in (1, 2):
        rc = RunContext(
            run_dir=f"runs/{seed}", algorithm="a2c", env="CartPole-v1", overrides=SHORTER["a2c"], silent=True
        )
        rc.train(n_epochs=1)
    shutil.copytree("runs/2", "renamed")
    policies = "policies=[random,dummy_cartpole,runs/1,{both: runs},renamed]"
    seeds = ("seeding.env_base_seed=1", "seeding.agent_base_seed=1")
    assert compare(policies, "runner.n_episodes=8", "runner.max_episode_steps=60", *seeds) == 0
    shown = capsys.readouterr().out
    assert "8 episodes, the same for all" in shown
    found = {row["policy"]: row for row in rows("comparison.csv") if row["measure"] == "return"}
    assert list(found) == ["random", "dummy_cartpole", "a2c 1", "both", "renamed"]
    assert float(found["dummy_cartpole"]["difference_low"]) > 0
    episodes = rows("episodes.csv")
    assert [sum(row["policy"] == name for row in episodes) for name in found] == [8, 8, 8, 16, 8]
    one = [row["return"] for row in episodes if row["policy"] == "a2c 1"]
    again = [row["return"] for row in episodes if row["policy"] == "both" and row["training"] == "0"]
    assert one == again, "the same training in the same episodes does the same"
    assert Path("compared/report.html").is_file()


def test_kpis_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("env=cutting_2d", "wrappers=cutting_2d", "policies=[random,cutting_2d_greedy]")
    assert compare(*arguments, "runner.n_episodes=3", "runner.max_episode_steps=20", "runner.risk=[0.5,0.1]") == 0
    measures = {row["measure"] for row in rows("comparison.csv")}
    assert {"return", "steps"} < measures, "there are KPIs"
    tails = rows("tails.csv")
    assert [(row["measure"], row["level"]) for row in tails] == [("return", "0.5")] * 2 + [("return", "0.1")] * 2
    assert float(tails[2]["cvar"]) == min(float(each["return"]) for each in rows("episodes.csv")[:3])
    assert "Worst episodes" in Path("compared/report.html").read_text()
    assert compare(*arguments, "runner.risk=2") == 1
    assert "runner.risk: expected shares of the episodes such as 0.1, found 2" in capsys.readouterr().err
    assert compare(*arguments, "runner.n_episodes=2", "runner.max_episode_steps=3", "runner.minimize=[wast]") == 1
    assert "runner.minimize: the episodes have no wast" in capsys.readouterr().err
    assert compare(*arguments, "runner.n_episodes=2", "runner.max_episode_steps=3", "runner.maximize=[sped]") == 1
    assert "runner.maximize: the episodes have no sped" in capsys.readouterr().err


@pytest.mark.parametrize(("runner", "n_episodes"), [(ComparisonRunner, 3), (GateRunner, 200)])
def test_a_measure_that_is_missing_ends_the_command_after_the_first_episode(
    runner: type[ComparisonRunner], n_episodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(RandomPolicy, "seed", lambda self, seed: seeds.append(seed))
    random = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
    command = runner({"a": random, "b": random}, n_episodes, minimize="wast", max_episode_steps=2)
    command.setup(OmegaConf.create({"env": {"_target_": GYM, "env": "CartPole-v1"}}))
    with pytest.raises(ConfigError, match=r"wast.* return, steps"):
        command.run()
    assert len(seeds) <= 2


@pytest.mark.parametrize(("scale", "is_noted"), [(0.5, True), (0.1, False)])
def test_returns_of_different_reward_wrappers_are_noted(
    scale: float, is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    random = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
    policies = {
        name: {"policy": random, "wrappers": {"RewardScalingWrapper": {"scale": each}}}
        for name, each in (("a", 0.1), ("b", scale))
    }
    command = ComparisonRunner(policies, 2, max_episode_steps=2)
    command.setup(OmegaConf.create({"env": {"_target_": GYM, "env": "CartPole-v1"}}))
    command.run()
    note = "returns cannot be compared, because reward wrappers differ: {'a': 'RewardScalingWrapper(scale=0.1)', 'b'"
    assert (note in capsys.readouterr().out) is is_noted


def test_a_gate_on_returns_of_different_reward_wrappers_is_refused_before_the_first_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RandomPolicy, "compute_action", None)
    random = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
    scaled = {"policy": random, "wrappers": {"RewardScalingWrapper": {"scale": 0.5}}}
    command = GateRunner({"baseline": {"policy": random}, "candidate": scaled}, 200, max_episode_steps=2)
    command.setup(OmegaConf.create({"env": {"_target_": GYM, "env": "CartPole-v1"}}))
    with pytest.raises(ConfigError, match=r"reward wrappers of the baseline are none, those of the candidate .*Scal"):
        command.run()


def test_a_wrong_argument_of_a_later_policy_ends_the_command_before_the_first_one_plays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RandomPolicy, "compute_action", None)
    wrong = "{mine: {_target_: maze.core.agent.dummy_cartpole_policy.DummyCartPolePolicy, speed: 2}}"
    assert compare("env.name=CartPole-v1", f"policies=[random,{wrong}]") == 1
    assert "unknown argument `speed`" in capsys.readouterr().err


def test_one_environment_is_open_at_a_time() -> None:
    n_open: list[int] = [0]

    class Counted(GymMazeEnv):
        def __init__(self, env: Any) -> None:
            super().__init__(env)
            n_open.append(n_open[-1] + 1)

        def close(self) -> None:
            n_open.append(n_open[-1] - 1)
            super().close()

    drawing = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
    command = ComparisonRunner({"a": drawing, "b": drawing, "c": drawing}, 2, max_episode_steps=2)
    command.setup(OmegaConf.create({"env": lambda: Counted("CartPole-v1")}, flags={"allow_objects": True}))
    command.run()
    assert max(n_open) == 1
    assert n_open[-1] == 0


@pytest.mark.parametrize(("given", "names"), [("waste", ["waste"]), (["waste", "late"], ["waste", "late"]), (None, [])])
def test_one_kpi_needs_no_list(given: Any, names: list[str]) -> None:
    assert ComparisonRunner({"random": {}}, minimize=given).minimize == names
    assert GateRunner({"a": {}, "b": {}}, maximize=given).maximize == names
    assert [*read_thresholds({}, minimize=given)] == ["return", *names]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["policies=[randon]"], "randon is neither an option of policy nor a directory. Did you mean `random`?"),
        (["policies=[.]"], "and contains none"),
        (["policies=[[]]"], "is neither an option"),
        (["policies=7"], "expected a list, or a mapping from names"),
        ([], "expected policies by name"),
        (["policies=[random]", "runner.n_episodes=1"], "runner.n_episodes"),
    ],
)
def test_wrong_comparisons_report_what_is_expected(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(*arguments) in (1, 2)
    assert message in capsys.readouterr().err


def in_contexts(name: str, values: list[float]) -> PlayedEpisodes:
    """Eight episodes, two of each combination of two penalties and two demands."""
    penalty, demand = np.repeat([4.0, 9.0], 4), np.tile(np.repeat([0.0, 1.0], 2), 2)
    return PlayedEpisodes(
        name,
        {"return": np.array([values]), "context/penalty": penalty[None], "context/demand": demand[None]},
    )


def test_repeated_instances_count_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Rules play an instance always in the same way, so that playing it again tells nothing."""
    rng = np.random.default_rng(1)
    shape = (5, 3, 2)
    np.savez("shops.npz", durations=rng.integers(1, 100, shape), machines=rng.random(shape).argsort(axis=-1))
    rule = "_target_: maze_envs.scheduling.rules.DispatchingRule, rule"
    common = ["env=job_shop", "env.instances=shops.npz", "log_base_dir=log"]
    policies = f"policies={{a: {{{rule}: MWKR}}, b: {{{rule}: SPT}}}}"
    found = []
    for n_episodes in (5, 15):
        command = ["-cn", "conf_compare", *common, policies, f"runner.n_episodes={n_episodes}"]
        assert main([*command, f"hydra.run.dir=run{n_episodes}"]) == 0
        found.append(Path(f"run{n_episodes}", "comparison.csv").read_text())
        assert len(Path(f"run{n_episodes}", "episodes.csv").read_text().splitlines()) == 1 + 2 * n_episodes
    rows = [[line.split(",") for line in text.splitlines()[1:]] for text in found]
    for once, often in zip(*rows, strict=True):
        assert once[:2] == often[:2]
        np.testing.assert_allclose(*([float(cell or 0) for cell in row[2:]] for row in (once, often)), rtol=1e-9)
    assert "The 3 episodes of an instance count as one: their mean." in capsys.readouterr().out
    assert main([*command, "runner.risk=0.2"]) == 1
    assert "runner.risk: the episodes of an instance are not independent" in capsys.readouterr().err
    gate = [f"baseline={{{rule}: MWKR}}", f"candidate={{{rule}: MWKR}}", "runner.n_episodes=200"]
    assert main(["-cn", "conf_gate", *common, *gate]) == 2
    assert "expected at least 200 to judge return, found 5" in capsys.readouterr().err


def test_contexts_are_compared_separately() -> None:
    reference = in_contexts("a", [0.0] * 8)
    other = in_contexts("b", [1, 1, 2, 2, 3, 3, -4, -4])
    by_context = ContextComparison(Comparison([reference, other]), {"demand": ["poisson", "geometric"]})
    assert by_context
    assert by_context.comparison.measures == ["return"]
    found = {values: row.difference.value for values, row in by_context.rows("return") if row.difference is not None}
    assert found == {
        ("4", "poisson"): 1.0,
        ("4", "geometric"): 2.0,
        ("9", "poisson"): 3.0,
        ("9", "geometric"): -4.0,
    }
    lines = list(csv.DictReader(by_context.as_csv().splitlines()))
    assert len(lines) == 8
    assert lines[-1]["demand"] == "geometric"
    assert float(lines[-1]["difference"]) == -4.0
    assert by_context.section().count("<table") == 1


def test_episodes_with_a_context_each_are_not_compared_by_context() -> None:
    values = {"return": np.zeros((1, 4)), "context/price": np.array([[0.1, 0.2, 0.3, 0.4]])}
    assert not ContextComparison(Comparison([PlayedEpisodes("a", values), PlayedEpisodes("b", values)]))
    plain = [played("a", [1.0, 2.0]), played("b", [1.0, 2.0])]
    assert not ContextComparison(Comparison(plain))


def test_unknown_differences_are_neither_better_nor_worse_in_heat_maps() -> None:
    better = in_contexts("b", [1.0, 1.0, np.nan, 1.0, np.inf, 1.0, 2.0, 2.0])
    with np.errstate(invalid="ignore"):
        section = ContextComparison(Comparison([in_contexts("a", [0.0] * 8), better])).section()
    shares = re.findall(r"rgba\([^)]*, ([\d.]+)\)\">([^<]*)<", section)
    assert [(float(share), text.rstrip(" *")) for share, text in shares] == [
        (0.3, "1"),  # half of the largest known difference
        (0.0, "nan"),
        (0.6, "inf"),
        (0.6, "2"),
    ]


@pytest.mark.parametrize("unknown", [np.nan, np.inf, -np.inf])
def test_figures_place_known_values_only(unknown: float) -> None:
    with np.errstate(invalid="ignore"):
        known, partly = [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, unknown]
        page = comparison_page(Comparison([played("a", known), played("b", partly)]), datetime(2026, 1, 1)).text()
    figure = page[page.index("<svg") : page.index("</svg>")]
    dots = [float(place) for place in re.findall(r'<circle cx="([^"]*)"[^>]* r="2"', figure)]
    assert len(dots) == len(known) + 3
    assert np.ptp(np.diff(dots[: len(known)])) < 0.2 < np.ptp(dots), "equal distances, on a scale of known values"
    assert len(re.findall(r'<circle cx="[\d.]+"[^>]* r="5"', figure)) == 1, "a mean that is not finite has no place"
    assert f">b: {unknown}</text>" in figure


def test_contexts_of_a_single_policy_have_no_differences_to_show() -> None:
    by_context = ContextComparison(Comparison([in_contexts("a", [0.0] * 8)]))
    assert by_context
    assert len(by_context.as_csv().splitlines()) == 5
    assert by_context.section() == ""


@pytest.mark.parametrize("n_parameters", [1, 2, 3])
def test_heat_maps_show_each_context_once(n_parameters: int) -> None:
    grid = np.array(list(itertools.product([1.0, 2.0], repeat=n_parameters))).repeat(2, axis=0)
    columns = {f"context/p{index}": grid[None, :, index] for index in range(n_parameters)}
    entries = [PlayedEpisodes(name, {"return": np.full((1, len(grid)), float(name)), **columns}) for name in "12"]
    section = ContextComparison(Comparison(entries)).section()
    assert section.count("background: rgba") == 2**n_parameters
