"""Taillard's job-shop instances ta01 to ta80 from their published seeds.

Taillard (1993), Benchmarks for basic scheduling problems, European Journal of Operational Research 64 (2). Best known
makespans as of 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maze.core.env.context import InstanceSet, InstanceSource
from maze.core.errors import ConfigError

LONGEST = 99
"""The longest duration; the shortest is 1."""

_SEEDS: dict[tuple[int, int], tuple[tuple[int, int, int], ...]] = {
    (15, 15): (
        (840612802, 398197754, 1231),
        (1314640371, 386720536, 1244),
        (1227221349, 316176388, 1218),
        (342269428, 1806358582, 1175),
        (1603221416, 1501949241, 1224),
        (1357584978, 1734077082, 1238),
        (44531661, 1374316395, 1227),
        (302545136, 2092186050, 1217),
        (1153780144, 1393392374, 1274),
        (73896786, 1544979948, 1241),
    ),
    (20, 15): (
        (533484900, 317419073, 1357),
        (1894307698, 1474268163, 1367),
        (874340513, 509669280, 1342),
        (1124986343, 1209573668, 1345),
        (1463788335, 529048107, 1339),
        (1056908795, 25321885, 1360),
        (195672285, 1717580117, 1462),
        (961965583, 1353003786, 1396),
        (1610169733, 1734469503, 1332),
        (532794656, 998486810, 1348),
    ),
    (20, 20): (
        (1035939303, 773961798, 1642),
        (5997802, 1872541150, 1600),
        (1357503601, 722225039, 1557),
        (806159563, 1166962073, 1644),
        (1902815253, 1879990068, 1595),
        (1503184031, 1850351876, 1643),
        (1032645967, 99711329, 1680),
        (229894219, 1158117804, 1603),
        (823349822, 108033225, 1625),
        (1297900341, 489486403, 1584),
    ),
    (30, 15): (
        (98640593, 1981283465, 1764),
        (1839268120, 248890888, 1784),
        (573875290, 2081512253, 1788),
        (1670898570, 788294565, 1828),
        (1118914567, 1074349202, 2007),
        (178750207, 294279708, 1819),
        (1549372605, 596993084, 1771),
        (798174738, 151685779, 1673),
        (553410952, 1329272528, 1795),
        (1661531649, 1173386294, 1669),
    ),
    (30, 20): (
        (1841414609, 1357882888, 2005),
        (2116959593, 1546338557, 1937),
        (796392706, 1230864158, 1846),
        (532496463, 254174057, 1979),
        (2020525633, 978943053, 2000),
        (524444252, 185526083, 2004),
        (1569394691, 487269855, 1889),
        (1460267840, 1631446539, 1937),
        (198324822, 1937476577, 1968),
        (38071822, 1541985579, 1923),
    ),
    (50, 15): (
        (17271, 718939, 2760),
        (660481279, 449650254, 2756),
        (352229765, 949737911, 2717),
        (1197518780, 166840558, 2839),
        (1376020303, 483922052, 2679),
        (2106639239, 955932362, 2781),
        (1765352082, 1209982549, 2943),
        (1105092880, 1349003108, 2885),
        (907248070, 919544535, 2655),
        (2011630757, 1845447001, 2723),
    ),
    (50, 20): (
        (8493988, 2738939, 2868),
        (1991925010, 709517751, 2869),
        (342093237, 786960785, 2755),
        (1634043183, 973178279, 2702),
        (341706507, 286513148, 2725),
        (320167954, 1411193018, 2845),
        (1089696753, 298068750, 2825),
        (433032965, 1589656152, 2784),
        (615974477, 331205412, 3071),
        (236150141, 592292984, 2995),
    ),
    (100, 20): (
        (302034063, 1203569070, 5464),
        (1437643198, 1692025209, 5181),
        (1792475497, 1039908559, 5568),
        (1647273132, 1012841433, 5339),
        (696480901, 1689682358, 5392),
        (1785569423, 1092647459, 5342),
        (117806902, 739059626, 5436),
        (1639154709, 1319962509, 5394),
        (2007423389, 749368241, 5358),
        (682761130, 262763021, 5183),
    ),
}
"""By numbers of jobs and machines: seed of the durations, seed of the machines, best known makespan."""
SIZES = tuple(_SEEDS)


class Instance(NamedTuple):
    """A job shop.

    :param name: Its name.
    :param durations: Of each job's operations in their order, `[n_jobs, n_machines]`.
    :param machines: Where each of them is done, `[n_jobs, n_machines]`.
    :param best_known: The shortest makespan that anybody has found.
    """

    name: str
    durations: np.ndarray
    machines: np.ndarray
    best_known: int


def generate(n_jobs: int, n_machines: int, time_seed: int, machine_seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return durations and machines, `[n_jobs, n_machines]` each, as Taillard's program makes them.

    :param n_jobs: Number of jobs.
    :param n_machines: Number of machines.
    :param time_seed: Seed of the durations.
    :param machine_seed: Seed of the machines.
    """
    times, places = _uniform(time_seed), _uniform(machine_seed)
    durations = [[1 + int(next(times) * LONGEST) for _ in range(n_machines)] for _ in range(n_jobs)]
    machines = np.tile(np.arange(n_machines), (n_jobs, 1))
    for job in machines:
        for position in range(n_machines):
            other = position + int(next(places) * (n_machines - position))
            job[[position, other]] = job[[other, position]]
    return np.array(durations), machines


def _uniform(seed: int) -> Iterator[float]:
    """Return the generator of Bratley, Fox and Schrage (1983) that Taillard used, in [0, 1)."""
    modulus = 2**31 - 1
    while True:
        seed = 16807 * seed % modulus
        yield seed / modulus


def instances_of(names: str | Sequence[str] | None) -> list[Instance]:
    """Return the published instances.

    :param names: Names such as `ta01`, or sizes such as `15x15` (all of that size); one, or a list. `None`: none.
    :raises ConfigError: There is no such instance.
    """
    wanted = [names] if isinstance(names, str) else list(names or ())
    found = []
    for text in wanted:
        matching = [
            (f"ta{number:02d}", size, seeds)
            for number, (size, seeds) in enumerate(((s, one) for s in _SEEDS for one in _SEEDS[s]), start=1)
            if text in (f"ta{number:02d}", f"{size[0]}x{size[1]}")
        ]
        if not matching:
            sizes = ", ".join(f"{jobs}x{machines}" for jobs, machines in SIZES)
            raise ConfigError(f"env.instances: expected ta01 to ta80 or a size of {sizes}, found {text!r}.")
        found += [Instance(name, *generate(*size, *seeds[:2]), seeds[2]) for name, size, seeds in matching]
    return found


def instance_set(source: InstanceSource | Sequence[Any] | None) -> InstanceSet | None:
    """Return job shops as a set of instances; smaller ones are padded with operations of duration 0.

    :param source: Names (see :func:`instances_of`), instances, a file, arrays or a set. `None`: there is none.
    """
    if source is None or isinstance(source, InstanceSet):
        return source
    if isinstance(source, Path | Mapping) or (isinstance(source, str) and source.endswith(".npz")):
        return InstanceSet.of(source)
    instances = (
        list(source)
        if not isinstance(source, str) and all(isinstance(each, Instance) for each in source)
        else instances_of(source)
    )
    if not instances:
        return None
    jobs, machines = (max(one.durations.shape[axis] for one in instances) for axis in (0, 1))
    durations = np.zeros((len(instances), jobs, machines), np.int64)
    places = np.tile(np.arange(machines), (len(instances), jobs, 1))
    for row, one in enumerate(instances):
        n_jobs, n_machines = one.durations.shape
        durations[row, :n_jobs, :n_machines], places[row, :n_jobs, :n_machines] = one.durations, one.machines
    best_known = np.array([one.best_known for one in instances])
    known = {"best_known": best_known} if best_known.all() else {}
    return InstanceSet({"durations": durations, "machines": places, **known})


def lower_bound(durations: np.ndarray, machines: np.ndarray) -> np.ndarray:
    """Return Taillard's lower bound on the makespan: the longest job, or a machine's work with the least that comes
    before and after it.

    :param durations: `[..., n_jobs, n_machines]`; 0: there is no such operation.
    :param machines: The same shape.
    :return: `[...]`
    """
    heads = durations.cumsum(axis=-1) - durations
    tails = durations.sum(axis=-1, keepdims=True) - heads - durations
    order = machines.argsort(axis=-1)  # each job needs each machine once
    work, before, after = (np.take_along_axis(times, order, axis=-1) for times in (durations, heads, tails))
    least = (np.where(work > 0, times, np.iinfo(np.int64).max // 4).min(axis=-2) for times in (before, after))
    of_machines = np.where((work > 0).any(axis=-2), sum(least, work.sum(axis=-2)), 0)
    return np.asarray(np.maximum(durations.sum(axis=-1).max(axis=-1), of_machines.max(axis=-1)))
