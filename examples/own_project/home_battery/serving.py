"""What the service of a policy needs of this project, beside the bundle; without torch, and without the simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

CHEAP, DEAR = 0.15, 0.45
"""EUR per kWh, as in `conf/wrappers/price_level.yaml`."""


def price_level(observation: Mapping[str, Any], actor_id: Any) -> dict[str, Any]:
    """Does what `PriceLevelWrapper` does in training."""
    level = 2.0 * (observation["market"][:1] - CHEAP) / (DEAR - CHEAP) - 1.0
    return {**observation, "price_level": level.astype(np.float32)}


def threshold(observation: Mapping[str, Any], actor_id: Any) -> dict[str, int]:
    """Stands in for the policy: stores what the roof gives beyond the demand, and spends it when energy is dear."""
    (charge,), (price, solar, demand) = observation["charge"], observation["market"]
    if solar > demand and charge < 0.9:
        return {"battery": 2}
    return {"battery": 0 if price >= DEAR and charge > 0.1 else 1}
