"""Data set of recorded trajectories, for imitation learning and learning from demonstrations."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Union

import torch
from torch.utils.data import Dataset, Subset

from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID, has_agent
from maze.core.errors import CheckpointError, ConfigError
from maze.core.trajectory_recording.datasets.decision_data import is_decision_log, read_decisions
from maze.core.trajectory_recording.datasets.minari_data import PREFIX, is_minari, minari_path, read_minari
from maze.core.trajectory_recording.datasets.trajectory_processor import (
    IdentityTrajectoryProcessor,
    TrajectoryProcessor,
)
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import TrajectoryRecord, load_trajectories, packages_of
from maze.core.trajectory_recording.writers.trajectory_writer_file import PARQUET_SUFFIX, read_parquet
from maze.core.utils.factory import ConfigType, Factory
from maze.core.utils.safe_pickle import register_safe_types, registered_safe_types
from maze.core.utils.worker_pool import ProcessPool, quick_start_method

InputData = Union[str, Path, TrajectoryRecord[Any], Sequence[Union[str, Path, TrajectoryRecord[Any]]]]
"""A trajectory file, a directory of them, a trajectory, or a list of these."""

Item = tuple[list[Any], list[Any], list[ActorID]]
"""Observations, actions and actors of the sub-steps of one step, in their order."""

EnvFactory = Callable[[], MazeEnv[Any]]


class InMemoryDataset(Dataset[Item], ABC):
    """Steps of recorded trajectories, converted to observations and actions and kept in memory.

    Files are loaded safely: types other than Maze's data and known types are rejected. States and actions may be of
    imported data classes of the environment's package; others are allowed by `extra_types` or `register_safe_types`.

    :param input_data: A trajectory file (`*.pkl`), a table (`*.parquet`), a directory that is searched for trajectory
        files, or for tables if there are none, a Minari data set (`minari:<id>`, or its directory), a decision log of a
        server, or a list of these and of trajectories. None: start empty and use :meth:`append` or :meth:`load_data`.
    :param conversion_env_factory: Makes the environment that converts states and actions of the simulation. `None`:
        all trajectories consist of observations and actions.
    :param n_workers: Number of worker processes; 1: conversion in this process.
    :param trajectory_processor: Processor of each trajectory, or its configuration.
    :param deserialize_in_main_thread: Read the files in this process and send their contents to the workers.
    :param dir_or_file: Another name of `input_data`.
    :param allow_pickle: Trust the files: load any type, which can execute any code.
    :param extra_types: Further types that may be loaded from files: classes, full names, or patterns `my_project.*`.
    """

    def __init__(
        self,
        input_data: InputData | None = None,
        conversion_env_factory: EnvFactory | None = None,
        n_workers: int = 1,
        trajectory_processor: TrajectoryProcessor | ConfigType | None = None,
        deserialize_in_main_thread: bool = False,
        dir_or_file: InputData | None = None,
        allow_pickle: bool = False,
        extra_types: Iterable[type | str] = (),
    ) -> None:
        self.trajectory_processor = Factory(TrajectoryProcessor).instantiate(  # type: ignore[type-abstract]
            trajectory_processor or IdentityTrajectoryProcessor(), config_path="trajectory_processor"
        )
        self.n_workers = n_workers
        self.deserialize_in_main_thread = deserialize_in_main_thread
        self._reading = (conversion_env_factory, self.trajectory_processor, allow_pickle, tuple(extra_types))
        self._reader = DataLoadWorker(*self._reading)
        self.step_records: list[StructuredSpacesRecord] = []
        """All steps, trajectory after trajectory."""
        self.trajectory_references: list[range] = []
        """For each trajectory the indices of its steps."""
        # The default `input_data: trajectory_data` of configurations is present if the user sets `dir_or_file`.
        source = dir_or_file if dir_or_file is not None else input_data
        if source is not None:
            self.load_data(source)

    def __len__(self) -> int:
        return len(self.step_records)

    def __getitem__(self, index: int) -> Item:
        """Return observations, actions and actors of the sub-steps of one step."""
        record = self.step_records[index]
        return record.observations, record.actions, record.actor_ids

    def load_data(self, input_data: InputData) -> None:
        """Add trajectories.

        :param input_data: Any of the sources that the constructor takes.
        :raises CheckpointError: A source does not exist, is damaged, or holds types that are not allowed.
        :raises ConfigError: It is no source, or the environment does not have the recorded actors.
        """
        sources = self._sources(input_data)
        if self.n_workers > 1 and len(sources) > 1:
            if self.deserialize_in_main_thread:
                sources = [trajectory for source in sources for trajectory in self._reader.trajectories(source)]
            make = partial(DataLoadWorker, *self._reading, registered_safe_types())
            pieces = enumerate(sources)
            n_workers, modules = min(self.n_workers, len(sources)), [__name__]
            pool = ProcessPool(
                n_workers, quick_start_method(), modules=modules, noun="data loading worker", item=_source
            )
            with closing(pool):
                pool.host("reader", lambda *_: make)
                loaded = list(pool.hand_out("reader", "load", lambda: next(pieces, None)))
            for _, converted in sorted(loaded, key=lambda piece: piece[0][0]):
                self._add(converted)
        else:
            for number, source in enumerate(sources):
                self._add(self._reader.load(number, source))

    def append(self, trajectory: TrajectoryRecord[Any]) -> None:
        """Process a trajectory and add its steps.

        :param trajectory: The trajectory, as for :meth:`load_data`.
        """
        self._add(self._reader.load(0, trajectory))

    @staticmethod
    def deserialize_trajectory(
        trajectory_file: str | Path,
        allow_pickle: bool = False,
        extra_types: Iterable[type | str] = (),
        own_packages: Iterable[str] = (),
    ) -> Generator[TrajectoryRecord[Any], None, None]:
        """Yield the trajectories in a file, one after the other.

        :param trajectory_file: The file.
        :param allow_pickle: Trust the file: load any type, which can execute any code.
        :param extra_types: Further types that may be loaded.
        :param own_packages: Packages whose imported data classes may be loaded.
        """
        hint = "`+runner.dataset.extra_types=[...]` of a training run, `extra_types=[...]` in Python"
        yield from load_trajectories(trajectory_file, allow_pickle, extra_types, own_packages, hint)

    @staticmethod
    def list_trajectory_files(data_dir: str | Path) -> list[Path]:
        """Return the trajectory files below a directory, at any depth, in the order of their paths.

        :param data_dir: The directory, whose tables (`*.parquet`) count only if there are no `*.pkl`; or a file, a
            Minari data set or a decision log, which is returned itself.
        :raises CheckpointError: There are none.
        """
        path = Path(data_dir)
        if (path.is_file() and path.suffix in (".pkl", PARQUET_SUFFIX)) or is_minari(path) or is_decision_log(path):
            return [path]
        files = [] if path.is_file() else sorted(path.rglob("*.pkl")) or sorted(path.rglob(f"*{PARQUET_SUFFIX}"))
        if not files:
            found = "has no trajectory files" if path.is_dir() else "is no trajectory file"
            raise CheckpointError(
                f"{path.absolute()} {found if path.exists() else 'does not exist'}: expected *.pkl, *.parquet, or a "
                "decision log (*.jsonl). Rollouts record them with `runner.record_trajectory=true` into "
                "`trajectory_data/` of their output directory; give its path. A CSV file becomes a table with "
                '`pandas.read_csv("log.csv").to_parquet("log.parquet")`.'
            )
        return files

    def random_split(
        self, lengths: Sequence[int], generator: torch.Generator = torch.default_generator
    ) -> list[Subset[Item]]:
        """Split at random into parts of about the given lengths, so that no trajectory is in two parts.

        Steps of a trajectory are correlated, so that training and validation sets must not share trajectories. If there
        are fewer trajectories than parts, they are split into consecutive pieces.

        :param lengths: Number of steps of each part; their sum is the length of this data set.
        :param generator: Random generator.
        :raises ValueError: The lengths do not add up to the number of steps.
        """
        lengths = [int(length) for length in lengths]
        if sum(lengths) != len(self) or min(lengths, default=0) < 0:
            raise ValueError(f"The lengths {lengths} do not add up to the {len(self)} steps of this data set.")
        order: list[int] = torch.randperm(len(self.trajectory_references), generator=generator).tolist()
        if len(order) < sum(length > 0 for length in lengths):
            mixed = [step for index in order for step in self.trajectory_references[index]]
            starts = [sum(lengths[:part]) for part in range(len(lengths))]
            return [Subset(self, mixed[start : start + n]) for start, n in zip(starts, lengths, strict=True)]
        parts: list[list[int]] = [[] for _ in lengths]
        for position, index in enumerate(order):
            steps = self.trajectory_references[index]
            empty = [part for part, length in enumerate(lengths) if length > 0 and not parts[part]]
            # The last trajectories are assigned to empty parts.
            candidates = empty if len(order) - position <= len(empty) else range(len(lengths))
            neediest = max(candidates, key=lambda part: lengths[part] - len(parts[part]))
            parts[neediest].extend(steps)
        return [Subset(self, part) for part in parts]

    def _sources(self, input_data: InputData) -> list[Path | TrajectoryRecord[Any]]:
        if isinstance(input_data, TrajectoryRecord):
            return [input_data]
        if isinstance(input_data, str) and input_data.startswith(PREFIX):
            return [minari_path(input_data.removeprefix(PREFIX))]
        if isinstance(input_data, (str, Path)):
            return list(self.list_trajectory_files(input_data))
        is_sequence: Any = isinstance(input_data, Sequence)
        if not is_sequence:
            raise ConfigError(
                f"input_data: expected a path, a trajectory or a list of them, found {type(input_data).__name__}."
            )
        return [source for entry in input_data for source in self._sources(entry)]

    def _add(self, converted: list[list[StructuredSpacesRecord]]) -> None:
        for steps in converted:
            start = len(self.step_records)
            self.step_records.extend(steps)
            self.trajectory_references.append(range(start, len(self.step_records)))


class DataLoadWorker:
    """Read and convert trajectories, in this process or in a worker process, with the same permissions.

    :param env_factory: Makes the environment for the conversion, whose own classes may be loaded.
    :param processor: Processor of each trajectory.
    :param allow_pickle: Trust the files.
    :param extra_types: Further types that may be loaded.
    :param safe_types: Types to be registered as safe.
    """

    def __init__(
        self,
        env_factory: EnvFactory | None,
        processor: TrajectoryProcessor,
        allow_pickle: bool = False,
        extra_types: tuple[type | str, ...] = (),
        safe_types: Iterable[type | str] = (),
    ) -> None:
        register_safe_types(*safe_types)
        self._processor, self._permissions = processor, (allow_pickle, extra_types)
        self._env_factory = env_factory
        self._env: MazeEnv[Any] | None = None

    def _environment(self) -> MazeEnv[Any] | None:
        if self._env is None and self._env_factory is not None:
            self._env = self._env_factory()
        return self._env

    def trajectories(self, source: Path | str | TrajectoryRecord[Any]) -> Iterable[TrajectoryRecord[Any]]:
        """Return the trajectories of a source.

        :param source: A trajectory file, a table, a Minari data set, a decision log, or a trajectory.
        :raises CheckpointError: It is damaged, or holds types that are not allowed.
        """
        env = self._environment()
        if isinstance(source, TrajectoryRecord):
            return [source]
        if is_minari(source):
            return read_minari(source, env)
        if is_decision_log(source):
            return read_decisions(source, env)
        if Path(source).suffix == PARQUET_SUFFIX:
            return read_parquet(source, env)
        packages = () if env is None else packages_of(env)
        return InMemoryDataset.deserialize_trajectory(source, *self._permissions, packages)

    def load(self, number: int, source: Path | str | TrajectoryRecord[Any]) -> list[list[StructuredSpacesRecord]]:
        """Return the converted trajectories of a source.

        :param number: Number of the source.
        :param source: A file, or a trajectory.
        :raises ConfigError: The environment has no such agent.
        """
        converted: list[list[StructuredSpacesRecord]] = []
        env = self._environment()
        counts = {} if env is None else env.agent_counts_dict
        for trajectory in self.trajectories(source):
            processed = self._processor.process(trajectory, env)
            converted += processed
            actors = ((n, actor) for steps in processed for n, step in enumerate(steps) for actor in step.actor_ids)
            for n, (key, agent) in actors:
                count = counts.get(key, -1)
                if not has_agent(count, agent):
                    raise ConfigError(
                        f"{getattr(source, 'id', source)}, episode {trajectory.id}, step {n}, sub-step {key!r}: agent "
                        f"{agent} is unknown. The environment declares {count} agent(s), counted from 0; -1 if the "
                        "number varies. Correct the agent, or omit the episode."
                    )
        return converted

    def close(self) -> None:
        """Do nothing: the process ends."""

    @staticmethod
    def run(
        env_factory: EnvFactory | None,
        trajectories_or_paths: Sequence[Path | str | TrajectoryRecord[Any]],
        reporting_queue: Any,
        trajectory_processor: TrajectoryProcessor,
    ) -> None:
        """Put, for each source, the list of converted trajectories into the queue.

        :param env_factory: Makes the environment for the conversion.
        :param trajectories_or_paths: Files and trajectories of this worker.
        :param reporting_queue: Object with the method `put`.
        :param trajectory_processor: Processor of each trajectory.
        """
        worker = DataLoadWorker(env_factory, trajectory_processor)
        for number, source in enumerate(trajectories_or_paths):
            reporting_queue.put(worker.load(number, source))


def _source(arguments: tuple[int, Any]) -> str:
    source = arguments[1]
    return f" of {getattr(source, 'id', source)}"
