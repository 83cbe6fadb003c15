"""Experiment trackers, which receive statistics, figures, settings and files of a run; MLflow and Weights & Biases."""

from __future__ import annotations

import atexit
import io
import json
import logging
import os
import re
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from maze.core.annotations import override
from maze.core.errors import optional_package
from maze.core.log_stats.log_stats import LogStats, LogStatsWriter, RunPlace, StatsContext
from maze.core.log_stats.stats_format import Figures, columns_of, sample_values, statistic_name
from maze.core.utils.files import read_json_object, write_whole

_LOGGER = logging.getLogger(__name__)

TRACKING_FILE = "tracking.json"
"""File with the identities of a run in its trackers, in its directory; a resumed run continues there."""
FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"
_FILES = {
    "settings": ("hydra_config.yaml", "command.txt", "versions.json"),
    "statistics": ("progress.csv", "maze_cli.log"),
    "report": ("report.html",),
    "figures": ("*.png", "*.svg", "*.pdf"),
    "checkpoints": ("*.pt", "spaces_config.pkl", "statistics*.pkl"),
}
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class TrackedRun:
    """A run at its beginning.

    :param place: Its directories.
    :param settings: Its hyper-parameters, by path.
    :param resumed: Directory of the run that it resumes; `None`: a new run.
    """

    place: RunPlace
    settings: Mapping[str, bool | float | str] = field(default_factory=dict)
    resumed: Path | None = None

    @property
    def name(self) -> str:
        """The last two parts of its directory: its kind, and its time or number in a sweep."""
        return "/".join(self.place.directory.absolute().parts[-2:])

    def identity(self, tracker: str) -> str | None:
        """Return the identity of the resumed run in a tracker; `None`: none."""
        identity = None if self.resumed is None else read_json_object(self.resumed / TRACKING_FILE).get(tracker)
        return identity if isinstance(identity, str) else None

    def remember(self, tracker: str, identity: str) -> None:
        """Store the identity of the run in a tracker.

        :raises OSError: Writing failed.
        """
        directory = self.place.directory
        text = json.dumps({**read_json_object(directory / TRACKING_FILE), tracker: identity}, indent=2)
        write_whole(directory / TRACKING_FILE, f"{text}\n")

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield the files to upload, each with its kind: settings, statistics, figures, ..."""
        for kind, patterns in _FILES.items():
            for pattern in patterns:
                yield from ((kind, path) for path in sorted(self.place.directory.glob(pattern)))


class Tracker(LogStatsWriter, ABC):
    """Log a run to an experiment tracker.

    After an error in a tracker, the run continues without it, with one warning. Numbers have their names in
    `progress.csv`, after the prefix: `train/BaseEnvEvents/reward/mean`; distributions are logged as shares of
    categories, or quantiles.

    :param figures: Whether to log the figures of `define_plot`.
    :param checkpoints: Whether to upload the weights at the end.
    """

    failures: ClassVar[tuple[type[Exception], ...]] = (Exception,)
    name: ClassVar[str]
    """Name of the tracker in `tracking.json`."""

    def __init__(self, figures: bool = True, checkpoints: bool = True) -> None:
        self._with_figures, self._with_checkpoints = figures, checkpoints
        self._run: TrackedRun | None = None
        self._figures = Figures()
        self._numbers: dict[str, tuple[int, int | None, dict[str, float]]] = {}

    # -- specific to each tracker ----------------------------------------------------------------------

    @abstractmethod
    def _begin(self, run: TrackedRun, identity: str | None) -> str:
        """Begin a run in the tracker, or resume one.

        :param identity: Identity of the run to resume.
        :return: Identity of the run.
        """

    @abstractmethod
    def _log(self, path: str, step: int, n_env_steps: int | None, numbers: Mapping[str, float]) -> None:
        """Log the numbers of one log step and prefix.

        :param n_env_steps: Environment steps of the run so far; `None`: not counted.
        """

    @abstractmethod
    def _log_picture(self, name: str, step: int, png: bytes) -> None:
        """Log a figure."""

    @abstractmethod
    def _end(self, state: str, files: list[tuple[str, Path]]) -> None:
        """Upload the files of the run, and report its final state: `finished`, `interrupted` or `failed`.

        After an error in the tracker, the state is `interrupted`, as the run continues.
        """

    def _samples(self, name: str, step: int, value: Any) -> None:
        """Log the samples of a statistic, for trackers that show distributions."""

    # -- shared ----------------------------------------------------------------------------------------

    def begin(self, run: TrackedRun, figures: Figures | None = None) -> None:
        """Begin to track a run.

        :param run: The run.
        :param figures: Draws figures, shared with other writers.
        """
        self._figures = figures or self._figures
        if (identity := run.identity(self.name)) is not None:
            run.remember(self.name, identity)  # for the next resume, even if the tracker fails now
        run.remember(self.name, self._begin(run, identity))
        self._run = run  # only after `_begin`: :meth:`close` ends tracked runs

    @override(LogStatsWriter)
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        if self._run is None:
            return
        prefix = path or "stats"
        numbers = self._numbers[prefix][2] if prefix in self._numbers else {}
        for key, value in stats.items():
            name = statistic_name(key)
            numbers.update(columns_of(name, value))
            self._samples(f"{prefix}/{name}", step, value)
            for picture in self._figures.of(path, step, key, value) if self._with_figures else ():
                self._log_picture(f"{prefix}/{name}/{picture.name}", step, picture.png)
        self._numbers[prefix] = (step, StatsContext.active().n_env_steps, numbers)

    @override(LogStatsWriter)
    def on_log_step_increment(self) -> None:
        numbers, self._numbers = self._numbers, {}
        for path, (step, n_env_steps, values) in numbers.items():
            self._log(path, step, n_env_steps, values)

    @override(LogStatsWriter)
    def close(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        self.on_log_step_increment()
        context = StatsContext.active()
        is_interrupted = isinstance(context.error, KeyboardInterrupt) or context.is_disabled(self)
        state = INTERRUPTED if is_interrupted else FINISHED if context.error is None else FAILED
        self._end(state, [file for file in run.files() if self._with_checkpoints or file[0] != CHECKPOINTS])


# -- MLflow ------------------------------------------------------------------------------------------------------------

DATABASE, ARTIFACTS = "mlflow.db", "mlruns"
_STATES = {FINISHED: "FINISHED", INTERRUPTED: "KILLED", FAILED: "FAILED"}
# Limits of one request; maximum length of a parameter, and of a name with room for a few marks.
_MOST_METRICS, _MOST_PARAMETERS, _LONGEST, _LONGEST_NAME = 1000, 100, 500, 240
# Defaults of environment variables: MLflow's own would delay a run for minutes if its server is not reachable.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_LOCK_TIMEOUT = 120.0
# Seconds between two requests: a request takes a database as long as dozens of numbers.
_INTERVAL = 10.0


class MlflowTracker(Tracker):
    """Log a run to MLflow (https://mlflow.org).

    Environment steps are the steps of its metrics. Runs of a sweep have the tag `sweep`. Settings are parameters;
    files, figures among them, are artefacts.

    :param tracking_uri: URI of its server or database; `None`: the variable `MLFLOW_TRACKING_URI`, or else the file
        `mlflow.db` in the working directory of the command, with files in `mlruns` beside it.
    :param experiment: Name of the experiment.
    :param figures: Whether to log the figures of `define_plot`.
    :param checkpoints: Whether to upload the weights at the end.
    :raises ConfigImportError: The package is not installed.
    """

    name = "mlflow"

    def __init__(
        self, tracking_uri: str | None = None, experiment: str = "maze", figures: bool = True, checkpoints: bool = True
    ) -> None:
        super().__init__(figures, checkpoints)
        tracking = optional_package("mlflow.tracking", "tracking", "tracking: mlflow is not installed")
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        self._new_client: Callable[..., Any] = tracking.MlflowClient
        self._uri: str | None = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or None
        self._experiment = experiment
        self._client: Any = None
        self._run_id = ""
        self._metrics: list[Any] = []
        self._names: dict[str, str] = {}
        self._next_request = -float("inf")

    @override(Tracker)
    def _begin(self, run: TrackedRun, identity: str | None) -> str:
        from filelock import FileLock

        uri, artifacts = self._uri, None
        if uri is None:
            uri = f"sqlite:///{run.place.project.absolute() / DATABASE}"
            artifacts = (run.place.project.absolute() / ARTIFACTS).as_uri()
        scheme, _, file = uri.partition(":///")
        # MLflow creates a SQLite database at its first use: no other local process, such as a trial, does so meanwhile.
        with FileLock(f"{file}.lock", timeout=_LOCK_TIMEOUT) if scheme == "sqlite" else nullcontext():
            self._client = self._new_client(tracking_uri=uri)
            experiment = self._experiment_id(artifacts)
        if identity is None or not self._is_resumed(identity):
            tags = {"mlflow.source.name": str(run.place.directory)}
            if run.place.group:
                tags["sweep"] = run.place.group
            identity = str(self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id)
        self._run_id = identity
        self._log_settings(run.settings)
        atexit.register(self.close)  # otherwise the run of a RunContext that is not closed would never end in MLflow
        return self._run_id

    @override(Tracker)
    def _log(self, path: str, step: int, n_env_steps: int | None, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now, position = int(time.time() * 1000), step if n_env_steps is None else n_env_steps
        self._metrics += [Metric(self._name(f"{path}/{name}"), value, now, position) for name, value in numbers.items()]
        if time.monotonic() >= self._next_request:
            self._send()

    @override(Tracker)
    def _log_picture(self, name: str, step: int, png: bytes) -> None:
        directory, _, file = f"figures/{_permitted(name)}/{step:06d}.png".rpartition("/")
        with tempfile.TemporaryDirectory() as temporary:
            (Path(temporary) / file).write_bytes(png)
            self._client.log_artifact(self._run_id, str(Path(temporary) / file), directory)

    @override(Tracker)
    def _end(self, state: str, files: list[tuple[str, Path]]) -> None:
        atexit.unregister(self.close)
        self._send()
        for kind, path in files:
            self._client.log_artifact(self._run_id, str(path), kind)
        self._client.set_terminated(self._run_id, _STATES[state])

    def _name(self, statistic: str) -> str:
        """Return the name of a metric, which no other statistic has."""
        name = _permitted(statistic)
        while self._names.setdefault(name, statistic) != statistic:
            name += "_"
        return name

    def _send(self) -> None:
        metrics, self._metrics = self._metrics, []
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])
        self._next_request = time.monotonic() + _INTERVAL

    def _is_resumed(self, identity: str) -> bool:
        """Resume a run; return false, with a warning, if the server or database has no such run."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(identity, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            _LOGGER.warning("MLflow has no run %s, which is to be resumed: a new run begins.", identity)
            return False
        return True

    def _experiment_id(self, artifacts: str | None) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.create_experiment(self._experiment, artifact_location=artifacts))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # perhaps created by another trial of the sweep
                raise
            return str(self._client.get_experiment_by_name(self._experiment).experiment_id)

    def _log_settings(self, settings: Mapping[str, bool | float | str]) -> None:
        """Log parameters. They cannot change: those of a resumed run are kept."""
        from mlflow.entities import Param

        known = self._client.get_run(self._run_id).data.params
        texts = {_permitted(name): str(value)[:_LONGEST] for name, value in settings.items()}
        parameters = [Param(name, text) for name, text in texts.items() if name not in known]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[start : start + _MOST_PARAMETERS])


def _permitted(name: str) -> str:
    """Return the name as MLflow allows it: with underscores for other characters, as a path without `//` and `..`."""
    parts = re.sub(r"[^\w\-./ ]", "_", name).split("/")
    return "/".join(part for part in parts if part.strip("."))[:_LONGEST_NAME].rstrip("/")


# -- Weights & Biases --------------------------------------------------------------------------------------------------

_N_BINS = 64
# Seconds to wait for a server that does not respond.
_INIT_TIMEOUT = 60.0
_EXIT_CODES = {INTERRUPTED: 130, FAILED: 1}


class WandbTracker(Tracker):
    """Log a run to Weights & Biases (https://wandb.ai).

    The x axis of charts is environment steps. The trials of a sweep are runs of one group. Settings, statistics and
    report are an artefact of type `run`, weights an artefact of type `model`.

    :param project: Name of the project.
    :param entity: User or team; `None`: the default of the account.
    :param mode: `online`, or `offline`, which writes into `wandb` in the run's directory for `wandb sync`; `None`: the
        variable `WANDB_MODE`, or else online.
    :param tags: Tags of the run.
    :param figures: Whether to log the figures of `define_plot`.
    :param checkpoints: Whether to upload the weights at the end.
    :raises ConfigImportError: The package is not installed.
    """

    name = "wandb"

    def __init__(
        self,
        project: str = "maze",
        entity: str | None = None,
        mode: str | None = None,
        tags: Sequence[str] = (),
        figures: bool = True,
        checkpoints: bool = True,
    ) -> None:
        super().__init__(figures, checkpoints)
        self._wandb: Any = optional_package("wandb", "tracking", "tracking: wandb is not installed")
        self._arguments = {"project": project, "entity": entity, "mode": mode, "tags": [*tags] or None}
        self._wandb_run: Any = None
        self._paths: set[str] = set()

    @override(Tracker)
    def _begin(self, run: TrackedRun, identity: str | None) -> str:
        identity = identity or uuid.uuid4().hex[:12]
        self._wandb_run = self._wandb.init(
            **self._arguments,
            id=identity,
            name=run.name,
            group=run.place.group or None,
            dir=run.place.directory,
            config=dict(run.settings),
            resume="allow",
            reinit="create_new",
            settings=self._wandb.Settings(silent=True, init_timeout=_INIT_TIMEOUT, x_disable_stats=True),
        )
        return identity

    @override(Tracker)
    def _log(self, path: str, step: int, n_env_steps: int | None, numbers: Mapping[str, float]) -> None:
        if path not in self._paths:
            self._paths.add(path)
            self._wandb_run.define_metric(f"{path}/*", step_metric=f"{path}/env_steps")
        x_axis = {f"{path}/env_steps": step if n_env_steps is None else n_env_steps, f"{path}/step": step}
        self._wandb_run.log({**{f"{path}/{name}": value for name, value in numbers.items()}, **x_axis}, step=step)

    @override(Tracker)
    def _samples(self, name: str, step: int, value: Any) -> None:
        samples = sample_values(value)
        if samples is not None and samples.dtype.kind in "biuf" and samples.size:
            histogram = self._wandb.Histogram(samples.astype(float), num_bins=_N_BINS)
            self._wandb_run.log({f"{name}/histogram": histogram}, step=step)

    @override(Tracker)
    def _log_picture(self, name: str, step: int, png: bytes) -> None:
        from matplotlib.image import imread

        picture = (imread(io.BytesIO(png), format="png") * 255).astype("uint8")
        self._wandb_run.log({name: self._wandb.Image(picture, mode="RGBA")}, step=step)

    @override(Tracker)
    def _end(self, state: str, files: list[tuple[str, Path]]) -> None:
        artifacts: dict[str, Any] = {}
        for kind, path in files:
            artifact_type = "model" if kind == CHECKPOINTS else "run"
            if artifact_type not in artifacts:
                name = re.sub(r"[^\w.-]", "_", f"{artifact_type}-{self._wandb_run.id}")
                artifacts[artifact_type] = self._wandb.Artifact(name, type=artifact_type)
            artifacts[artifact_type].add_file(str(path), name=f"{kind}/{path.name}")
            if kind == "report":
                self._wandb_run.log({"report": self._wandb.Html(path.read_text(encoding="utf-8"), inject=False)})
        for artifact in artifacts.values():
            self._wandb_run.log_artifact(artifact)
        self._wandb_run.finish(exit_code=_EXIT_CODES.get(state, 0))
