"""Sweeps as commands: results, failures, resumption, seeds, objectives, wrong input."""

from __future__ import annotations

import csv
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore

from maze.cli.sweeps.results import ObjectiveRecorder
from maze.cli.sweeps.study import SweepStudy
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.log_stats.log_stats import LogStatsKey
from maze.maze_cli import main
from tests.cli.sweep_stub import write_root_config


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*write_root_config(tmp_path), "--multirun", "seeding.env_base_seed=0"]


def rows(directory: str = "sweep") -> list[dict[str, str]]:
    with open(Path(directory) / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def inject(**events: str) -> None:
    """Inject events into the runs with these values of x."""
    Path("events.json").write_text(json.dumps({name.strip("x"): event for name, event in events.items()}))


def runs_so_far() -> list[float]:
    return [float(line) for line in Path("runs.txt").read_text().splitlines()]


def test_a_grid_ends_with_a_table_sorted_by_the_objective(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "runner.x=1,3,2", "runner.name='a b'"]) == 0
    assert [(row["runner.x"], row["objective"]) for row in rows()] == [("3", "3.0"), ("2", "2.0"), ("1", "1.0")]
    assert {row["status"] for row in rows()} == {"completed"}
    assert [row["run_dir"] for row in rows()] == ["1", "2", "0"]
    output = capfd.readouterr().out
    assert "Best: trial 1, 3: runner.x=3" in output
    assert Path("sweep/multirun.yaml").is_file()
    assert Path("sweep/1/.hydra/overrides.yaml").read_text().count("runner.x=3") == 1


def test_a_configuration_may_sweep_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {runner.max_episode_steps: '1,2'}}}\n"
    (tmp_path / "conf" / "experiment" / "limits.yaml").write_text(text)
    short = ["env.name=CartPole-v1", "runner=sequential", "runner.n_episodes=1", "hydra.sweep.dir=sweep"]
    assert main(["+experiment=limits", f"hydra.searchpath=[file://{tmp_path / 'conf'}]", *short]) == 0
    assert {row["runner.max_episode_steps"] for row in rows()} == {"1", "2"}


def test_a_grid_can_be_minimised_and_extended_in_the_configuration(command: list[str]) -> None:
    assert (
        main([*command, "runner.x=2,1", "hydra.sweeper.maximize=false", "+hydra.sweeper.params={runner.y:'5,6'}"]) == 0
    )
    assert [(row["runner.x"], row["runner.y"]) for row in rows()] == [("1", "5"), ("1", "6"), ("2", "5"), ("2", "6")]


@pytest.mark.long
def test_trials_that_satisfy_their_constraints_rank_first(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    inject(x1="broken by 0", x2="broken by 0", x8="broken by 2.5", x9="broken by 0.5", x7="raise")
    assert main([*command, "runner.x=1,7,8,9,2"]) == 0
    assert [(row["objective"], row["violation"]) for row in rows()] == [
        ("2.0", "0.0"),
        ("1.0", "0.0"),
        ("9.0", "0.5"),
        ("8.0", "2.5"),
        ("", ""),
    ]
    output = capfd.readouterr().out
    assert "trial 2: 8 (constraints are violated by 2.5)" in output
    assert "Best: trial 4, 2: runner.x=2" in output
    inject(x8="broken by 2.5", x9="broken by 0.5")
    assert main([*command, "runner.x=8,9", "hydra.sweep.dir=second"]) == 0
    assert "Best: trial 1, 9 (constraints are violated by 0.5): runner.x=9" in capfd.readouterr().out
    objective = "hydra.sweeper.objective=eval_BaseEnvEvents/reward/mean"
    assert main([*command, "runner.x=1,8", objective, "hydra.sweep.dir=third"]) == 0
    assert [(row["objective"], row["violation"]) for row in rows("third")] == [("2.0", ""), ("9.0", "2.5")]


@pytest.mark.parametrize("maximize", ["true", "false"])
def test_a_kpi_that_the_runs_minimise_keeps_its_sign(command: list[str], maximize: str) -> None:
    inject(x1="less", x3="less", x2="less")
    assert main([*command, "runner.x=1,3,2", f"hydra.sweeper.maximize={maximize}"]) == 0
    assert [row["objective"] for row in rows()] == ["1.0", "2.0", "3.0"]


def test_the_sweeper_of_other_hydra_applications_is_unchanged(command: list[str]) -> None:
    main([*command, "runner.x=1"])
    node = ConfigStore.instance().load("hydra/sweeper/basic.yaml").node
    assert node._target_ == "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def test_an_unknown_option_is_found_before_the_first_run(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    Path("conf/size").mkdir()
    Path("conf/size/small.yaml").write_text("n: 1")
    assert main([*command, "size=small,smal"]) == 2
    assert "size=smal: there is no such option. Did you mean `small`?" in capfd.readouterr().err
    assert not Path("runs.txt").exists()


def test_failed_trials_are_reported_and_do_not_end_the_sweep(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    inject(x1="raise", x2="nan")
    assert main([*command, "runner.x=1,2,3"]) == 0
    status = {row["runner.x"]: (row["status"], row["error"]) for row in rows()}
    assert status["1"] == ("failed", "RuntimeError: the reactor is hot")
    assert status["3"] == ("completed", "")
    assert "FAILED: RuntimeError: the reactor is hot" in capfd.readouterr().out
    assert main([*command, "runner.x=1,3", "hydra.sweeper.strict=true", "hydra.sweep.dir=strict"]) == 1
    assert main([*command, "runner.x=1", "hydra.sweep.dir=all"]) == 1
    assert "SweepFailedError: all trials of the sweep failed; the first one: RuntimeError" in capfd.readouterr().err


def test_a_killed_job_does_not_affect_the_others(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    local = ["hydra/launcher=local", "hydra.launcher.n_jobs=2"]
    inject(x1="kill", x2="raise")
    assert main([*command, "runner.x=1,2,3", *local]) == 0
    by_x = {row["runner.x"]: row for row in rows()}
    assert "was killed by signal 9 (SIGKILL)" in by_x["1"]["error"]
    assert by_x["2"]["error"] == "RuntimeError: the reactor is hot"
    assert "Traceback" in Path("sweep/1/console.log").read_text()
    assert by_x["3"]["objective"] == "3.0"
    assert "_target_" not in capfd.readouterr().out, "the output of jobs belongs into their directories"


def test_a_pruner_ends_bad_trials(
    command: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr("maze.cli.sweeps.sweepers.POLL_INTERVAL", 0.1)
    reported = []
    monkeypatch.setattr(
        "maze.cli.sweeps.study.SweepStudy.should_stop",
        lambda self, trial, epoch, objective: reported.append((epoch, objective)) or objective < 2,
    )
    inject(x1="report")
    search = ["hydra/sweeper=optuna", "hydra.sweeper.optim.budget=4", "hydra.sweeper.optim.seed=1"]
    search += ["hydra.sweeper.optim.sampler=random", "runner.x=choice(1,3)", "hydra/launcher=local"]
    assert main([*command, *search, "hydra.sweeper.optim.pruner=median"]) == 0
    found = {(row["runner.x"], row["status"], row["objective"], row["error"]) for row in rows()}
    assert found == {("1", "pruned", "1.0", "after epoch 1"), ("3", "completed", "3.0", "")}
    assert (1, 1.0) in reported
    output = capfd.readouterr().out
    assert "1, pruned after epoch 1" in output
    assert "FAILED" not in output
    n_runs = len(runs_so_far())
    directory = "hydra.sweep.dir=sweep"  # resumed: all trials are finished
    assert main([*command, *search, "hydra.sweeper.optim.pruner=median", directory]) == 0
    assert len(runs_so_far()) == n_runs


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["hydra.sweeper.optim.pruner=gardener"], "there is no such pruner"),
        (["hydra.sweeper.optim.pruner=median"], "hydra/launcher=local or ray"),
        (["hydra.sweeper.optim.pruner=median", "hydra/launcher=local", "hydra.sweeper.n_seeds=2"], "one run per"),
    ],
)
def test_settings_that_exclude_a_pruner_are_named(
    command: list[str], capfd: pytest.CaptureFixture[str], options: list[str], what: str
) -> None:
    pytest.importorskip("optuna")
    assert main([*command, "hydra/sweeper=optuna", "runner.x=interval(0,1)", *options]) == 2
    assert what in capfd.readouterr().err
    assert not Path("sweep").exists()


def test_an_interrupted_grid_resumes(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [*command, "runner.x=1,2,3,4"]
    inject(x1="raise", x3="interrupt")
    assert main(arguments) == 130
    _, resume = capfd.readouterr().out.split("Resume it:\n  maze-run ")
    assert [row["status"] for row in rows()] == ["completed", "failed", "unfinished"]
    assert main([*arguments, "runner.y=1"]) == 2
    assert "was started with another overrides" in capfd.readouterr().err
    inject()
    assert main(shlex.split(resume)) == 0
    assert runs_so_far() == [1, 2, 3, 1, 3, 4]
    assert [row["objective"] for row in rows()] == ["4.0", "3.0", "2.0", "1.0"]
    assert main(arguments) == 0, "a finished sweep only shows its results again"
    assert len(runs_so_far()) == 6
    inject(x5="raise")
    for n_runs in (8, 9):  # a failed trial with a further value is repeated, too
        assert main([*command, "runner.x=4,5,6"]) == 0
        assert len(runs_so_far()) == n_runs
        inject()
    assert [row["runner.x"] for row in rows()] == ["6", "5", "4", "3", "2", "1"]


def test_a_killed_sweep_loses_only_the_current_run(command: list[str], tmp_path: Path) -> None:
    arguments = [*command, "runner.x=1,2,3"]
    inject(x3="kill")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-m", "maze.maze_cli", *arguments],
        env=environment,
        check=False,
        timeout=60,
        capture_output=True,
    )
    assert process.returncode == -9
    with SweepStudy(Path("sweep"), True) as study:
        assert [run.status for run in study.runs] == ["completed", "completed", "unfinished"]
    # resumed in processes of their own, so that the kill does not reach this one
    assert main([*arguments, "hydra/launcher=local"]) == 0
    assert runs_so_far() == [1, 2, 3, 3]
    assert [row["status"] for row in rows()] == ["completed", "completed", "failed"]


@pytest.mark.long
def test_jobs_end_with_the_process_of_the_sweep(command: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [*command, "runner.x=1", "hydra/launcher=local"]
    inject(x1="hang")
    process = subprocess.Popen(
        [sys.executable, "-m", "maze.maze_cli", *arguments], env=environment, stdout=subprocess.DEVNULL
    )
    pid_file = Path("sweep/0/pid")
    wait_until(lambda: pid_file.is_file() and pid_file.read_text() != "", 30)
    process.kill()
    process.wait(10)
    wait_until(lambda: not is_alive(int(pid_file.read_text())), 6)


def wait_until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("search", [["hydra/sweeper=nevergrad"], ["hydra/sweeper=optuna"]], ids=str)
def test_a_resumed_search_makes_the_proposals_of_an_uninterrupted_one(search: list[str], command: list[str]) -> None:
    common = [*command, *search, "runner.x=interval(0,3)", "runner.name=choice(a,b)", "hydra.sweeper.optim.seed=3"]
    assert main([*common, "hydra.sweep.dir=whole", "hydra.sweeper.optim.budget=3"]) == 0
    assert main([*common, "hydra.sweep.dir=parts", "hydra.sweeper.optim.budget=1"]) == 0
    assert main([*common, "hydra.sweep.dir=parts", "hydra.sweeper.optim.budget=3"]) == 0
    assert len(runs_so_far()) == 6
    columns = ("trial", "runner.x", "runner.name", "objective")
    tables = [[[row[column] for column in columns] for row in rows(directory)] for directory in ("whole", "parts")]
    assert tables[0] == tables[1]
    best = Path("whole/optimization_results.yaml").read_text()
    assert f"best_evaluated_result: {rows('whole')[0]['objective']}" in best


def test_failures_count_towards_the_budget_of_a_search(command: list[str]) -> None:
    search = ["hydra/sweeper=optuna", "hydra.sweeper.optim.budget=3", "+hydra.sweeper.parametrization={runner.x:[1,2]}"]
    inject(x1="raise", x2="none")
    assert main([*command, *search]) == 1
    assert {row["status"] for row in rows()} == {"failed"}
    assert any("has no objective" in row["error"] for row in rows()) or {row["runner.x"] for row in rows()} == {"1"}
    assert len(rows()) == 3


def test_optuna_reads_the_study(command: list[str]) -> None:
    optuna = pytest.importorskip("optuna")
    arguments = [*command, "hydra/sweeper=optuna", "runner.x=range(1,4)", "hydra.sweep.dir=study"]
    assert main([*arguments, "hydra.sweeper.optim.budget=2"]) == 0
    assert main([*arguments, "hydra.sweeper.optim.budget=3"]) == 0
    backend = optuna.storages.journal.JournalFileBackend("study/optuna_study.log")
    study = optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))
    assert sorted(trial.value for trial in study.trials) == sorted(float(row["objective"]) for row in rows("study"))
    assert study.trials[0].params["runner.x"] in ("1", "2", "3")


@pytest.mark.long
def test_the_objective_is_the_mean_over_the_seeds(command: list[str]) -> None:
    assert main([*command, "runner.x=1,2", "hydra.sweeper.n_seeds=3"]) == 0
    best = rows()[0]
    assert (best["seeds"], best["run_dir"], float(best["objective"])) == ("0 1 2", "3 4 5", 12.0)
    assert float(best["objective_std"]) == pytest.approx((200 / 3) ** 0.5)
    assert main([*command, "runner.x=1,2", "hydra.sweeper.n_seeds=4"]) == 0, "further seeds are added to those before"
    assert len(runs_so_far()) == 8
    assert rows()[0]["seeds"] == "0 1 2 3"


def test_a_search_runs_each_proposal_with_all_seeds(command: list[str]) -> None:
    search = ["hydra/sweeper=nevergrad", "runner.x=interval(0,1)", "hydra.sweeper.optim.budget=2"]
    assert main([*command, *search, "hydra.sweeper.seeds=[7,4]"]) == 0
    assert [row["seeds"] for row in rows()] == ["7 4", "7 4"]
    assert float(rows()[0]["objective"]) == pytest.approx(float(rows()[0]["runner.x"]) + 55)
    assert "seeding.agent_base_seed=7" in Path("sweep/0/.hydra/overrides.yaml").read_text()


def test_seeds_of_agents_stay_in_their_range(command: list[str]) -> None:
    seeds = ["seeding.env_base_seed=1000", "seeding.agent_base_seed=5", "hydra.sweeper.seeds=[7]"]
    assert main([*command, "runner.x=1", *seeds]) == 0
    *_, last = Path("sweep/0/.hydra/overrides.yaml").read_text().split()
    assert last == f"seeding.agent_base_seed={7 - 995 + 2**32}"  # seeds below 0 are refused


def test_any_statistic_can_be_the_objective(command: list[str]) -> None:
    objective = ["hydra.sweeper.objective='eval BaseEnvEvents reward mean'", "hydra.sweeper.objective_step=last"]
    assert main([*command, "runner.x=5", *objective]) == 0
    assert float(rows()[0]["objective"]) == 5.0


def test_a_misspelt_objective_ends_the_sweep_after_the_first_run(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "runner.x=1,2,3", "hydra.sweeper.objective=eval_BaseEnvEvents/reward/men"]) == 1
    assert "Did you mean `eval_BaseEnvEvents/reward/mean`?" in capfd.readouterr().err
    assert len(runs_so_far()) == 1


def test_a_sweep_is_not_run_by_two_processes_at_once(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "runner.x=1"]) == 0
    with SweepStudy(Path("sweep"), True):
        assert main([*command, "runner.x=1"]) == 1
    assert "another process runs the sweep" in capfd.readouterr().err


def test_a_statistic_has_its_name_in_tensorboard_or_on_the_console() -> None:
    for name in ("eval_BaseEnvEvents/reward/mean", "eval BaseEnvEvents reward mean", "eval/BaseEnvEvents/reward/mean"):
        for step, expected in (("best", 6.0), ("last", 2.0), ("mean", 4.0)):
            recorder = ObjectiveRecorder(name, step=step)
            for number, value in enumerate((6.0, float("nan"), 4.0, 2.0), start=1):
                recorder.write("eval", number, {LogStatsKey(BaseEnvEvents.reward, "mean", None): value})
                recorder.write("train", number, {LogStatsKey(BaseEnvEvents.reward, "mean", None): 100.0})
            assert recorder.value() == expected


NEVERGRAD = ("hydra/sweeper=nevergrad",)
OPTUNA = ("hydra/sweeper=optuna",)
INTERVAL = "runner.x=interval(0,1)"
WRONG = [
    ([*NEVERGRAD, INTERVAL, "hydra.sweeper.optim.optimizer=OnePlusTwo"], "Did you mean `OnePlusOne`?"),
    ([*NEVERGRAD, INTERVAL, "hydra.sweeper.optim.budjet=1"], "Did you mean `hydra.sweeper.optim.budget`?"),
    ([*NEVERGRAD, INTERVAL, "hydra.sweeper.optim.budget=0"], "hydra.sweeper.optim.budget: expected a whole number"),
    ([*NEVERGRAD, "runner.x=interval(2,1)"], "runner.x: expected lower, upper"),
    ([*NEVERGRAD, "+hydra.sweeper.parametrization.runner.z.lower=0"], "runner: unknown key"),
    ([*OPTUNA, INTERVAL, "hydra.sweeper.optim.sampler=tpee"], "Did you mean `tpe`?"),
    ([INTERVAL], "To search an interval, choose hydra/sweeper=nevergrad"),
    (
        ["runner.x=1,2", "hydra.sweeper.n_seeds=0"],
        "hydra.sweeper.n_seeds: expected a whole number of at least 1, found 0",
    ),
    (["runner.x=1,2", "hydra/sweeper=gird"], "Did you mean `grid`?"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=str)
def test_an_invalid_sweep_gives_one_message_and_writes_nothing(
    arguments: list[str], message: str, command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *arguments]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.startswith("ConfigError: ")
    assert "Traceback" not in error
    assert not Path("sweep").exists()
