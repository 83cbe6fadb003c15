"""Search spaces, samplers, studies and tables of sweeps, without any run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution as Choice
from optuna.distributions import FloatDistribution as Float
from optuna.distributions import IntDistribution as Int

from maze.cli.hydra_setup import UsageError
from maze.cli.sweeps.results import (
    STUDY_FILE,
    SweepRun,
    SweepTrial,
    TrialResult,
    ranked,
    results_frame,
    results_table,
    write_optimum,
)
from maze.cli.sweeps.space import SearchSpace, parse_space, text_of, value_of
from maze.cli.sweeps.study import Plan, SweepStudy
from maze.core.errors import CheckpointError, ConfigError
from maze.core.utils.config_utils import value_text

PARSER = OverridesParser.create()


def space_of(parametrization: dict[str, Any], *arguments: str) -> SearchSpace:
    return parse_space(parametrization, arguments, PARSER)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("a.b=interval(0.1,2)", Float(0.1, 2.0)),
        ("a.b=int(interval(1,12))", Int(1, 12)),
        ("a.b=tag(log,interval(0.001,1))", Float(0.001, 1.0, log=True)),
        ("a.b=tag(log,int(interval(1,512)))", Int(1, 512, log=True)),
        ("a.b=choice(x,1,'y z')", Choice(("x", "1", r"y\ z"))),
        ("a.b=x,y", Choice(("x", "y"))),
        ("a.b=range(1,4)", Choice(("1", "2", "3"))),
        ("+a.b=choice([1,2],[3])", Choice(("[1,2]", "[3]"))),
    ],
    ids=str,
)
def test_command_line_and_configuration_take_the_same_forms(argument: str, expected: object) -> None:
    space = space_of({}, argument, "c=5", "~d", "e={f: 1}")
    key, _, text = argument.partition("=")
    assert space.distributions == {key: expected}
    assert space.fixed == ("c=5", "~d", "e={f:1}")
    assert space_of({key: text}).distributions == {key: expected}


def test_scalars_and_lists_of_a_configuration() -> None:
    space = space_of(
        {"lr": {"lower": 1e-5, "upper": "1e-3", "log": True}, "n": [1, "a b", True, None, [1, 2], {"k": 0.5}]}
    )
    assert space.distributions == {
        "lr": Float(1e-5, 1e-3, log=True),
        "n": Choice(("1", "'a b'", "true", "null", "[1,2]", "{k:0.5}")),
    }


def test_the_command_line_replaces_or_pins_entries_of_the_configuration() -> None:
    space = space_of({"a": [1, 2], "b": [1, 2], "c": [1, 2]}, "a=interval(0,1)", "b=7")
    assert space.distributions == {"c": Choice(("1", "2")), "a": Float(0.0, 1.0)}
    assert space.fixed == ("b=7",)


@pytest.mark.parametrize(
    ("parametrization", "message"),
    [
        ({}, "search space is empty"),
        ({"a": {"lower": 2, "upper": 1}}, "a: expected lower, upper"),
        ({"a": {"lower": 0}}, "a: expected lower, upper"),
        ({"a": {"lower": 0, "upper": 1, "log": True}}, "a: expected lower, upper"),
        ({"a": {"lower": 0, "upper": 1, "init": 2}}, "init must lie between the bounds"),
        ({"a": {"lower": 0, "uper": 1}}, "Did you mean `upper`"),
        ({"a": {"lower": "x", "upper": 1}}, "found {'lower': 'x'"),
        ({"a": {"lower": float("nan"), "upper": 1}}, "numbers must be finite"),
        ({"a": {"lower": 0, "upper": 1, "log": 1}}, "integer and log must be true or false"),
        ({"a": {"lower": 0, "upper": 1, "step": 0}}, "a: expected lower, upper"),
        ({"a": []}, "a: expected bounds"),
        ({"a": 5}, "a: expected bounds"),
        ({"a": "b c]"}, "cannot read"),
    ],
    ids=str,
)
def test_a_wrong_entry_is_named(parametrization: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        space_of(parametrization)


yaml_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="ascii"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(yaml_values)
def test_values_survive_being_written_as_overrides(value: Any) -> None:
    parsed = PARSER.parse_override(f"key={value_text(value)}")
    assert not parsed.is_sweep_override()
    assert parsed.value() == value


@given(st.floats(1e-6, 1e3), st.floats(1e-9, 1.0), st.floats(-10, 10))
def test_texts_of_numbers_stay_within_the_bounds(lower: float, width: float, position: float) -> None:
    distribution = Float(lower, lower * (1 + width))
    value = value_of(distribution, text_of(distribution, lower * (1 + position * width)))
    assert lower <= float(value) <= lower * (1 + width)


def test_integers_are_written_as_integers() -> None:
    assert text_of(Int(1, 9), 3.7) == "4"
    assert text_of(Int(1, 9), 11.0) == "9"


SPACE = SearchSpace(
    {"x": Float(0.0, 3.0), "n": Int(1, 64, log=True), "c": Choice(("a", "b")), "o": Choice(("1", "2", "4"))},
    (),
)
SEARCHES: dict[str, dict[str, Any]] = {
    **{
        name: {"optimizer": name, "noisy": False}
        for name in ("OnePlusOne", "TwoPointsDE", "CMA", "ScrHammersleySearch")
    },
    **{name: {"sampler": name, "pruner": None} for name in ("tpe", "random")},
}


def plan_of(name: str, budget: int, num_workers: int = 1, maximize: bool = True, **options: Any) -> Plan:
    options = {"budget": budget, "num_workers": num_workers, "seed": 5, **SEARCHES[name], **options}
    return Plan("optuna" if "sampler" in options else "nevergrad", SPACE, maximize, options)


@contextmanager
def study_of(directory: Path, plan: Plan) -> Iterator[SweepStudy]:
    directory.mkdir(exist_ok=True)
    with SweepStudy(directory, plan.maximize) as study:
        study.begin(plan, {"seeds": [None]})
        yield study


def report(study: SweepStudy, trial: SweepTrial, objective: float | None, violation: float | None = None) -> None:
    status = "failed" if objective is None else "completed"
    trial.runs.append(SweepRun(trial.number, None, "", status, objective, 1.0, violation=violation))
    study.save(trial)
    study.finish(trial, trial.result([None]))


def play(study: SweepStudy, n_finished: int, n_parallel: int = 2) -> None:
    """Continue until so many trials are finished, with several open trials; every fifth trial fails."""
    while len(study.trials) - len(study.open_trials) < n_finished:
        unfinished = study.open_trials
        if len(unfinished) < n_parallel:
            assert study.propose() is not None
        else:
            (first, *_) = unfinished
            report(study, first, None if first.number % 5 == 4 else -((float(first.params["x"]) - 1.0) ** 2))


@pytest.mark.parametrize("name", SEARCHES)
def test_a_resumed_search_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    with study_of(tmp_path / "whole", plan_of(name, 40, 2)) as study:
        play(study, 24)
        whole = [trial.params for trial in study.trials.values()]
    parts: list[dict[str, str]] = []
    for n_finished in (5, 11, 24):
        with study_of(tmp_path / "parts", plan_of(name, 40, 2)) as study:
            play(study, n_finished)
            parts = [trial.params for trial in study.trials.values()]
    assert parts == whole
    assert len({params["x"] for params in whole}) > 5


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_that_cannot_be_repeated_resumes_from_its_results(name: str, tmp_path: Path) -> None:
    with study_of(tmp_path, plan_of(name, 40, 2)) as study:
        play(study, 12)
        before = [trial.params for trial in study.trials.values()]
    with SweepStudy(tmp_path, True) as study:  # proposes other values than before
        study.settings["seed"] = 6
        study.begin(plan_of(name, 40, 2, seed=6), {"seeds": [None]})
        play(study, 20)
    after = [trial.params for trial in study.trials.values()]
    assert after[: len(before)] == before
    assert len({str(params) for params in after}) > 15


def test_a_search_ends_with_its_budget(tmp_path: Path) -> None:
    with study_of(tmp_path, plan_of("OnePlusOne", 2, maximize=False)) as study:
        assert [study.propose() is None for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("name", ["OnePlusOne", "tpe"])
def test_a_search_finds_the_better_end(name: str, tmp_path: Path) -> None:
    values = []
    with study_of(tmp_path, plan_of(name, 40, seed=1)) as study:
        while (trial := study.propose()) is not None:
            values.append(float(trial.params["x"]))
            report(study, trial, values[-1])
    assert sum(values[-10:]) / 10 > 2.3, "random values would have a mean of 1.5"


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nevergrad", None)
    with pytest.raises(ImportError, match=r'pip install "maze-rl\[hpo\]>=1"') as caught:
        plan_of("OnePlusOne", 1)
    assert isinstance(caught.value, ConfigError)
    assert "needs the package nevergrad" in str(caught.value)


def test_the_median_pruner_ends_trials_below_the_median(tmp_path: Path) -> None:
    plan = plan_of("tpe", 10, pruner="median")
    with study_of(tmp_path, plan) as study:
        for reached in [1.0, 2.0, 3.0, 4.0, 5.0]:  # of the first five none is ended
            trial = study.propose()
            assert trial is not None
            assert not study.should_stop(trial, 1, reached)
            report(study, trial, reached)
    with study_of(tmp_path, plan) as study:  # a resumed search knows what the others had reached
        for reached in (3.5, 2.5):
            trial = study.propose()
            assert trial is not None
            assert study.should_stop(trial, 1, reached) == (reached < 3.0)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"lower": 0, "step": 0.3, "integer": True},
        {"init": 0.1, "log": True},
        {"init": 0.02, "step": 2.0, "log": True},
    ],
    ids=str,
)
def test_nevergrad_searches_without_bounds(entry: dict[str, Any], tmp_path: Path) -> None:
    space = parse_space({"a": entry}, [], OverridesParser.create(), is_nevergrad=True)
    options = {"budget": 8, "num_workers": 1, "seed": 0, "optimizer": "OnePlusOne", "noisy": False}
    with study_of(tmp_path, Plan("nevergrad", space, True, options)) as study:
        while (trial := study.propose()) is not None:
            report(study, trial, float(trial.params["a"]))
    values = [float(trial.params["a"]) for trial in study.trials.values()]
    assert len(set(values)) > 3
    assert values[0] == entry.get("init", values[0])


def test_nevergrad_needs_a_beginning_on_a_logarithmic_scale() -> None:
    with pytest.raises(UsageError, match="needs both bounds, or init"):
        parse_space({"a": {"lower": 1.0, "log": True}}, [], OverridesParser.create(), is_nevergrad=True)


def test_ordered_choices_and_steps_are_hints_for_nevergrad() -> None:
    entries = {
        "n": "tag(ordered, choice(1, 2, 4))",
        "k": "range(1, 4)",
        "c": "choice(a, b)",
        "x": {"init": 1, "step": 0.5},
    }
    hints = parse_space(entries, [], OverridesParser.create(), is_nevergrad=True).hints
    assert [hints[key]["ordered"] for key in "nkc"] == [True, True, False]
    assert hints["x"] == {"lower": None, "upper": None, "init": 1.0, "step": 0.5}


def two_trials(directory: Path) -> None:
    with study_of(directory, plan_of("random", 3)) as study:
        for trial in (study.propose(), study.propose()):
            assert trial is not None
            trial.runs.append(SweepRun(trial.number, None, str(trial.number)))
            study.save(trial)
        report(study, study.trials[0], 2.0)


def test_a_study_keeps_trials_and_runs(tmp_path: Path) -> None:
    two_trials(tmp_path)
    with SweepStudy(tmp_path, True) as study:
        assert [trial.number for trial in study.open_trials] == [1]
        assert study.trials[0].result([None]).objective == 2.0
        assert study.trials[1].seeds_to_run([None], retry_failed=False) == [None]


def test_a_study_can_be_cut_off_anywhere(tmp_path: Path) -> None:
    two_trials(tmp_path)
    path = tmp_path / STUDY_FILE
    whole = path.read_bytes()
    for length in range(0, len(whole), 61):
        path.write_bytes(whole[:length])
        with study_of(tmp_path, plan_of("random", 3)) as study:
            assert study.propose() is not None
        kept = whole[: whole.rfind(b"\n", 0, length) + 1]
        assert path.read_bytes().startswith(kept)
        with SweepStudy(tmp_path, True) as study:
            assert len(study.trials) in (1, 2, 3)


def test_damage_inside_a_study_is_named(tmp_path: Path) -> None:
    two_trials(tmp_path)
    path = tmp_path / STUDY_FILE
    lines = path.read_bytes().splitlines()
    for damage in (b"\x00\xff", b"[1]", b'{"op_code": 8, "trial_id": 7}', b'{"op_code": 99}', b"[" * 99999):
        path.write_bytes(b"\n".join([*lines[:2], damage, *lines[3:], b""]))
        with pytest.raises(CheckpointError, match=f"{STUDY_FILE} cannot be read"):
            SweepStudy(tmp_path, True)


def test_a_sweep_is_resumed_with_the_settings_it_was_started_with(tmp_path: Path) -> None:
    grid = Plan("grid", SearchSpace({"x": Choice(("1",))}, ()), True, {})
    with SweepStudy(tmp_path, True) as study:
        study.begin(grid, {"seeds": [1], "overrides": ["a=1"]})
        study.begin(grid, {"seeds": [1, 2], "overrides": ["a=1"]})
        with pytest.raises(UsageError, match="started with another overrides"):
            study.begin(grid, {"seeds": [1], "overrides": ["a=2"]})


def test_a_trial_fails_with_any_of_its_seeds() -> None:
    runs = [SweepRun(0, 1, "0", "completed", 1.0, 2.0), SweepRun(1, 2, "1", "failed", None, 1.0, "boom")]
    trial = SweepTrial(0, {"x": "1"}, runs)
    result = trial.result([1, 2])
    assert (result.status, result.objective, result.error) == ("failed", None, "1 of 2 seeds failed: boom")
    assert trial.seeds_to_run([1, 2, 3], retry_failed=True) == [2, 3]
    trial.runs.append(SweepRun(2, 2, "2", "completed", 4.0, 1.0))
    result = trial.result([1, 2])
    assert (result.status, result.objective, result.objective_std, result.duration) == ("completed", 2.5, 1.5, 3.0)
    assert result.run_dirs == ["0", "2"]


def a_result(
    trial: int,
    objective: float | None,
    violation: float | None = None,
    minimized: bool = False,
    params: dict[str, str] | None = None,
) -> TrialResult:
    run = SweepRun(trial, None, str(trial), "completed", objective, 1.0, violation=violation, minimized=minimized)
    return SweepTrial(trial, params or {}, [run]).result([None])


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.sampled_from([0.0, 0.0, 1e-9, 0.5, 40.0])), min_size=2, max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_reported_values_have_the_order_of_the_table(
    outcomes: list[tuple[float, float]], maximize: bool, minimized: bool
) -> None:
    results = [
        a_result(number, objective, violation, minimized) for number, (objective, violation) in enumerate(outcomes)
    ]
    reported = [result.reported(maximize) for result in ranked(results, maximize)]
    assert reported == sorted(reported, reverse=maximize)  # type: ignore[type-var]
    best = ranked(results, maximize)[0]
    feasible = [objective for objective, violation in outcomes if violation == 0]
    if feasible:
        assert best.objective == (min(feasible) if minimized or not maximize else max(feasible))
    free = [a_result(result.trial, result.objective, None, minimized) for result in results]
    sign = -1 if minimized and maximize else 1
    assert [result.reported(maximize) for result in free] == [sign * objective for objective, _ in outcomes]


def test_the_violation_of_a_trial_is_the_mean_over_its_seeds() -> None:
    runs = [
        SweepRun(0, 1, "0", "completed", 1.0, 2.0, violation=0.0),
        SweepRun(1, 2, "1", "completed", 3.0, 1.0, violation=0.5),
    ]
    result = SweepTrial(0, {}, runs).result([1, 2])
    assert (result.objective, result.violation) == (2.0, 0.25)
    (line,) = results_table(results_frame([result], maximize=True)).splitlines()[1:]
    assert "0.25" in line


@pytest.mark.parametrize("name", ["OnePlusOne", "tpe"])
def test_a_search_satisfies_its_constraints(name: str, tmp_path: Path) -> None:
    values = []
    with study_of(tmp_path, plan_of(name, 60, seed=1)) as study:
        while (trial := study.propose()) is not None:
            values.append(float(trial.params["x"]))
            report(study, trial, values[-1], violation=max(0.0, values[-1] - 1.0))
    assert sum(value <= 1.1 for value in values[-20:]) > 12, "the objective alone would lead to 3"


def test_optuna_reads_the_constraints_of_a_study(tmp_path: Path) -> None:
    with study_of(tmp_path, plan_of("random", 3)) as study:
        for objective, violation in [(3.0, 0.0), (9.0, 2.0), (5.0, 0.0)]:
            trial = study.propose()
            assert trial is not None
            report(study, trial, objective, violation)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / STUDY_FILE))
    loaded = optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))
    assert [trial.value for trial in loaded.trials] == [3.0, 9.0, 5.0]
    assert loaded.best_trial.user_attrs["trial"] == 2


def test_tables_are_sorted(tmp_path: Path) -> None:
    params = [{"a.lr": "1", "b.lr": "2"}, {"a.lr": "1e-05", "b.lr": "'x y'"}]
    results = [a_result(0, None, params=params[0]), a_result(1, 3.0, params=params[1])]
    frame = results_frame(results, maximize=True)
    lines = results_table(frame).splitlines()
    assert lines[0].split()[:3] == ["trial", "a.lr", "b.lr"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "0"]
    assert frame.to_csv(index=False).splitlines()[1] == "1,1e-05,x y,,3.0,,,1.0,completed,,1"
    write_optimum(tmp_path, "nevergrad", results, maximize=True)
    optimum = (tmp_path / "optimization_results.yaml").read_text()
    assert "a.lr: 1.0e-05" in optimum
    assert "b.lr: x y" in optimum


def test_long_tables_are_cut_with_a_note() -> None:
    results = [a_result(number, float(number), params={"x": "1"}) for number in range(60)]
    table = results_table(results_frame(results, maximize=False))
    assert table.endswith("... and 10 more in results.csv")
