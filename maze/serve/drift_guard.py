"""Notices that observations at work are not those of the training any more."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from maze.core.errors import ConfigError
from maze.serve.drift import components

_LOGGER = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
_LEAST_SHARE = 1e-4
"""Stands for a share of zero, which has no logarithm."""


def population_stability_index(expected: Array, observed: Array) -> Array:
    """`sum((o - e) * ln(o / e))` over the shares of the bins (Siddiqi 2006, Credit Risk Scorecards).

    Below 0.1 a population counts as the same, above 0.25 as another one. Where nothing has changed, the mean over
    samples of n independent observations is about `(n_bins - 1) / n`.

    :param expected: Shares `[..., n_bins]`, which sum to 1.
    :param observed: Shares `[..., n_bins]`, which sum to 1.
    :return: `[...]`.
    """
    expected, observed = np.maximum(expected, _LEAST_SHARE), np.maximum(observed, _LEAST_SHARE)
    index: Array = ((observed - expected) * np.log(observed / expected)).sum(-1)
    return index


@dataclass(frozen=True)
class DriftLimits:
    """When observations count as others than those of the training.

    :raises ConfigError: A limit is out of its range.
    """

    psi: float = 0.25
    """Population stability index of an entry from which a warning is logged."""
    out_of_range: float = 0.1
    """Share of an observation's values outside the range of the training from which it is an outlier; the same share of
    all values lately seen is warned about."""
    margin: float = 0.1
    """By how much of its width the range is widened at both ends: it is that of a sample."""
    window: int = 2000
    """The latest so many observations are looked at."""
    at_least: int = 500
    """Fewer say nothing."""

    def __post_init__(self) -> None:
        for name in ("psi", "out_of_range", "margin"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"drift: `{name}` must be a number of at least 0, got {getattr(self, name)}.")
        if not 1 <= self.at_least <= self.window:
            raise ConfigError(f"drift: `at_least` ({self.at_least}) must lie between 1 and the window ({self.window}).")


class EntryDrift(NamedTuple):
    """How one entry of the latest observations differs from the training's.

    :param step: Its sub-step.
    :param entry: Its name.
    :param psi: The largest population stability index among its components.
    :param component: The component (or feature, of large entries) that has it.
    :param out_of_range: Share of its values outside the range of the training.
    :param n: Number of observations.
    """

    step: str
    entry: str
    psi: float
    component: str
    out_of_range: float
    n: int


class _EntrySummary:
    """The summary of one entry, as arrays over its components."""

    def __init__(self, summary: Mapping[str, Any], margin: float) -> None:
        parts = summary["components"]
        self.features: list[str] | None = summary["features"]
        low = np.array([min(part["values"]) if "values" in part else part["min"] for part in parts], np.float64)
        high = np.array([max(part["values"]) if "values" in part else part["max"] for part in parts], np.float64)
        categorical = np.array(["values" in part for part in parts])
        widening = np.where(categorical, 0.0, margin * (high - low))
        self.low, self.high = low - widening, high + widening
        # Categories are bins between them: below, above and between there are bins that the training never filled.
        self._edges: list[Array] = []
        self._shares: list[Array] = []
        for part in parts:
            shares = np.asarray(part["shares"], np.float64)
            if "values" in part:
                values = np.asarray(part["values"], np.float64)
                edges = np.stack([values - 0.5, values + 0.5], -1).reshape(-1)
                filled = np.zeros(2 * len(values) + 1)
                filled[1::2] = shares
                shares = filled
            else:
                edges = np.asarray(part["edges"], np.float64)
            self._edges.append(edges)
            self._shares.append(shares)

    def outside(self, values: Array) -> Array:
        """Which components lie outside the training's range, `[..., n_components]`."""
        found: Array = (values < self.low) | (values > self.high)
        return found

    def indices(self, samples: Array) -> Array:
        """The population stability index of each component.

        :param samples: `[n_samples, n_components]`.
        """
        found = np.empty(samples.shape[1])
        for index, (edges, shares) in enumerate(zip(self._edges, self._shares, strict=True)):
            counts = np.bincount(np.searchsorted(edges, samples[:, index], side="right"), minlength=len(shares))
            found[index] = population_stability_index(shares, counts / len(samples))
        return found


class DriftGuard:
    """Watches the observations that a policy is asked about.

    :param name: Of the policy, for messages.
    :param summaries: By sub-step and entry, see :mod:`maze.serve.drift`; what has no summary is not watched.
    :param limits: See there.
    """

    def __init__(
        self, name: str, summaries: Mapping[str | int, Mapping[str, Any]], limits: DriftLimits | None = None
    ) -> None:
        self.entries: list[EntryDrift] = []
        """The latest result; empty before there were enough observations."""
        self._name = name
        self._limits = limits or DriftLimits()
        self._summaries = {
            key: {entry: _EntrySummary(summary, self._limits.margin) for entry, summary in entries.items()}
            for key, entries in summaries.items()
        }
        self._seen: dict[str | int, deque[list[Array]]] = {
            key: deque(maxlen=self._limits.window) for key, entries in self._summaries.items() if entries
        }
        self._n_new = 0
        self._warned: set[tuple[str, str]] = set()

    def add(self, step_key: str | int, observation: Mapping[str, Any]) -> None:
        """Takes note of an observation.

        :param step_key: Its sub-step.
        :param observation: Its entries as they left the environment; they are not changed later.
        """
        seen = self._seen.get(step_key)
        if seen is not None:
            seen.append([components(observation[entry]) for entry in self._summaries[step_key]])
            self._n_new += 1

    def watch(self, step_key: str | int, observation: Mapping[str, Any]) -> None:
        """Takes note of an observation, and looks at all of them now and then; for whoever has no clock.

        :param step_key: Its sub-step.
        :param observation: Its entries as they left the environment; what has no summary may be missing.
        """
        if self._summaries.get(step_key, {}).keys() <= observation.keys():
            self.add(step_key, observation)
            if self._n_new >= self._limits.at_least:
                self.look()

    def outside(self, step_key: str | int, observation: Mapping[str, Any]) -> str:
        """Says in what an observation lies outside the range of the training; nothing, where it does not.

        :param step_key: Its sub-step.
        :param observation: Its entries as they left the environment.
        """
        n_outside, n_values, worst = 0, 0, ("", 0)
        for entry, summary in self._summaries.get(step_key, {}).items():
            outside = summary.outside(components(observation[entry]))
            n = int(np.count_nonzero(outside))
            n_outside, n_values = n_outside + n, n_values + outside.size
            if n > worst[1]:
                worst = (entry, n)
        if not n_outside or n_outside / n_values <= self._limits.out_of_range:
            return ""
        return (
            f"{n_outside} of {n_values} values of the observation lie outside what the training has seen, "
            f"{worst[1]} of them in `{worst[0]}`."
        )

    def look(self) -> None:
        """Compares the latest observations with the training, if there are new ones, and warns where they differ.

        May be called in a thread while observations are added.
        """
        if not self._n_new:
            return
        self._n_new = 0
        entries = []
        for key, latest in self._seen.items():
            seen = list(latest)
            if len(seen) < self._limits.at_least:
                continue
            for place, (entry, summary) in enumerate(self._summaries[key].items()):
                samples = np.stack([each[place] for each in seen]).astype(np.float64)
                indices = summary.indices(samples)
                worst = int(indices.argmax())
                component = str(worst) if summary.features is None else summary.features[worst]
                outside = float(summary.outside(samples).mean())
                entries.append(EntryDrift(str(key), entry, float(indices[worst]), component, outside, len(seen)))
        self.entries = entries
        for found in entries:
            self._warn_about(found)

    def _warn_about(self, found: EntryDrift) -> None:
        """Once, and again when it was in order meanwhile."""
        place = (found.step, found.entry)
        if found.psi < self._limits.psi and found.out_of_range <= self._limits.out_of_range:
            self._warned.discard(place)
        elif place not in self._warned:
            self._warned.add(place)
            _LOGGER.warning(
                "Policy %s: the latest %d observations are not those of the training. Entry `%s` (sub-step %s): "
                "population stability index %.2f in component %s (limit %g), %.1f %% of its values outside the "
                "training's range (limit %.1f %%).",
                self._name,
                found.n,
                found.entry,
                found.step,
                found.psi,
                found.component,
                self._limits.psi,
                100.0 * found.out_of_range,
                100.0 * self._limits.out_of_range,
            )
