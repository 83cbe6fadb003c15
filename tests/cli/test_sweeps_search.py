"""Search spaces, strategies and the journal of sweeps, without running anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from maze.cli.errors import UsageError
from maze.cli.hydra_setup import value_text
from maze.cli.sweeps.journal import JOURNAL_FILE, SweepJournal
from maze.cli.sweeps.nevergrad_search import NevergradSearch
from maze.cli.sweeps.optuna_search import OptunaSearch
from maze.cli.sweeps.results import results_table, write_optimum, write_results
from maze.cli.sweeps.space import ChoiceParameter, ScalarParameter, SearchSpace, parse_space
from maze.cli.sweeps.strategy import RestoredEvent, Search
from maze.cli.sweeps.trials import SweepRun, SweepTrial, TrialResult, ranked
from maze.core.errors import CheckpointError, ConfigError

PARSER = OverridesParser.create()


def space_of(parametrization: dict[str, Any], *arguments: str) -> SearchSpace:
    return parse_space(parametrization, arguments, PARSER)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("a.b=interval(0.1,2)", ScalarParameter("a.b", 0.1, 2.0)),
        ("a.b=int(interval(1,12))", ScalarParameter("a.b", 1, 12, integer=True)),
        ("a.b=tag(log,interval(0.001,1))", ScalarParameter("a.b", 0.001, 1.0, log=True)),
        ("a.b=tag(log,int(interval(1,512)))", ScalarParameter("a.b", 1, 512, integer=True, log=True)),
        ("a.b=choice(x,1,'y z')", ChoiceParameter("a.b", ("x", "1", r"y\ z"))),
        ("a.b=x,y", ChoiceParameter("a.b", ("x", "y"))),
        ("a.b=tag(ordered,choice(1,2,4))", ChoiceParameter("a.b", ("1", "2", "4"), ordered=True)),
        ("a.b=range(1,4)", ChoiceParameter("a.b", ("1", "2", "3"), ordered=True)),
        ("+a.b=choice([1,2],[3])", ChoiceParameter("+a.b", ("[1,2]", "[3]"))),
    ],
    ids=str,
)
def test_command_line_and_configuration_take_the_same_forms(argument: str, expected: object) -> None:
    space = space_of({}, argument, "c=5", "~d", "e={f: 1}")
    assert space.parameters == (expected,)
    assert space.fixed == ("c=5", "~d", "e={f:1}")
    key, _, text = argument.partition("=")
    assert space_of({key: text}).parameters == (expected,)


def test_scalars_and_lists_of_a_configuration() -> None:
    space = space_of(
        {"lr": {"lower": 1e-5, "upper": "1e-3", "log": True}, "n": [1, "a b", True, None, [1, 2], {"k": 0.5}]}
    )
    assert space.parameters == (
        ScalarParameter("lr", 1e-5, 1e-3, log=True),
        ChoiceParameter("n", ("1", "'a b'", "true", "null", "[1,2]", "{k:0.5}")),
    )


def test_nested_entries_change_those_written_with_dots() -> None:
    space = space_of({"a.lr": {"lower": 0.1, "upper": 1}, "a": {"lr": {"upper": 5}, "n": "choice(1,2)"}})
    assert space.parameters == (ScalarParameter("a.lr", 0.1, 5.0), ChoiceParameter("a.n", ("1", "2")))


def test_the_command_line_replaces_or_pins_entries_of_the_configuration() -> None:
    space = space_of({"a": [1, 2], "b": [1, 2], "c": [1, 2]}, "a=interval(0,1)", "b=7")
    assert set(space.parameters) == {ScalarParameter("a", 0.0, 1.0), ChoiceParameter("c", ("1", "2"))}
    assert space.fixed == ("b=7",)


@pytest.mark.parametrize(
    ("parametrization", "message"),
    [
        ({}, "Nothing to search"),
        ({"a": {"lower": 2, "upper": 1}}, r"a: lower \(2\) must be smaller than upper \(1\)"),
        ({"a": {"lower": 1, "upper": 1}}, "must be smaller"),
        ({"a": {"lower": 0, "upper": 1, "log": True}}, "must be positive"),
        ({"a": {"lower": 0, "upper": 1, "init": 2}}, "init"),
        ({"a": {"lower": 0, "uper": 1}}, "Did you mean `upper`"),
        ({"a": {"lower": "x"}}, "a.lower: expected a number, got 'x'"),
        ({"a": {"lower": float("nan")}}, "expected a number"),
        ({"a": {"lower": 0, "log": 1}}, "a.log: expected true or false"),
        ({"a": {"lower": 0, "step": 0}}, "step must be positive"),
        ({"a": []}, "nothing to choose from"),
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


@given(st.floats(1e-6, 1e3), st.floats(1e-9, 1.0), st.floats(-10, 10), st.booleans())
def test_texts_of_numbers_stay_within_the_bounds(lower: float, width: float, position: float, integer: bool) -> None:
    parameter = ScalarParameter("a", lower, lower * (1 + width), integer=False)
    value = parameter.value(parameter.text(lower * (1 + position * width)))
    assert lower <= value <= lower * (1 + width)


def test_integers_are_written_as_integers() -> None:
    assert ScalarParameter("a", 1, 9, integer=True).text(3.7) == "4"
    assert ScalarParameter("a", 1, 9, integer=True).text(11.0) == "9"


SPACE = SearchSpace(
    (
        ScalarParameter("x", 0.0, 3.0),
        ScalarParameter("n", 1, 64, integer=True, log=True),
        ChoiceParameter("c", ("a", "b")),
        ChoiceParameter("o", ("1", "2", "4"), ordered=True),
    ),
    (),
)
SEARCHES: dict[str, Callable[..., Search]] = {
    **{
        name: lambda name=name, **o: NevergradSearch(SPACE, optimizer=name, **o)
        for name in ("OnePlusOne", "TwoPointsDE")
    },
    **{
        name: lambda name=name, **o: NevergradSearch(SPACE, optimizer=name, **o)
        for name in ("CMA", "ScrHammersleySearch")
    },
    **{name: lambda name=name, **o: OptunaSearch(SPACE, sampler=name, **o) for name in ("tpe", "cmaes", "random")},
}


def play(search: Search, events: list[RestoredEvent], n_events: int, n_parallel: int = 2) -> None:
    """Goes on asking and telling, with several proposals open at a time; every fifth trial fails."""
    params = {trial: values for kind, trial, values, _ in events if kind == "proposed"}
    open_trials = [trial for trial in params if ("told", trial) not in [(kind, t) for kind, t, *_ in events]]
    while len(events) < n_events:
        if len(open_trials) < n_parallel:
            values = search.propose()
            assert values is not None
            trial = len(params)
            params[trial] = values
            open_trials.append(trial)
            events.append(("proposed", trial, values, None))
        else:
            trial = open_trials.pop(0)
            objective = None if trial % 5 == 4 else -((float(params[trial]["x"]) - 1.0) ** 2)
            search.report(trial, objective)
            events.append(("told", trial, params[trial], objective))


@pytest.mark.parametrize("name", SEARCHES)
def test_a_restored_search_goes_on_as_the_one_that_never_stopped(name: str) -> None:
    def options() -> dict[str, Any]:
        return {"budget": 40, "num_workers": 2, "maximize": True, "seed": 5}

    whole: list[RestoredEvent] = []
    play(SEARCHES[name](**options()), whole, 50)
    first: list[RestoredEvent] = []
    play(SEARCHES[name](**options()), first, 25)
    restored = SEARCHES[name](**options())
    restored.restore(first)
    play(restored, first, 50)
    assert first == whole
    assert len({values["x"] for _, _, values, _ in whole}) > 5


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_that_cannot_be_repeated_goes_on_from_its_results(name: str) -> None:
    other: list[RestoredEvent] = []
    play(SEARCHES[name](budget=40, num_workers=2, maximize=True, seed=5), other, 25)
    changed = [(kind, trial, {**values, "x": f"{trial % 3}.5"}, objective) for kind, trial, values, objective in other]
    search = SEARCHES[name](budget=40, num_workers=2, maximize=True, seed=6)
    search.restore(changed)
    events = list(changed)
    play(search, events, 40)  # trials that were open then are told, and new ones proposed
    assert sum(kind == "proposed" for kind, *_ in events) > sum(kind == "proposed" for kind, *_ in changed)


def test_a_search_ends_with_its_budget() -> None:
    search = SEARCHES["OnePlusOne"](budget=2, num_workers=1, maximize=False, seed=1)
    assert [search.propose() is None for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("name", ["OnePlusOne", "tpe"])
def test_a_search_finds_the_better_end(name: str) -> None:
    search = SEARCHES[name](budget=40, num_workers=1, maximize=True, seed=1)
    values = []
    for trial in range(40):
        params = search.propose()
        assert params is not None
        values.append(float(params["x"]))
        search.report(trial, values[-1])
    assert sum(values[-10:]) / 10 > 2.3, "random values would have a mean of 1.5"


@pytest.mark.parametrize(
    ("package", "build"),
    [("nevergrad", SEARCHES["OnePlusOne"]), ("optuna", SEARCHES["tpe"]), ("cmaes", SEARCHES["cmaes"])],
)
def test_a_missing_package_is_named_with_the_extra_that_has_it(
    package: str, build: Callable[..., Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r'pip install "maze-rl\[hpo\]>=1"') as caught:
        build(budget=1, num_workers=1, maximize=True, seed=0)
    assert isinstance(caught.value, ConfigError)
    assert f"needs the package {package}" in str(caught.value)


def test_a_trial_that_is_worse_than_half_of_the_others_is_not_worth_being_continued() -> None:
    pytest.importorskip("optuna")
    search = OptunaSearch(SPACE, 10, 1, True, 0, pruner="median")
    for trial, reached in enumerate([1.0, 2.0, 3.0, 4.0, 5.0]):  # of the first five none is ended
        search.propose()
        assert not search.should_stop(trial, 1, reached)
        search.report(trial, reached)
    for trial, reached in ((5, 3.5), (6, 2.5)):
        search.propose()
        assert search.should_stop(trial, 1, reached) == (reached < 3.0)
    assert not OptunaSearch(SPACE, 10, 1, True, 0).prunes


def test_optuna_needs_both_bounds() -> None:
    with pytest.raises(UsageError, match="a: Optuna needs lower and upper"):
        OptunaSearch(SearchSpace((ScalarParameter("a", lower=0),), ()), 1, 1, True, 0)


def journal_with_two_trials(directory: Path) -> None:
    with SweepJournal(directory) as journal:
        journal.begin({"seeds": [1], "space": "s"}, may_change=())
        for number in (0, 1):
            journal.write("proposed", trial=number, params={"x": str(number)})
            journal.write("started", trial=number, run=number, seed=1, directory=str(number))
        ended = {"status": "completed", "objective": 2.0, "duration": 1.0, "error": "", "directory": "0"}
        journal.write("ended", trial=0, run=0, **ended)
        journal.write("told", trial=0)


def test_a_journal_keeps_what_happened_in_its_order(tmp_path: Path) -> None:
    journal_with_two_trials(tmp_path)
    with SweepJournal(tmp_path) as journal:
        history = journal.history
    assert history.order == [("proposed", 0), ("proposed", 1), ("told", 0)]
    assert history.runs[0].objective == 2.0
    assert history.trials[1].seeds_to_run([1], retry_failed=False) == [1]


def test_a_journal_can_be_cut_off_anywhere(tmp_path: Path) -> None:
    journal_with_two_trials(tmp_path)
    path = tmp_path / JOURNAL_FILE
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with SweepJournal(tmp_path) as journal:
            journal.begin({"seeds": [1], "space": "s"}, may_change=())
        lines = path.read_bytes().splitlines()
        assert [json.loads(line) for line in lines[:-1]] == [
            json.loads(line) for line in whole[: whole.rfind(b"\n", 0, length) + 1].splitlines()
        ]


def test_damage_inside_a_journal_is_named_with_its_line(tmp_path: Path) -> None:
    journal_with_two_trials(tmp_path)
    path = tmp_path / JOURNAL_FILE
    for damage in (b"\x00\xff", b"[1]", b'{"event": "ended", "trial": 7}', b'{"event": "party"}'):
        lines = path.read_bytes().splitlines()
        path.write_bytes(b"\n".join([*lines[:2], damage, *lines[3:], b""]))
        with pytest.raises(CheckpointError, match="line 3"):
            SweepJournal(tmp_path)


def test_a_sweep_is_resumed_with_the_settings_it_was_started_with(tmp_path: Path) -> None:
    journal_with_two_trials(tmp_path)
    with SweepJournal(tmp_path) as journal:
        journal.begin({"seeds": [1, 2], "space": "s"}, may_change=("seeds",))
        with pytest.raises(UsageError, match="started with another space"):
            journal.begin({"seeds": [1], "space": "t"}, may_change=("seeds",))


def test_a_trial_fails_with_any_of_its_seeds() -> None:
    runs = [SweepRun(0, 1, "0", "completed", 1.0, 2.0), SweepRun(1, 2, "1", "failed", None, 1.0, "boom")]
    trial = SweepTrial(0, {"x": "1"}, runs)
    result = trial.result([1, 2], needs_objective=True)
    assert (result.status, result.objective, result.error) == ("failed", None, "1 of 2 seeds failed: boom")
    assert trial.seeds_to_run([1, 2, 3], retry_failed=True) == [2, 3]
    trial.runs.append(SweepRun(2, 2, "2", "completed", 4.0, 1.0))
    result = trial.result([1, 2], needs_objective=True)
    assert (result.status, result.objective, result.objective_std, result.duration) == ("completed", 2.5, 1.5, 3.0)
    assert result.run_dirs == ("0", "2")


def a_result(trial: int, objective: float | None, **params: str) -> TrialResult:
    return TrialResult(trial, params, (), "completed", objective, None, 1.0, "", (str(trial),))


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.sampled_from([0.0, 0.0, 1e-9, 0.5, 40.0])), min_size=2, max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_searches_hear_numbers_in_the_order_of_the_table(
    outcomes: list[tuple[float, float]], maximize: bool, minimized: bool
) -> None:
    results = [
        replace(a_result(number, objective), violation=violation, minimized=minimized)
        for number, (objective, violation) in enumerate(outcomes)
    ]
    told = [result.told(maximize) for result in ranked(results, maximize)]
    assert told == sorted(told, reverse=maximize)  # type: ignore[type-var]
    best = ranked(results, maximize)[0]
    feasible = [objective for objective, violation in outcomes if violation == 0]
    if feasible:
        assert best.objective == (min(feasible) if minimized or not maximize else max(feasible))
    free = [replace(result, violation=None) for result in results]
    sign = -1 if minimized and maximize else 1
    assert [result.told(maximize) for result in free] == [sign * objective for objective, _ in outcomes]


def test_a_trial_breaks_its_constraints_as_its_seeds_do_on_average() -> None:
    runs = [
        SweepRun(0, 1, "0", "completed", 1.0, 2.0, violation=0.0),
        SweepRun(1, 2, "1", "completed", 3.0, 1.0, violation=0.5),
    ]
    result = SweepTrial(0, {}, runs).result([1, 2], needs_objective=True)
    assert (result.objective, result.violation) == (2.0, 0.25)
    (line, *_) = results_table([result], maximize=True).splitlines()[2:]
    assert "0.25" in line


@pytest.mark.parametrize("name", ["OnePlusOne", "tpe"])
def test_a_search_stays_where_constraints_hold(name: str) -> None:
    search = SEARCHES[name](budget=60, num_workers=1, maximize=True, seed=1)
    values = []
    for trial in range(60):
        params = search.propose()
        assert params is not None
        values.append(float(params["x"]))
        result = replace(a_result(trial, values[-1]), violation=max(0.0, values[-1] - 1.0))
        search.report(trial, result.told(maximize=True))
    assert sum(value <= 1.1 for value in values[-20:]) > 12, "the objective alone would lead to 3"


def test_optunas_own_tools_see_what_is_broken(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    params = {"x": "1", "n": "3", "c": "a", "o": "2"}
    results = [
        replace(a_result(number, objective, **params), violation=violation)
        for number, (objective, violation) in enumerate([(3.0, 0.0), (9.0, 2.0), (5.0, 0.0)])
    ]
    OptunaSearch(SPACE, 3, 1, True, 0).write_study(tmp_path, results)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "optuna_study.log"))
    study = optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))
    assert [trial.value for trial in study.trials] == [3.0, 9.0, 5.0]
    assert study.best_trial.user_attrs["trial"] == 2


def test_tables_are_sorted_and_short_names_stay_distinct(tmp_path: Path) -> None:
    results = [a_result(0, None, **{"a.lr": "1", "b.lr": "2"}), a_result(1, 3.0, **{"a.lr": "1e-05", "b.lr": "'x y'"})]
    lines = results_table(results, maximize=True).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")] == [
        "trial",
        "a.lr",
        "b.lr",
        *lines[0].replace(" ", "").split("|")[3:],
    ]
    assert [line.split("|")[0].strip() for line in lines[2:]] == ["1", "0"]
    write_results(tmp_path, results, maximize=True)
    assert (tmp_path / "results.csv").read_text().splitlines()[1] == "1,1e-05,x y,,3.0,,,1.000,completed,,1"
    write_optimum(tmp_path, "nevergrad", results, maximize=True)
    optimum = (tmp_path / "optimization_results.yaml").read_text()
    assert "a.lr: 1.0e-05" in optimum
    assert "b.lr: x y" in optimum


def test_long_tables_are_cut_and_say_so() -> None:
    table = results_table([a_result(number, float(number), x="1") for number in range(60)], maximize=False)
    assert table.endswith("... and 10 more in results.csv")
