"""Drift: summaries of the observations in training, and the comparison of later observations with them.

Each entry of an observation is summarised by components: small whole numbers by the share of each value, others by
deciles. Large entries, such as images, are summarised by four features.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from maze.core.errors import ConfigError
from maze.serve.bundle_file import Array, BundleError

_LOGGER = logging.getLogger(__name__)


FEATURES = ("mean", "std", "min", "max")
"""Features of entries with more than :data:`MOST_COMPONENTS` components."""
MOST_COMPONENTS = 64
MOST_CATEGORIES = 64
_LEVELS = np.arange(1, 10) / 10
_LEAST_SHARE = 1e-4  # replaces a share of zero, which has no logarithm
_MIN_EFFECTIVE = 100  # minimum number of effective samples of a component with an index
_MAX_STRIDE = 64
_FALSE_ALARM = 0.001  # probability of a warning about an entry that has not changed
# Widening of the training's range for the share outside, relative to its width and per effective sample.
_WIDENING = 20.0
_ROUNDING = 4.0 * float(np.finfo(np.float32).eps)  # relative difference of a value that is computed in another way


def components(array: Any) -> Array:
    """Return components, or features, of an entry of an observation.

    :param array: `[*shape]`.
    :return: `[n_components]`, or the features of large entries.
    """
    values = np.asarray(array).reshape(-1)
    if values.size <= MOST_COMPONENTS:
        return values
    return np.array([values.mean(), values.std(), values.min(), values.max()], np.float64)


def summary(samples: Array, is_large: bool) -> dict[str, Any]:
    """Summarise an entry, as JSON.

    :param samples: Results of :func:`components` for each observation, `[n_samples, n_components]`.
    :param is_large: Whether these are features.
    :return: `n_samples`, `n_effective` (of each component, see :func:`effective_samples`), `features` (names, or None),
        and for each of the `components` either `values` with their `shares`, or `min`, `max`, nine inner deciles as
        `edges`, and the `shares` of the ten bins between them. A value that equals an edge belongs to the bin above it.
    """
    parts = [_component(samples[:, index]) for index in range(samples.shape[1])]
    return {
        "n_samples": len(samples),
        "n_effective": [round(effective_samples(places), 1) for _, places in parts],
        "features": list(FEATURES) if is_large else None,
        "components": [component for component, _ in parts],
    }


def _component(values: Array) -> tuple[dict[str, Any], Array]:
    """Summarise a component; return the bins of its values as well."""
    n_values = len(values)
    if values.dtype.kind in "iub":
        found, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        if len(found) <= MOST_CATEGORIES:
            return {"values": found.astype(np.int64).tolist(), "shares": (counts / n_values).tolist()}, places
    values = values.astype(np.float64)
    edges = np.quantile(values, _LEVELS)
    places = np.digitize(values, edges)
    component = {
        "min": float(values.min()),
        "max": float(values.max()),
        "edges": edges.tolist(),
        "shares": (np.bincount(places, minlength=len(edges) + 1) / n_values).tolist(),
    }
    return component, places


def effective_samples(places: Array, n_parts: int = 1, n_batches: Sequence[int] = (4, 10)) -> float:
    """Estimate the number of independent samples with as much information on the shares of bins.

    The number of samples is divided by the autocorrelation time: the largest of the bins' indicators, as overlapping
    batch means estimate it (Meketon and Schmeiser 1984). Few long batches overestimate it occasionally, and detect
    differences between episodes.

    :param places: The bins of samples, in the order of observation, `[n_samples]`.
    :param n_parts: Number of parts of the samples that are estimated separately. The smallest autocorrelation time is
        used, so that a shift in one of them is not taken for autocorrelation.
    :param n_batches: Numbers of batches in a part, of which the largest autocorrelation time is used.
    """
    indicators = (np.asarray(places)[:, None] == np.unique(places)).astype(np.float64)
    parts = np.array_split(indicators, min(n_parts, len(places)))
    return len(places) / min(max(_autocorrelation_time(part, n) for n in n_batches) for part in parts)


def _autocorrelation_time(indicators: Array, n_batches: int) -> float:
    """Return the autocorrelation time; 1 where values are independent, or constant."""
    n, length = len(indicators), max(1, len(indicators) // n_batches)
    sums = np.cumsum(np.concatenate([np.zeros((1, indicators.shape[1])), indicators - indicators.mean(0)]), axis=0)
    between = ((sums[length:] - sums[:-length]) ** 2).mean(0) * n / (length * max(1, n - length))
    variance = indicators.var(0)
    return max(1.0, float(np.divide(between, variance, out=np.ones_like(variance), where=variance > 0).max()))


def entry_summaries(samples: Mapping[str, list[Array]], space: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise the entries of a sub-step, by name.

    :param samples: Results of :func:`components` by entry.
    :param space: Their spaces.
    """
    return {
        name: summary(np.stack(values), math.prod(space[name].shape) > MOST_COMPONENTS)
        for name, values in samples.items()
        if values[0].size  # entries without numbers say nothing
    }


# -- comparison --------------------------------------------------------------------------------------------------------


def population_stability_index(expected: Array, observed: Array) -> Array:
    """Return `sum((o - e) * ln(o / e))` over the shares of bins (Siddiqi 2006, Credit Risk Scorecards).

    Below 0.1 a population counts as unchanged, above 0.25 as changed. Without a change, the mean over samples of n
    independent observations is about `(n_bins - 1) / n`.

    :param expected: Shares `[..., n_bins]`, which sum to 1.
    :param observed: Shares `[..., n_bins]`, which sum to 1.
    :return: `[...]`.
    """
    expected, observed = np.maximum(expected, _LEAST_SHARE), np.maximum(observed, _LEAST_SHARE)
    return np.asarray(((observed - expected) * np.log(observed / expected)).sum(-1))


@dataclass(frozen=True)
class DriftLimits:
    """Limits above which observations differ from those of the training.

    :param psi: Population stability index of an entry, less chance, from which a warning is logged.
    :param out_of_range: Share of values outside the range of the training, above which an observation is an outlier,
        and the latest observations of an entry cause a warning.
    :param margin: Widening of the range at both ends, relative to its width: it is the range of a sample.
    :param window: Number of latest observations that are compared; autocorrelated ones are thinned to one in 2, 4, ...
    :param at_least: Minimum number of observations that are compared.
    :raises ConfigError: A limit is out of its range.
    """

    psi: float = 0.25
    out_of_range: float = 0.1
    margin: float = 0.1
    window: int = 2000
    at_least: int = 500

    def __post_init__(self) -> None:
        for name in ("psi", "out_of_range", "margin"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"drift: `{name}` must be a number of at least 0, found {getattr(self, name)}.")
        if not 1 <= self.at_least <= self.window:
            raise ConfigError(f"drift: `at_least` ({self.at_least}) must lie between 1 and the window ({self.window}).")


class EntryDrift(NamedTuple):
    """Difference of an entry of the latest observations from the training.

    :param step: Its sub-step.
    :param entry: Its name.
    :param psi: The largest population stability index among its components, less chance (99.9 %).
    :param component: The component with this index, or the feature of a large entry.
    :param out_of_range: Share of its values outside the range of the training, which is wider for fewer effective
        samples of the training.
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


def checked_summaries(
    entries: Mapping[str, Any], space: Mapping[str, Mapping[str, Any]], where: str
) -> Mapping[str, Any]:
    """Check the summaries of a sub-step that were read from a file.

    :param entries: Summaries by entry.
    :param space: Spaces of the observation by entry.
    :param where: The sub-step in messages.
    :return: The summaries.
    :raises BundleError: Entries are unknown, or their summaries differ from those of :func:`summary`.
    """
    for name, found in entries.items():
        place = f"{where}: the drift section's entry `{name}`"
        if name not in space:
            raise BundleError(f"{place} is not an entry of the observation {list(space)}. Export the policy again.")
        n_values = math.prod(space[name]["shape"])
        n_expected = n_values if n_values <= MOST_COMPONENTS else len(FEATURES)
        try:
            if found["features"] not in (None, list(FEATURES)) or len(found["components"]) != n_expected:
                raise ValueError(f"expected {n_expected} components, found {len(found['components'])}")
            _EntrySummary(found, 0.0)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BundleError(f"{place} cannot be read: {error}. Export the policy again.") from error
    return entries


class _EntrySummary:
    """The summary of an entry, as arrays over its components.

    :param summary: See :func:`summary`.
    :param margin: See :class:`DriftLimits`.
    :raises ValueError: Numbers are missing, not finite, or negative.
    """

    def __init__(self, summary: Mapping[str, Any], margin: float) -> None:
        parts = summary["components"]
        self.features: list[str] | None = summary["features"]
        n_samples, *effective = _numbers([summary["n_samples"], *summary["n_effective"]], len(parts) + 1)
        if min(n_samples, *effective) <= 0:
            raise ValueError("numbers of samples are not positive")
        self._n_effective = np.asarray(effective).clip(1.0)
        self._interval = n_samples / self._n_effective
        # Categories are bins between them: below, above and between there are bins that the training never filled.
        self._edges: list[Array] = []
        self._shares: list[Array] = []
        ranges = []
        for part in parts:
            if "values" in part:
                values = _numbers(part["values"])
                shares = np.zeros(2 * len(values) + 1)
                shares[1::2] = _numbers(part["shares"], len(values))
                edges = np.stack([values - 0.5, values + 0.5], -1).reshape(-1)
                ranges.append((values.min(), values.max(), 0.0))
            else:
                edges = _numbers(part["edges"])
                edges = edges - _ROUNDING * np.abs(edges)
                shares = _numbers(part["shares"], len(edges) + 1)
                ranges.append((*_numbers([part["min"], part["max"]]), 1.0))
            if (shares < 0).any():
                raise ValueError("shares are negative")
            self._edges.append(edges)
            self._shares.append(shares)
        low, high, is_continuous = np.asarray(ranges, np.float64).reshape(-1, 3).T
        width = is_continuous * (high - low)
        widening = margin * width + is_continuous * _ROUNDING * np.maximum(np.abs(low), np.abs(high))
        self.low, self.high = low - widening, high + widening
        unseen = _WIDENING / self._n_effective * width
        self._lowest, self._highest = self.low - unseen, self.high + unseen
        degrees = np.array([max(1, np.count_nonzero(shares) - 1) for shares in self._shares])
        # the upper quantile of chi square (Wilson and Hilferty 1931)
        part_of_degree, upper = 2.0 / (9.0 * degrees), NormalDist().inv_cdf(1.0 - _FALSE_ALARM / max(1, len(parts)))
        self._chance = degrees * (1.0 - part_of_degree + upper * np.sqrt(part_of_degree)) ** 3

    def drift(self, samples: Array, stride: int) -> tuple[float, int, float, float]:
        """Compare samples with the training.

        :param samples: One in `stride` observations, `[n_samples, n_components]`.
        :param stride: The thinning.
        :return: The largest index, less chance, with its component; the share outside the range; the smallest number
            of effective samples. Components with too few effective samples have no index.
        """
        n = len(samples)
        places = [np.digitize(samples[:, index], edges) for index, edges in enumerate(self._edges)]
        # Few observations do not distinguish rare changes of the training from a constant.
        most = n / np.maximum(1.0, self._interval / stride)
        n_effective = np.minimum(most, [effective_samples(each, 2, [10]) for each in places])
        known = n_effective >= min(_MIN_EFFECTIVE, n / 8)
        # Without a change, the index is distributed as chi square, times both variances (Yurdakul and Naranjo 2020).
        counts = (np.bincount(each, minlength=len(shares)) for each, shares in zip(places, self._shares, strict=True))
        pairs = zip(self._shares, counts, strict=True)
        found = np.array([population_stability_index(shares, count / n) for shares, count in pairs])
        indices = found - self._chance * (1.0 / n_effective + 1.0 / self._n_effective)
        indices[~known] = -np.inf
        worst = int(indices.argmax())
        outside = float(((samples < self._lowest) | (samples > self._highest)).mean())
        return max(0.0, float(indices[worst])), worst, outside, float(n_effective.min())


def _numbers(values: Any, n_values: int | None = None) -> Array:
    numbers = np.asarray(values, np.float64)
    if numbers.ndim != 1 or not len(numbers) or len(numbers) != (n_values or len(numbers)):
        raise ValueError(f"expected {n_values or 'some'} numbers, found {numbers.size}")
    if not np.isfinite(numbers).all():
        raise ValueError("numbers are not finite")
    return numbers


class DriftGuard:
    """Compare the observations of a policy with the training.

    :param name: Name of the policy in messages.
    :param summaries: Summaries by sub-step and entry; entries without a summary are ignored.
    :param limits: Limits of the drift.
    """

    def __init__(
        self, name: str, summaries: Mapping[str | int, Mapping[str, Any]], limits: DriftLimits | None = None
    ) -> None:
        self.entries: list[EntryDrift] = []
        """The latest comparison; empty before there were enough observations."""
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
        # Every n-th observation would sample one phase of an alternation only.
        self._rng = random.Random(0)
        self._n_new = 0
        self._warned: set[tuple[str, str]] = set()

    def add(self, step_key: str | int, observation: Mapping[str, Any]) -> None:
        """Add an observation.

        :param step_key: Its sub-step.
        :param observation: Its entries before all wrappers; not modified later.
        """
        seen = self._seen.get(step_key)
        if seen is None:
            return
        if self._rng.random() * self._stride[step_key] < 1.0:
            seen.append([components(observation[entry]) for entry in self._summaries[step_key]])
            self._n_new += 1

    def watch(self, step_key: str | int, observation: Mapping[str, Any]) -> None:
        """Add an observation, and compare occasionally; for callers without a clock.

        :param step_key: Its sub-step.
        :param observation: Its entries before all wrappers; entries without a summary may be missing.
        """
        if self._summaries.get(step_key, {}).keys() <= observation.keys():
            self.add(step_key, observation)
            if self._n_new >= self._limits.at_least:
                self.check()

    def outside(self, step_key: str | int, observation: Mapping[str, Any]) -> str:
        """Describe how an observation lies outside the range of the training; empty if it does not.

        :param step_key: Its sub-step.
        :param observation: Its entries before all wrappers.
        """
        n_outside, n_values, worst = 0, 0, ("", 0)
        for entry, summary in self._summaries.get(step_key, {}).items():
            values = components(observation[entry])
            outside = (values < summary.low) | (values > summary.high)
            n = int(np.count_nonzero(outside))
            n_outside, n_values = n_outside + n, n_values + outside.size
            if n > worst[1]:
                worst = (entry, n)
        if not n_outside or n_outside / n_values <= self._limits.out_of_range:
            return ""
        return (
            f"{n_outside} of {n_values} values of the observation lie outside the range of the training, "
            f"{worst[1]} of them in `{worst[0]}`."
        )

    def check(self) -> None:
        """Compare the latest observations with the training, if there are new ones, and warn where they differ.

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
        """Warn once, and again after the entry was within the limits."""
        place = (found.step, found.entry)
        if found.psi < self._limits.psi and found.out_of_range <= self._limits.out_of_range:
            self._warned.discard(place)
        elif place not in self._warned:
            self._warned.add(place)
            limits = {"psi_limit": self._limits.psi, "limit": 100.0 * self._limits.out_of_range}
            _LOGGER.warning(
                "Policy %(policy)s: the latest %(n)d observations (%(n_effective)d effective) differ from those of the "
                "training. Entry `%(entry)s` (sub-step %(step)s): population stability index %(psi).2f beyond chance "
                "in component %(component)s (limit %(psi_limit)g), %(outside).1f %% of its values outside the "
                "training's range (limit %(limit).1f %%).",
                {"policy": self._name, **found._asdict(), "outside": 100.0 * found.out_of_range, **limits},
            )
