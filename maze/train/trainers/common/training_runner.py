"""What all training runs have in common: environments, spaces, model, logging, resumption."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.config_utils import EnvFactory
from maze.core.utils.factory import Factory
from maze.core.utils.files import clean_stale_temporaries
from maze.core.utils.seeding import MazeSeeding, set_seeds_globally
from maze.core.wrappers.observation_normalization.observation_normalization_utils import (
    make_normalized_env_factory,
    obtain_normalization_statistics,
)
from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import (
    ObservationNormalizationWrapper,
)
from maze.core.wrappers.observation_normalization.statistics_file import StructuredStatisticsType
from maze.perception.models.model_composer import BaseModelComposer
from maze.perception.models.space_config import SpacesConfig
from maze.runner import Runner
from maze.train.trainers.common.trainer import Trainer
from maze.utils.log_stats_utils import setup_logging

ComponentType = TypeVar("ComponentType")

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass
class TrainingRunner(Runner):
    """Builds what a training needs from its configuration, and runs it.

    :param state_dict_dump_file: File for the weights of the best model.
    :param dump_interval: Additionally keep the weights after every so many epochs; ``None``: only the best ones.
    :param spaces_config_dump_file: File for the action and observation spaces the model was built for.
    :param normalization_samples: Number of observations from which normalization statistics are estimated.
    """

    state_dict_dump_file: str = "state_dict.pt"
    dump_interval: int | None = None
    spaces_config_dump_file: str = "spaces_config.pkl"
    normalization_samples: int = 10000

    env_factory: Callable[[], Any] | None = field(default=None, init=False)
    """Makes one environment with all its wrappers."""

    def __post_init__(self) -> None:
        self._cfg: DictConfig | None = None
        self._model_composer: BaseModelComposer | None = None
        self._trainer: Trainer | None = None
        self._normalization_statistics: StructuredStatisticsType | None = None

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        seeding = cfg.get("seeding") or {}
        self.maze_seeding = MazeSeeding(
            seeding.get("env_base_seed"), seeding.get("agent_base_seed"), bool(seeding.get("cudnn_determinism_flag"))
        )
        # networks draw their initial weights from torch's global generator
        set_seeds_globally(
            self.maze_seeding.agent_global_seed, self.maze_seeding.cudnn_determinism_flag, "of the training run"
        )
        self.env_factory = EnvFactory(cfg.env, cfg.get("wrappers") or {})
        env = self.env_factory()
        try:
            env.seed(self.maze_seeding.generate_env_instance_seed())
            self._normalization_statistics = self._estimate_normalization_statistics(env)
            spaces = {
                "action_spaces_dict": env.action_spaces_dict,
                "observation_spaces_dict": env.observation_spaces_dict,
                "agent_counts_dict": env.agent_counts_dict,
            }
        finally:
            env.close()
        SpacesConfig(**spaces).save(self.spaces_config_dump_file)
        setup_logging(job_config=cfg)
        self._model_composer = Factory(BaseModelComposer).instantiate(  # type: ignore[type-abstract]  # built from a subclass
            cfg.model, **spaces
        )
        self._model_composer.save_models()

    @override(Runner)
    def run(self, n_epochs: int | None = None, **train_kwargs: Any) -> None:
        self.trainer.train(n_epochs=n_epochs, **train_kwargs)

    @property
    def model_composer(self) -> BaseModelComposer:
        """Builds policies and critics; available after :meth:`setup`."""
        return self._after_setup(self._model_composer)

    @property
    def cfg(self) -> DictConfig:
        """The whole configuration; available after :meth:`setup`."""
        return self._after_setup(self._cfg)

    @property
    def trainer(self) -> Trainer:
        """The trainer; available after :meth:`setup`."""
        return self._after_setup(self._trainer)

    def _after_setup(self, component: ComponentType | None) -> ComponentType:
        if component is None:
            raise ConfigError(f"The {type(self).__name__} was not set up: call setup(cfg) before using it.")
        return component

    def _init_trainer_from_input_dir(self, trainer: Trainer, state_dict_dump_file: str, input_dir: str | None) -> None:
        """Starts the training from the best model of an earlier run, if one is configured.

        :param trainer: The trainer whose model gets the weights.
        :param state_dict_dump_file: Name of the file with the weights in that run's directory.
        :param input_dir: Directory of the earlier run; empty: none.
        """
        if not input_dir:
            return
        path = Path(input_dir) / Path(state_dict_dump_file).name
        if not path.is_file():
            found = "is no directory" if not path.parent.is_dir() else f"has no {path.name} in it"
            raise ConfigError(
                f"input_dir: {path.parent} {found}. Expected the directory of a training run; "
                "`maze-run -cn conf_train env=... algorithm=...` makes one below `outputs`."
            )
        with suppress(OSError):  # a directory that cannot be written to has nothing of ours to clean up
            clean_stale_temporaries(path.parent, min_age=60.0)
        trainer.load_state(path)

    def _estimate_normalization_statistics(self, env: Any) -> StructuredStatisticsType | None:
        """Statistics for observation normalization, where the environment asks for it.

        A run that continues another one takes over its statistics: its model was trained with them.
        """
        if not isinstance(env, ObservationNormalizationWrapper):
            return None
        assert self.env_factory is not None
        input_dir = self.cfg.get("input_dir")
        if input_dir and env.names_to_estimate():
            file = env.statistics_dump or Path("statistics.pkl")
            env.load_statistics(Path(input_dir) / file.name)
            env.dump_statistics()
            statistics: StructuredStatisticsType | None = env.get_statistics()
        else:
            statistics = obtain_normalization_statistics(env, n_samples=self.normalization_samples)
        self.env_factory = make_normalized_env_factory(self.env_factory, statistics)
        return statistics
