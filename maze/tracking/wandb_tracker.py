"""Tracker for Weights & Biases."""

from __future__ import annotations

import io
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maze.core.annotations import override
from maze.core.errors import optional_package
from maze.core.log_stats.stats_format import sample_values
from maze.tracking.tracker import CHECKPOINTS, FAILED, INTERRUPTED, TrackedRun, Tracker

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
