"""Notices that observations at work are not those of the training any more."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from maze.core.errors import ConfigError
from maze.serve.drift import bins, components, effective_samples

_LOGGER = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
_LEAST_SHARE = 1e-4
"""Stands for a share of zero, which has no logarithm."""
_MIN_EFFECTIVE = 100
"""Effective samples from which a component is judged."""
_MAX_STRIDE = 64
_FALSE_ALARM = 0.001
"""Probability of a warning about an entry that has not changed."""
_WIDENING = 20.0
"""Of the training's range for the share outside, relative to its width, divided by the number of effective samples."""


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
    """Population stability index of an entry, less what chance explains, from which a warning is logged."""
    out_of_range: float = 0.1
    """Share of an observation's values outside the range of the training from which it is an outlier; the same share of
    all values lately seen is warned about."""
    margin: float = 0.1
    """By how much of its width the range is widened at both ends: it is that of a sample."""
    window: int = 2000
    """Number of the latest observations that are compared; of autocorrelated ones, one in 2, 4, ... of more."""
    at_least: int = 500
    """Fewer are not compared."""

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
    :param psi: The largest population stability index among its components, less what chance explains (99.9 %).
    :param component: The component (or feature, of large entries) that has it.
    :param out_of_range: Share of its values outside the range of the training, which is the wider, the fewer effective
        samples that had.
    :param n: Number of observations.
    :param n_effective: Smallest number of effective samples among the components.
    """

    step: str
    entry: str
    psi: float
    component: str
    out_of_range: float
    n: int
    n_effective: int


class _EntrySummary:
    """The summary of one entry, as arrays over its components."""

    def __init__(self, summary: Mapping[str, Any], margin: float) -> None:
        parts = summary["components"]
        self.features: list[str] | None = summary["features"]
        # Bundles of earlier releases do not tell the number of effective samples.
        n_samples = float(summary["n_samples"])
        told = np.asarray(summary.get("n_effective", n_samples), np.float64)
        self._n_effective = np.broadcast_to(told, len(parts)).clip(1.0)
        self._interval = n_samples / self._n_effective
        low = np.array([min(part["values"]) if "values" in part else part["min"] for part in parts], np.float64)
        high = np.array([max(part["values"]) if "values" in part else part["max"] for part in parts], np.float64)
        categorical = np.array(["values" in part for part in parts])
        widening = np.where(categorical, 0.0, margin * (high - low))
        self.low, self.high = low - widening, high + widening
        unseen = np.where(categorical, 0.0, _WIDENING / self._n_effective * (high - low))
        self._lowest, self._highest = self.low - unseen, self.high + unseen
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
        degrees = np.array([max(1, np.count_nonzero(shares) - 1) for shares in self._shares])
        self._chance = _chi_square(degrees, _FALSE_ALARM / len(parts))

    def drift(self, samples: Array, stride: int) -> tuple[float, int, float, float]:
        """Compares samples with the training.

        :param samples: One of so many observations, `[n_samples, n_components]`.
        :param stride: So many.
        :return: The largest index, less what chance explains, with its component; the share outside the range; the
            smallest number of effective samples. Components with too few effective samples have no index.
        """
        n = len(samples)
        places = [bins(edges, samples[:, index]) for index, edges in enumerate(self._edges)]
        # What hardly ever changed in the training cannot be told from a constant by few observations.
        most = n / np.maximum(1.0, self._interval / stride)
        n_effective = np.minimum(most, [effective_samples(each, 2, [10]) for each in places])
        known = n_effective >= min(_MIN_EFFECTIVE, n / 8)
        # Without a change, the index is distributed as chi square, times both variances (Yurdakul and Naranjo 2020).
        indices = self._indices(places, n) - self._chance * (1.0 / n_effective + 1.0 / self._n_effective)
        indices[~known] = -np.inf
        worst = int(indices.argmax())
        outside = float(((samples < self._lowest) | (samples > self._highest)).mean())
        return max(0.0, float(indices[worst])), worst, outside, float(n_effective.min())

    def outside(self, values: Array) -> Array:
        """Which components lie outside the training's range, `[..., n_components]`."""
        found: Array = (values < self.low) | (values > self.high)
        return found

    def _indices(self, places: list[Array], n_samples: int) -> Array:
        counts = (np.bincount(each, minlength=len(shares)) for each, shares in zip(places, self._shares, strict=True))
        pairs = zip(self._shares, counts, strict=True)
        return np.array([population_stability_index(shares, count / n_samples) for shares, count in pairs])


def _chi_square(degrees: Array, upper: float) -> Array:
    """The quantile with a probability above it (Wilson and Hilferty 1931)."""
    part = 2.0 / (9.0 * degrees)
    return np.asarray(degrees * (1.0 - part + NormalDist().inv_cdf(1.0 - upper) * np.sqrt(part)) ** 3)


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
        self._stride = dict.fromkeys(self._seen, 1)
        # Each n-th observation would show one phase only of what alternates.
        self._rng = random.Random(0)
        self._n_new = 0
        self._warned: set[tuple[str, str]] = set()

    def add(self, step_key: str | int, observation: Mapping[str, Any]) -> None:
        """Takes note of an observation.

        :param step_key: Its sub-step.
        :param observation: Its entries as they left the environment; they are not changed later.
        """
        seen = self._seen.get(step_key)
        if seen is None:
            return
        if self._rng.random() * self._stride[step_key] < 1.0:
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
        for key, latest in list(self._seen.items()):
            seen = list(latest)
            if len(seen) < self._limits.at_least:
                continue
            least = float(len(seen))
            for place, (entry, summary) in enumerate(self._summaries[key].items()):
                samples = np.stack([each[place] for each in seen]).astype(np.float64)
                psi, worst, outside, n_effective = summary.drift(samples, self._stride[key])
                least = min(least, n_effective)
                component = str(worst) if summary.features is None else summary.features[worst]
                entries.append(EntryDrift(str(key), entry, psi, component, outside, len(seen), int(n_effective)))
            if least < _MIN_EFFECTIVE and len(seen) == self._limits.window and self._stride[key] < _MAX_STRIDE:
                self._stride[key] *= 2
                kept = (each for each in seen if self._rng.random() < 0.5)
                self._seen[key] = deque(kept, maxlen=self._limits.window)
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
                "Policy %s: the latest %d observations (%d effective) are not those of the training. Entry `%s` "
                "(sub-step %s): population stability index %.2f beyond chance in component %s (limit %g), %.1f %% of "
                "its values outside the training's range (limit %.1f %%).",
                self._name,
                found.n,
                found.n_effective,
                found.entry,
                found.step,
                found.psi,
                found.component,
                self._limits.psi,
                100.0 * found.out_of_range,
                100.0 * self._limits.out_of_range,
            )
