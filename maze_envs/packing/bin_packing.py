"""Online bin packing: items arrive one by one, and each is put into a bin before the next one is seen.

The families of Romera-Paredes et al. (2024), Mathematical discoveries from program search with large language models,
Nature 625: items uniform from 20 to 100 with bins of 150 (as the OR-Library's u120 to u1000), and items of a Weibull
distribution (45, 3) with bins of 100. What counts is the number of bins above the lower bound.
"""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.core.errors import ConfigError
from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats
from maze_envs.common.array_policy import ArrayPolicy
from maze_envs.packing.renderer import BinRenderer

UNIFORM, WEIBULL = "uniform", "weibull"
CAPACITIES: Mapping[str, int] = {UNIFORM: 150, WEIBULL: 100}
"""Capacity of a bin by family of items."""

REWARD_SCALE = 10.0
"""A bin above the total size is a return of -10."""
FEATURES = (
    "room",
    "room_left",
    "small_room_left",
    "is_filled",
    "is_new",
    "chance_to_fit",
    "chance_to_fill",
    "waste",
    "bins",
    "bins_with_room_left",
    "item",
)
"""Features of each candidate, in this order: the room that the bins have and what the item would leave (also on a
logarithmic scale, for small rooms), whether it fills the bin or takes a new one, the chances that another item fits
there and that it fills it, what has to be given up as waste, and how many bins have that room and would be alike."""
_LOOKS = 20
"""No more than so many items are reckoned with for what is left of a bin."""


class PackingEvents(ABC):
    """Events of bin packing."""

    @define_epoch_stats(np.mean, output_name="mean")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def opened(self, bins: int) -> None:
        """A new bin was opened.

        :param bins: One.
        """

    @define_epoch_stats(np.mean, output_name="mean")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def filled(self, bins: int) -> None:
        """A bin was filled to the brim.

        :param bins: One.
        """


def item_sizes(family: str, uniform: np.ndarray) -> np.ndarray:
    """Return sizes of items from uniform random numbers.

    :param family: `uniform` (20 to 100) or `weibull` (scale 45, shape 3; rounded, 1 to 100).
    :param uniform: Numbers in [0, 1), of any shape.
    """
    if family == UNIFORM:
        return np.asarray(20 + np.floor(81 * uniform), np.int64)
    return np.asarray(np.clip(np.rint(45.0 * (-np.log1p(-uniform)) ** (1 / 3)), 1, 100), np.int64)


def size_chances(family: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the chances that an item fits into each room, and that it is of that size; `[capacity + 1]` each.

    :param family: See :func:`item_sizes`.
    """
    sizes = np.arange(CAPACITIES[family] + 1)
    if family == UNIFORM:
        fits = np.clip((sizes - 19) / 81, 0.0, 1.0)
    else:
        fits = np.where(sizes < 1, 0.0, -np.expm1(-(((sizes + 0.5) / 45.0) ** 3)))
        fits[-1] = 1.0
    return fits, np.diff(fits, prepend=0.0)


class BinPacking(BatchedCoreEnv):
    """Packings of items in bins of one capacity.

    Bins with the same room are all alike, so that the action `level` (Discrete, `capacity + 1`) is the room that the
    bin has: candidates are the rooms that open bins have, and `capacity` itself, which opens a new one. Observed are
    `level_candidates` `[capacity + 1, 11]` (see :data:`FEATURES`), `level_candidates_mask` (which of them there are),
    `level_mask` (into which the item fits), and `packing` `[4]` (the item's size, the share of items to come, the
    number of open bins and the usable room in them). All is relative to the capacity and to the distribution of sizes,
    which is known, so that a policy may pack items of another distribution than those it learned with.

    What an item earns, its share of a bin minus 1 for a new bin, adds up to minus the bins above the total size. It
    would tell that a bin is opened, which must be, and not that a room is left that nothing will fit into. So the
    reward has potential-based shaping (Ng et al. 1999), which changes no sum: the usable room of open bins is given
    back, and paid for when it becomes useless. The potential is the room of the bins, each weighted with the chance
    that one of the items fits which are still to come for it. The optimum stays where it is with `gamma=1`. Rewards
    are multiplied by 10.

    :param n_envs: Number of packings.
    :param family: `uniform` or `weibull`, see :func:`item_sizes`; it determines the capacity.
    :param n_items: Items of an episode.
    :raises ConfigError: There is no such family.
    """

    row_arrays = ("room", "n_bins", "item", "total", "usable", "elapsed")
    event_interfaces = (PackingEvents,)

    def __init__(self, n_envs: int, family: str = UNIFORM, n_items: int = 500) -> None:
        if family not in CAPACITIES:
            raise ConfigError(f"env.family: expected one of {', '.join(CAPACITIES)}, found {family!r}.")
        if n_items < 1:
            raise ConfigError(f"env.n_items: expected at least 1, found {n_items}.")
        self.family, self.n_items, self.capacity = family, n_items, CAPACITIES[family]
        n_levels = self.capacity + 1
        seen = spaces.Dict(
            level_candidates=spaces.Box(0.0, np.inf, (n_levels, len(FEATURES)), np.float32),
            level_candidates_mask=spaces.Box(0.0, 1.0, (n_levels,), np.float32),
            level_mask=spaces.Box(0.0, 1.0, (n_levels,), np.float32),
            packing=spaces.Box(0.0, np.inf, (4,), np.float32),
        )
        super().__init__(n_envs, {0: spaces.Dict(level=spaces.Discrete(n_levels))}, {0: seen})
        self.room = np.full((n_envs, n_items), self.capacity, np.int64)
        """Remaining capacity of each bin, in the order in which they are opened; unopened ones are empty."""
        self.n_bins = np.zeros(n_envs, np.int64)
        self.item = np.zeros(n_envs, np.int64)
        """Size of the item that is to be packed."""
        self.total = np.zeros(n_envs, np.int64)
        """Size of all items, the one that is to be packed included."""
        self.usable = np.zeros(n_envs)
        """Room of open bins that may still be filled, in bins: the potential that shapes rewards."""
        self._fits, self._has_size = size_chances(family)
        self._has_size /= self._has_size.max()
        self._log_misfits = np.log(np.maximum(1.0 - self._fits, 1e-9))

    @override(BatchedCoreEnv)
    def reset_rows(self, rows: np.ndarray) -> None:
        self.room[rows] = self.capacity
        self.n_bins[rows] = 0
        self.usable[rows] = 0.0
        self.item[rows] = self.total[rows] = item_sizes(self.family, self.random.uniform(rows))

    @override(BatchedCoreEnv)
    def step(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Put each item into the oldest bin with the chosen room, and into a new one where it does not fit."""
        rows, level = np.arange(self.n_envs), actions["level"]
        of_level = self.room[:, : int(self.n_bins.max()) + 1] == level[:, None]
        chosen = of_level.argmax(axis=1)
        is_new = (level == self.capacity) | (level < self.item) | ~of_level[rows, chosen]
        chosen = np.where(is_new, self.n_bins, chosen)
        self.room[rows, chosen] -= self.item
        self.n_bins += is_new
        earned = self.item / self.capacity - is_new
        is_filled = self.room[rows, chosen] == 0
        if is_new.any():
            self.fire(PackingEvents.opened, is_new, bins=1)
        if is_filled.any():
            self.fire(PackingEvents.filled, is_filled, bins=1)
        is_over = self.elapsed + 1 >= self.n_items
        following = item_sizes(self.family, self.random.uniform())
        self.item = np.where(is_over, self.item, following)
        self.total += np.where(is_over, 0, following)
        before, counts = self.usable, self.counts()
        self.usable = (counts * self._usable(counts, self.n_items - self.elapsed - 1)).sum(axis=1)
        return REWARD_SCALE * (earned + self.usable - before), is_over

    def _usable(self, counts: np.ndarray, n_to_come: np.ndarray) -> np.ndarray:
        """Return what a bin with each room may still take, in bins, `[n_envs, capacity + 1]`.

        :param counts: See :meth:`counts`.
        :param n_to_come: Number of items to come, `[n_envs]`.
        """
        looks = np.minimum(n_to_come / np.maximum(counts[:, 1:].sum(axis=1), 1), _LOOKS)
        levels = np.arange(self.capacity + 1) / self.capacity
        return np.asarray(levels * (1.0 - np.exp(looks[:, None] * self._log_misfits)))

    @override(BatchedCoreEnv)
    def observe(self, out: Mapping[str, np.ndarray]) -> None:
        capacity = self.capacity
        counts = self.counts()
        levels = np.arange(capacity + 1)
        is_new = levels == capacity
        after = levels - self.item[:, None]
        fits = after >= 0
        after = np.maximum(after, 0)
        exists = (counts > 0) | is_new
        left = np.take_along_axis(self._usable(counts, self.n_items - self.elapsed), after, axis=1)
        features = (
            levels / capacity,
            after / capacity,
            np.log1p(after) / 4,
            after == 0,
            is_new,
            self._fits[after],
            self._has_size[after],
            after / capacity - left,
            np.log1p(counts),
            np.log1p(np.take_along_axis(counts, after, axis=1)),
            self.item[:, None] / capacity,
        )
        seen = out["level_candidates"]
        for index, feature in enumerate(features):
            np.multiply(feature, exists, out=seen[..., index], casting="unsafe")
        out["level_candidates_mask"][:] = exists
        out["level_mask"][:] = exists & fits
        out["packing"][:, 0] = self.item / capacity
        out["packing"][:, 1] = 1.0 - self.elapsed / self.n_items
        out["packing"][:, 2] = np.log1p(counts[:, 1:].sum(axis=1)) / 5
        out["packing"][:, 3] = self.usable / 10

    def counts(self) -> np.ndarray:
        """Return how many of the opened bins have each room, `[n_envs, capacity + 1]`."""
        width = self.capacity + 1
        room = self.room[:, : max(1, int(self.n_bins.max()))]
        cells = np.arange(self.n_envs)[:, None] * width + room
        counts = np.bincount(cells.ravel(), minlength=self.n_envs * width).reshape(self.n_envs, width)
        counts[:, self.capacity] = 0  # those to come
        return counts

    @override(BatchedCoreEnv)
    def kpis(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        bound = -(-self.total[rows] // self.capacity)
        return {"bins": self.n_bins[rows], "excess_percent": 100.0 * (self.n_bins[rows] / bound - 1.0)}


class BinPackingEnv(BatchedMazeEnv):
    """One packing; see :class:`BinPacking` for the arguments."""

    def __init__(self, family: str = UNIFORM, **arguments: Any) -> None:
        make = functools.partial(BinPacking, family=family, **arguments)
        super().__init__(make, BinRenderer(CAPACITIES.get(family, 0)))


# -- rules -------------------------------------------------------------------------------------------


def first_fit(room: np.ndarray, item: np.ndarray, capacity: int) -> np.ndarray:
    """Return the oldest bin that the item fits into.

    :param room: What is left of each bin, in the order in which they are opened, those to come included, `[n, n_bins]`.
    :param item: Sizes, `[n]`.
    :param capacity: Capacity of a bin.
    :return: Index of the bin, `[n]`, as of all rules.
    """
    return np.asarray((room >= item[:, None]).argmax(axis=1))


def best_fit(room: np.ndarray, item: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin that the item leaves least of; see :func:`first_fit` for the arguments."""
    return np.asarray(np.where(room >= item[:, None], room, capacity + 1).argmin(axis=1))


def or_library_score(room: np.ndarray, item: np.ndarray, capacity: int) -> np.ndarray:
    """Return the score of Romera-Paredes et al. (2024) for the OR-Library's instances: tight fits, else much room.

    Of what would be left only steps count. See :func:`first_fit` for the arguments.
    """
    after = room - item[:, None]
    steps = np.searchsorted(_OR_LIBRARY_STEPS, after, side="left")
    return np.asarray(np.where(after >= 0, _OR_LIBRARY_SCORES[steps], -np.inf).argmax(axis=1))


_OR_LIBRARY_STEPS = np.array([2, 3, 5, 7, 9, 12, 15, 18, 20, 21])
_OR_LIBRARY_SCORES = np.array([4.0, 3.0, 2.0, 1.0, 0.9, 0.95, 0.97, 0.98, 0.98, 0.98, 0.99])


def weibull_score(room: np.ndarray, item: np.ndarray, capacity: int) -> np.ndarray:
    """Return the score that Romera-Paredes et al. (2024) found for Weibull items.

    Each bin that the item fits into is compared with the one before; see :func:`first_fit` for the arguments.
    """
    chosen = np.zeros(len(room), np.int64)
    for row, (rooms, size) in enumerate(zip(room, item.astype(float), strict=True)):
        fitting = np.flatnonzero(rooms >= size)
        left = rooms[fitting].astype(float)
        score = (left - capacity) ** 2 / size + left**2 / size**2 + left**2 / size**3
        score[left > size] *= -1.0
        score[1:] -= score[:-1].copy()
        chosen[row] = fitting[score.argmax()]
    return chosen


RULES: Mapping[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = {
    "first_fit": first_fit,
    "best_fit": best_fit,
    "or_library_score": or_library_score,
    "weibull_score": weibull_score,
}
"""Rules by name."""


class PackingRule(Policy):
    """Pack by a rule that evaluates all bins in the order in which they were opened.

    :param rule: One of `RULES`.
    :raises ConfigError: There is no such rule.
    """

    def __init__(self, rule: str = "best_fit") -> None:
        if rule not in RULES:
            raise ConfigError(f"policy.rule: expected one of {', '.join(RULES)}, found {rule!r}.")
        self.rule = rule

    @override(Policy)
    def needs_state(self) -> bool:
        return True

    @override(Policy)
    def compute_action(
        self, observation: Any, maze_state: Any, env: Any = None, actor_id: Any = None, deterministic: bool = False
    ) -> dict[str, Any]:
        capacity = len(observation["level_mask"]) - 1
        return {"level": self.levels(maze_state["room"][None], maze_state["item"][None], capacity)[0]}

    def levels(self, room: np.ndarray, item: np.ndarray, capacity: int) -> np.ndarray:
        """Return the actions for many packings; see :func:`first_fit` for the arguments.

        :return: The rooms of the bins that are chosen, `[n]`.
        """
        return np.asarray(room[np.arange(len(room)), RULES[self.rule](room, item, capacity)])


class TightOrRoomy(ArrayPolicy):
    """Pack by the score of Romera-Paredes et al. (2024) for the OR-Library's instances, of equal ones the tightest.

    :func:`or_library_score` takes the oldest of equal ones. Without it observations are enough, so that a run may
    begin with it (`policy@warm_start.policy=tight_or_roomy`) wherever its environments are stepped.
    """

    @override(ArrayPolicy)
    def choose(self, observation: Mapping[str, np.ndarray], step_key: object) -> dict[str, np.ndarray]:
        mask = observation["level_mask"]
        capacity = mask.shape[1] - 1
        item = np.rint(capacity * observation["packing"][:, :1])
        after = np.arange(capacity + 1) - item
        scores = _OR_LIBRARY_SCORES[np.searchsorted(_OR_LIBRARY_STEPS, after, side="left")]
        return {"level": np.where(mask > 0, scores - 1e-4 * after, -np.inf).argmax(axis=1)}
