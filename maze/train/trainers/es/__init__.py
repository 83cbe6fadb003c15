"""Evolution strategies."""

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
