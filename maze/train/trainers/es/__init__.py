"""Evolution strategies."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maze.train.trainers.es.es_algorithm_config import ESAlgorithmConfig
    from maze.train.trainers.es.es_events import ESEvents
    from maze.train.trainers.es.es_runners import ESDevRunner, ESLocalRunner, ESMasterRunner
    from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable
    from maze.train.trainers.es.es_trainer import ESTrainer

__all__ = [
    "ESAlgorithmConfig",
    "ESDevRunner",
    "ESEvents",
    "ESLocalRunner",
    "ESMasterRunner",
    "ESTrainer",
    "SharedNoiseTable",
]


def __getattr__(name: str) -> Any:
    """Import a documented name on first use: the configuration alone must not import torch."""
    if name in __all__:
        for module in ("es_algorithm_config", "es_events", "es_shared_noise_table", "es_runners", "es_trainer"):
            found = getattr(importlib.import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
