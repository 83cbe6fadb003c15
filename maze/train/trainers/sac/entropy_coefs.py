"""How much entropy counts in the objective, learned."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

Key = Any


class EntropyCoefs(nn.Module):
    """Logarithms of the entropy coefficients, one for each sub-step key.

    :param keys: The sub-step keys.
    :param initial: Where all of them start.
    """

    def __init__(self, keys: list[Key], initial: float) -> None:
        super().__init__()
        log = math.log(initial) if initial > 0.0 else -math.inf
        self.logs = nn.ParameterList([nn.Parameter(torch.tensor(log)) for _ in keys])
        self._by_key: dict[Key, Tensor] = dict(zip(keys, self.logs, strict=True))

    def alphas(self) -> dict[Key, Tensor]:
        """The coefficients themselves, without gradients."""
        return {key: log.detach().exp() for key, log in self._by_key.items()}

    def log_alpha(self, key: Key) -> Tensor:
        """One logarithm, with its gradient."""
        return self._by_key[key]
