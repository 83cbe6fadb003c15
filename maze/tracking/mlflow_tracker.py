"""Tracker for MLflow."""

from __future__ import annotations

import atexit
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from maze.core.annotations import override
from maze.core.errors import optional_package
from maze.tracking.tracker import FAILED, FINISHED, INTERRUPTED, TrackedRun, Tracker

DATABASE, ARTIFACTS = "mlflow.db", "mlruns"
_STATES = {FINISHED: "FINISHED", INTERRUPTED: "KILLED", FAILED: "FAILED"}
# Limits of one request; maximum length of a parameter.
_MOST_METRICS, _MOST_PARAMETERS, _LONGEST = 1000, 100, 500
# Defaults of environment variables: MLflow's own would delay a run for minutes if its server is not reachable.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}
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
        self,
        tracking_uri: str | None = None,
        experiment: str = "maze",
        figures: bool = True,
        checkpoints: bool = True,
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
        if identity is None:
            tags = {"mlflow.source.name": str(run.place.directory)}
            if run.place.group:
                tags["sweep"] = run.place.group
            created = self._client.create_run(experiment, run_name=run.name, tags=tags)
            self._run_id = created.info.run_id
        else:
            self._run_id = identity
            self._client.update_run(identity, status="RUNNING")
        self._log_settings(run.settings)
        atexit.register(self.close)  # otherwise the run of a RunContext that is not closed would never end in MLflow
        return self._run_id

    @override(Tracker)
    def _log(self, path: str, step: int, n_env_steps: int | None, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now, position = int(time.time() * 1000), step if n_env_steps is None else n_env_steps
        self._metrics += [Metric(_permitted(f"{path}/{name}"), value, now, position) for name, value in numbers.items()]
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

    def _send(self) -> None:
        metrics, self._metrics = self._metrics, []
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])
        self._next_request = time.monotonic() + _INTERVAL

    def _experiment_id(self, artifacts: str | None) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.create_experiment(self._experiment, artifact_location=artifacts))
        except MlflowException:  # it exists; another trial of the sweep may have created it
            experiment = self._client.get_experiment_by_name(self._experiment)
            if experiment is None:
                raise
            return str(experiment.experiment_id)

    def _log_settings(self, settings: Mapping[str, bool | float | str]) -> None:
        """Log parameters. They cannot change: those of a resumed run are kept."""
        from mlflow.entities import Param

        known = self._client.get_run(self._run_id).data.params
        parameters = [
            Param(_permitted(name), str(value)[:_LONGEST])
            for name, value in settings.items()
            if _permitted(name) not in known
        ]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[start : start + _MOST_PARAMETERS])


def _permitted(name: str) -> str:
    """Return the name with underscores in place of characters that MLflow does not allow."""
    return re.sub(r"[^\w\-./ ]", "_", name).lstrip("/.")
