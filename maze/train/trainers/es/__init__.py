"""Evolution strategies."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Import a documented name on first use: the configuration alone must not import torch."""
    if name.startswith(("ES", "SharedNoise")):
        for module in ("es_algorithm_config", "es_events", "es_shared_noise_table", "es_runners", "es_trainer"):
            if found := vars(importlib.import_module(f"{__name__}.{module}")).get(name):
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
