"""Experiment trackers: the interface with a test tracker, and training runs with the real libraries."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maze.api.run_context import RunContext
from maze.api.utils import InvalidSpecificationError
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.log_events.monitoring_events import ActionEvents
from maze.core.log_stats.log_stats import LogStatsKey, RunPlace, StatsContext
from maze.core.log_stats.log_stats_writer_tensorboard import LogStatsWriterTensorboard
from maze.maze_cli import main
from maze.report.progress import read_progress
from maze.tracking.tracker import TRACKING_FILE, TrackedRun, Tracker
from maze.utils.tensorboard_reader import tensorboard_to_pandas
from tests.api.shorter import SEEDS, SHORTER
from tests.tracking.wandb_file import content

MEAN = LogStatsKey(BaseEnvEvents.reward, "mean", None)
ACTIONS = LogStatsKey(ActionEvents.discrete_action, None, (0, 0, "action"))
TRAINING = (
    *("-cn", "conf_train", "env.name=CartPole-v1", "algorithm=a2c", "runner.concurrency=2"),
    *("algorithm.epoch_length=2", "algorithm.n_rollout_steps=20", "algorithm.rollout_evaluator.n_episodes=1"),
    *("seeding.env_base_seed=1", "seeding.agent_base_seed=1"),  # with episodes that end in each epoch
)


class OwnTracker(Tracker):
    """Records its calls, and fails in the given call.

    :param fails_in: Name of the call.
    """

    name = "own"

    def __init__(self, fails_in: str = "", **options: bool) -> None:
        super().__init__(**options)
        self.calls: list[Any] = []
        self._fails_in = fails_in

    def _note(self, name: str, *what: Any) -> None:
        self.calls.append((name, *what))
        if name == self._fails_in:
            raise RuntimeError(f"no {name}")

    def _begin(self, run: TrackedRun, identity: str | None) -> str:
        self._note("begin", identity, run.name, run.place.group, run.settings.get("algorithm.n_epochs"))
        return identity or "first"

    def _log(self, path: str, step: int, n_env_steps: int | None, numbers: Mapping[str, float]) -> None:
        self._note("log", path, step, n_env_steps, dict(numbers))

    def _log_picture(self, name: str, step: int, png: bytes) -> None:
        self._note("picture", name, step, png[1:4])

    def _end(self, state: str, files: list[tuple[str, Path]]) -> None:
        self._note("end", state, sorted({kind for kind, _ in files}))


def tracked(tracker: Tracker, directory: Path, resumed: Path | None = None) -> TrackedRun:
    run = TrackedRun(RunPlace(directory, directory.parent), {"algorithm.n_epochs": 2}, resumed)
    tracker.begin(run)
    return run


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_tracker_gets_a_row_for_each_log_step_and_prefix_figures_files_and_the_end(tmp_path: Path) -> None:
    tracker = OwnTracker()
    tracked(tracker, tmp_path)
    for name in ("hydra_config.yaml", "report.html", "state_dict.pt", "other.bin"):
        (tmp_path / name).touch()
    with StatsContext() as stats:
        stats.register_writer(tracker)
        stats.n_env_steps = 100
        stats.write({MEAN: 21.5}, "train")
        stats.write({ACTIONS: ([0, 1, 1, 1], 2)}, "train")
        stats.finish_step()
        stats.write({MEAN: np.float64(1 / 3)}, None)
    name = "ActionEvents/discrete_action/0/0/action"
    assert tracker.calls == [
        ("begin", None, "/".join(tmp_path.parts[-2:]), "", 2),
        ("picture", f"train/{name}/figure", 1, b"PNG"),
        ("log", "train", 1, 100, {"BaseEnvEvents/reward/mean": 21.5, f"{name}/share_0": 0.25, f"{name}/share_1": 0.75}),
        ("log", "stats", 2, 100, {"BaseEnvEvents/reward/mean": 1 / 3}),
        ("end", "finished", ["checkpoints", "report", "settings"]),
    ]
    assert json.loads((tmp_path / TRACKING_FILE).read_text()) == {"own": "first"}


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt, "interrupted"), (ValueError, "failed")])
def test_a_tracker_receives_the_final_state_of_a_run(error: type[BaseException], state: str, tmp_path: Path) -> None:
    tracker = OwnTracker(checkpoints=False)
    tracked(tracker, tmp_path)
    (tmp_path / "state_dict.pt").touch()

    def run() -> None:
        with StatsContext() as stats:
            stats.register_writer(tracker)
            raise error

    with pytest.raises(error):
        run()
    assert tracker.calls[-1] == ("end", state, [])


def test_a_run_that_continues_without_its_tracker_has_not_failed_there(tmp_path: Path) -> None:
    tracker = OwnTracker("log")
    tracked(tracker, tmp_path)
    with StatsContext() as stats:
        stats.register_writer(tracker)
        stats.write({MEAN: 21.5}, "train")
        stats.finish_step()
        assert tracker.calls[-1] == ("end", "interrupted", [])


def test_a_run_in_the_handler_of_another_error_has_not_failed(tmp_path: Path) -> None:
    tracker = OwnTracker()
    tracked(tracker, tmp_path)
    try:
        raise ValueError
    except ValueError:
        with StatsContext() as stats:
            stats.register_writer(tracker)
    assert tracker.calls[-1] == ("end", "finished", [])


def test_a_resumed_run_continues_the_run_of_the_tracker(tmp_path: Path) -> None:
    for name, resumed in (("a", None), ("b", tmp_path / "a"), ("c", tmp_path / "b"), ("d", None)):
        (tmp_path / name).mkdir()
        tracker = OwnTracker()
        tracked(tracker, tmp_path / name, resumed)
        assert tracker.calls[0][1] == (None if resumed is None else "first")
    (tmp_path / "a" / TRACKING_FILE).write_text('["damaged')
    tracked(tracker, tmp_path / "d", tmp_path / "a")
    assert tracker.calls[-1][1] is None


def test_a_run_is_continued_after_a_resume_in_which_the_tracker_failed(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    tracked(OwnTracker(), tmp_path / "a")
    with pytest.raises(RuntimeError, match="no begin"):
        tracked(OwnTracker("begin"), tmp_path / "b", tmp_path / "a")
    tracker = OwnTracker()
    tracked(tracker, tmp_path / "c", tmp_path / "b")
    assert tracker.calls[0][1] == "first"


def configured(**arguments: Any) -> dict[str, Any]:
    return {"own": {"_target_": OwnTracker, **arguments}}


@pytest.mark.parametrize("call", ["begin", "log", "end"])
def test_a_failing_tracker_is_one_warning_and_does_not_end_the_run(call: str, caplog: pytest.LogCaptureFixture) -> None:
    with RunContext(
        "CartPole-v1", algorithm="a2c", overrides={**SHORTER["a2c"], **SEEDS}, tracking=configured(fails_in=call)
    ) as rc:
        assert rc.train(n_epochs=2).status == "completed"
    said = [record.getMessage() for record in caplog.records if "OwnTracker" in record.getMessage()]
    assert said == [f"OwnTracker cannot write (RuntimeError: no {call}); it is disabled for this run."]


def test_a_run_context_takes_names_lists_and_mappings(tmp_path: Path) -> None:
    rest = {"algorithm": "a2c", "overrides": {**SHORTER["a2c"], **SEEDS}, "silent": True}
    for number, (tracking, has_events) in enumerate((("csv", False), (["csv", "tensorboard"], True), (None, True))):
        with RunContext("CartPole-v1", run_dir=str(tmp_path / str(number)), tracking=tracking, **rest) as rc:
            rc.train(n_epochs=1)
        names = {path.name.partition(".tfevents")[0] for path in (tmp_path / str(number)).iterdir()}
        assert ("events.out" in names) == has_events
        assert "progress.csv" in names
    for wrong in ([3], 3):
        with pytest.raises(InvalidSpecificationError, match="tracking: expected a name"):
            RunContext("CartPole-v1", tracking=wrong, **rest)  # type: ignore[arg-type]
    with pytest.raises(InvalidSpecificationError, match=r"wandbb: there is no such option\. Did you mean `wandb`"):
        RunContext("CartPole-v1", tracking="wandbb", **rest)


def test_the_runs_of_a_sweep_are_grouped(tmp_path: Path) -> None:
    rc = RunContext(
        "CartPole-v1",
        algorithm="a2c",
        overrides={**SHORTER["a2c"], **SEEDS, "algorithm.lr": [0.1, 0.2]},
        multirun=True,
        run_dir=str(tmp_path / "sweeps" / "first"),
        tracking=configured(),
        silent=True,
    )
    trackers: list[OwnTracker] = []
    begin = OwnTracker._begin

    def noted(self: OwnTracker, run: TrackedRun, identity: str | None) -> str:
        trackers.append(self)
        return begin(self, run, identity)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnTracker, "_begin", noted)
        rc.train(n_epochs=1)
    assert [tracker.calls[0][2:4] for tracker in trackers] == [("first/0", "sweeps/first"), ("first/1", "sweeps/first")]
    assert [tracker.calls[-1][:2] for tracker in trackers] == [("end", "finished")] * 2


def test_an_unknown_tracker_and_an_unknown_axis_are_refused(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main([*TRAINING, "tracking=wandbb"]) == 2
    assert "wandb" in capfd.readouterr().err
    assert main([*TRAINING, "tracking.tensorboard.x_axis=hours"]) == 1
    assert "x_axis: expected env_steps or epochs, found 'hours'" in capfd.readouterr().err


@pytest.mark.parametrize(("axis", "positions"), [("env_steps", (0, 80)), ("epochs", (1, 2))])
def test_the_x_axis_of_tensorboard_is_environment_steps_or_epochs(axis: str, positions: tuple[int, int]) -> None:
    axis_chosen = f"tracking.tensorboard.x_axis={axis}"
    assert main([*TRAINING, "algorithm.n_epochs=1", axis_chosen, "hydra.run.dir=run"]) == 0
    table = tensorboard_to_pandas("run")["value"]
    assert list(table.loc["eval_BaseEnvEvents/reward/mean"].index) == list(positions)
    assert list(table.loc["train_BaseEnvEvents/reward/mean"].index) == [positions[axis == "env_steps"]]
    assert list(table.loc["Results/best_reward"].index) == list(positions)[-1:] * 2 or axis == "epochs"


def test_tensorboard_shows_figures_and_histograms_of_one_statistic(tmp_path: Path) -> None:
    """Its server keeps one kind of data for each tag, the first it meets."""
    multiplexers = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_multiplexer")
    providers = pytest.importorskip("tensorboard.backend.event_processing.data_provider")
    from tensorboard import context
    from tensorboard.plugins.histogram import metadata as histograms
    from tensorboard.plugins.image import metadata as images

    with StatsContext() as stats:
        stats.register_writer(LogStatsWriterTensorboard(tmp_path / "run", tensorboard_render_figure=True))
        stats.write({ACTIONS: ([0, 1, 1, 1], 2)}, "train")
        stats.finish_step()
    multiplexer = multiplexers.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = providers.MultiplexerDataProvider(multiplexer, str(tmp_path))
    request = {"experiment_id": ""}
    found = provider.list_tensors(context.RequestContext(), plugin_name=histograms.PLUGIN_NAME, **request)
    assert list(found["run"]) == ["train_ActionEvents/discrete_action/0/0/action"]
    shown = provider.list_blob_sequences(context.RequestContext(), plugin_name=images.PLUGIN_NAME, **request)
    assert list(shown["run"]) == ["train_ActionEvents/discrete_action/0/0/action/figure"]


# -- the real libraries ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run with all trackers, `first`, and `second`, which resumes it."""
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    directory = tmp_path_factory.mktemp("project")
    arguments = [*TRAINING, "tracking=[tensorboard,wandb,mlflow]", "tracking.wandb.mode=offline"]
    switches = {"observation_logging": "false", "action_logging": "true", "reward_logging": "false"}
    arguments += [f"+wrappers.MazeEnvMonitoringWrapper.{name}={value}" for name, value in switches.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
            patch.setenv(name, str(directory / name.lower()))
        assert main([*arguments, "algorithm.n_epochs=2", "hydra.run.dir=first"]) == 0
        going_on = ["input_dir=first", "resume=true", "algorithm.n_epochs=3", "hydra.run.dir=second"]
        assert main([*arguments, *going_on]) == 0
    return directory


def wandb_content(directory: Path) -> dict[str, Any]:
    (file,) = directory.glob("wandb/offline-run-*/*.wandb")
    return content(file)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning")  # theirs are not ours
def test_wandb_has_settings_statistics_figures_report_and_checkpoints(project: Path) -> None:
    found = wandb_content(project / "first")
    assert found["settings"]["algorithm.n_epochs"] == 2
    assert found["exit_code"] == 0
    assert found["name"] == f"{project.name}/first"
    assert {"report/report.html", "settings/hydra_config.yaml", "statistics/progress.csv"} <= set(
        found["artifacts"]["run"]
    )
    assert {"checkpoints/state_dict.pt", "checkpoints/latest.pt"} <= set(found["artifacts"]["model"])
    keys = {key for row in found["rows"].values() for key in row}
    figure = "train/ActionEvents/discrete_action/step_key_0/agent_0/action/figure"
    assert {f"{figure}/_type", "report/_type", "train/env_steps", "eval/env_steps"} <= keys
    pictures = list((project / "first").glob("wandb/offline-run-*/files/media/images/**/*.png"))
    assert pictures
    assert pictures[0].read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning")  # theirs are not ours
def test_mlflow_has_settings_statistics_figures_report_and_checkpoints(project: Path) -> None:
    client, run = mlflow_run(project)
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm.n_epochs"] == "2", "those of the beginning"
    kinds = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert kinds >= {"settings", "statistics", "report", "checkpoints", "figures"}
    checkpoints = {artifact.path for artifact in client.list_artifacts(run.info.run_id, "checkpoints")}
    assert {"checkpoints/state_dict.pt", "checkpoints/latest.pt"} <= checkpoints
    metrics = client.get_metric_history(run.info.run_id, "train/BaseEnvEvents/reward/mean")
    assert [metric.step for metric in metrics] == [80, 160, 240]
    assert (project / "mlruns").is_dir()


def mlflow_run(project: Path) -> tuple[Any, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{project / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("maze")
    (run,) = client.search_runs([experiment.experiment_id])  # one for both training runs
    return client, run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning")  # theirs are not ours
def test_a_resumed_run_continues_the_same_runs_of_the_trackers(project: Path) -> None:
    first, second = (json.loads((project / name / TRACKING_FILE).read_text()) for name in ("first", "second"))
    assert first == second
    assert wandb_content(project / "first")["id"] == wandb_content(project / "second")["id"] == first["wandb"]
    assert mlflow_run(project)[1].info.run_id == first["mlflow"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning")  # theirs are not ours
def test_table_tensorboard_wandb_and_mlflow_show_the_same_statistics(project: Path) -> None:
    """To the last digit that each of them has: all, those of 32 bits, all, all; the log three behind the point."""
    log = (project / "first" / "maze_cli.log").read_text(encoding="utf-8")
    means = re.findall(r" +(\d+)\|(train|eval) +BaseEnvEvents +reward +mean +\| +(\S+)$", log, re.MULTILINE)
    table = [
        (str(int(step)), path, f"{values['BaseEnvEvents/reward/mean']:.3f}")
        for path, step, _, _, values in read_progress(project / "first").rows()
    ]
    assert sorted(means) == sorted(table)
    tensorboard = tensorboard_to_pandas(project / "first")["value"]
    rows = wandb_content(project / "first")["rows"]
    client, run = mlflow_run(project)
    n_compared = 0
    for path, step, _, env_steps, values in read_progress(project / "first").rows():
        for name, value in values.items():
            assert rows[int(step)][f"{path}/{name}"] == value, name
            if "share_" in name:
                continue
            assert tensorboard.loc[f"{path}_{name}", int(env_steps)] == np.float32(value), name
            n_compared += 1
            if name in ("BaseEnvEvents/reward/mean", "ActorCriticEvents/policy_loss/0"):
                history = client.get_metric_history(run.info.run_id, f"{path}/{name}")
                assert value in [metric.value for metric in history if metric.step == env_steps]
    assert n_compared > 50


@pytest.mark.slow
def test_mlflow_has_every_statistic_whatever_its_name(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    from maze.tracking.tracker import MlflowTracker

    kpis = ["waste [€]", "waste [$]", "share/of//all/", "../up", "...", "x" * 300, "x" * 400]
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracker = MlflowTracker(tracking_uri=uri)
    tracked(tracker, tmp_path)
    with StatsContext() as stats:
        stats.register_writer(tracker)
        for step in range(2):
            for position, name in enumerate(kpis):
                stats.write({LogStatsKey(BaseEnvEvents.kpi, "mean", (name,)): 10.0 * step + position}, "eval")
            stats.finish_step()
    identity = json.loads((tmp_path / TRACKING_FILE).read_text())["mlflow"]
    metrics = MlflowClient(tracking_uri=uri).get_run(identity).data.metrics
    assert sorted(metrics.values()) == [10.0 + position for position in range(len(kpis))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning")  # theirs are not ours
def test_a_run_whose_mlflow_run_was_deleted_resumes_in_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    from maze.tracking.tracker import MlflowTracker

    identities = []
    for name, resumed, database in (("a", None, "old"), ("b", tmp_path / "a", "new"), ("c", tmp_path / "b", "new")):
        (tmp_path / name).mkdir()
        tracker = MlflowTracker(tracking_uri=f"sqlite:///{tmp_path / database}.db")
        tracker.begin(TrackedRun(RunPlace(tmp_path / name, tmp_path, ""), {"lr": 0.1}, resumed))
        tracker.close()
        identities.append(json.loads((tmp_path / name / TRACKING_FILE).read_text())["mlflow"])
    assert identities[0] != identities[1] == identities[2]
    assert [record.message for record in caplog.records if "a new run begins" in record.message] == [
        f"MLflow has no run {identities[0]}, which is to be resumed: a new run begins."
    ]


BEGIN_AND_END = """
import sys
from pathlib import Path
from maze.core.log_stats.log_stats import RunPlace
from maze.tracking.tracker import MlflowTracker
from maze.tracking.tracker import TrackedRun

directory = Path(sys.argv[1])
directory.mkdir()
tracker = MlflowTracker()
tracker.begin(TrackedRun(RunPlace(directory, directory.parent, "sweep"), {"lr": 0.1}))
tracker.close()
"""


@pytest.mark.slow
def test_trials_that_start_simultaneously_create_one_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    commands = [[sys.executable, "-c", BEGIN_AND_END, str(tmp_path / name)] for name in "ab"]
    trials = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [trial.communicate(timeout=200)[1] for trial in trials]
    assert [trial.returncode for trial in trials] == [0, 0], errors
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        assert database.execute("select status from runs").fetchall() == [("FINISHED",)] * 2
        assert database.execute("select value from tags where key = 'sweep'").fetchall() == [("sweep",)] * 2
