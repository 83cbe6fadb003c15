"""Layout of directed acyclic graphs in layers, from top to bottom, without edges running through boxes.

The steps are those of Sugiyama et al. (1981): layers by longest paths, order within layers by barycentres, positions
by least squares. An edge that passes layers gets a place of its own in each of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

Node: TypeAlias = Hashable
Point: TypeAlias = tuple[float, float]

_ORDER_SWEEPS = 12
_POSITION_SWEEPS = 10


@dataclass(frozen=True)
class Layout:
    """Positions, with y growing downwards from 0."""

    centres: dict[Node, Point]
    """Centre of each node."""
    layer_bounds: list[tuple[float, float]]
    """Top and bottom of each layer."""
    routes: dict[tuple[Node, Node], list[tuple[int, float]]]
    """The layers and x-coordinates that an edge passes, both ends included."""
    width: float
    height: float


@dataclass(frozen=True)
class _Waypoint:
    """The place of an edge in a layer that it passes."""

    edge: tuple[Node, Node]
    layer: int


def layered_layout(
    sizes: Mapping[Node, tuple[float, float]],
    edges: Sequence[tuple[Node, Node]],
    horizontal_gap: float,
    vertical_gap: float,
) -> Layout:
    """
    :param sizes: Width and height of each node.
    :param edges: Start and end of each edge.
    :param horizontal_gap: Least distance of boxes side by side; edges that pass a box keep half of it.
    :param vertical_gap: Distance of layers.
    """
    layer_of = _layers(list(sizes), edges)
    chains = {edge: _chain(edge, layer_of) for edge in edges}
    rows = _rows(list(sizes), layer_of, chains)
    above, below = _neighbours(chains)
    rows = _order(rows, above, below)
    widths = {node: size[0] + horizontal_gap for node, size in sizes.items()}
    x = _positions(rows, above, below, widths, waypoint_width=horizontal_gap / 2)

    bounds: list[tuple[float, float]] = []
    top = 0.0
    for row in rows:
        height = max((sizes[node][1] for node in row if node in sizes), default=0.0)
        bounds.append((top, top + height))
        top += height + vertical_gap
    left = min(x[node] - sizes[node][0] / 2 for node in sizes)
    left = min([left, *(value for value in x.values())])
    right = max([x[node] + sizes[node][0] / 2 for node in sizes] + list(x.values()))
    return Layout(
        centres={node: (x[node] - left, sum(bounds[layer_of[node]]) / 2) for node in sizes},
        layer_bounds=bounds,
        routes={
            edge: [(layer_of[edge[0]] + step, x[node] - left) for step, node in enumerate(chain)]
            for edge, chain in chains.items()
        },
        width=right - left,
        height=top - vertical_gap,
    )


def _layers(nodes: Sequence[Node], edges: Sequence[tuple[Node, Node]]) -> dict[Node, int]:
    """Each node one layer below the lowest of its predecessors; sources right above their first successor."""
    successors, n_open = defaultdict(list), dict.fromkeys(nodes, 0)
    for start, end in edges:
        successors[start].append(end)
        n_open[end] += 1
    layer_of = dict.fromkeys(nodes, 0)
    sources = [node for node in nodes if n_open[node] == 0]
    ready = list(sources)
    while ready:
        node = ready.pop()
        for successor in successors[node]:
            layer_of[successor] = max(layer_of[successor], layer_of[node] + 1)
            n_open[successor] -= 1
            if n_open[successor] == 0:
                ready.append(successor)
    for node in sources:
        if successors[node]:
            layer_of[node] = min(layer_of[successor] for successor in successors[node]) - 1
    return layer_of


def _chain(edge: tuple[Node, Node], layer_of: Mapping[Node, int]) -> list[Node]:
    start, end = edge
    return [start, *(_Waypoint(edge, layer) for layer in range(layer_of[start] + 1, layer_of[end])), end]


def _rows(
    nodes: Sequence[Node], layer_of: Mapping[Node, int], chains: Mapping[tuple[Node, Node], list[Node]]
) -> list[list[Node]]:
    rows: list[list[Node]] = [[] for _ in range(max(layer_of.values(), default=0) + 1)]
    for node in nodes:
        rows[layer_of[node]].append(node)
    for chain in chains.values():
        for node in chain[1:-1]:
            assert isinstance(node, _Waypoint)
            rows[node.layer].append(node)
    return rows


def _neighbours(
    chains: Mapping[tuple[Node, Node], list[Node]],
) -> tuple[defaultdict[Node, list[Node]], defaultdict[Node, list[Node]]]:
    above: defaultdict[Node, list[Node]] = defaultdict(list)
    below: defaultdict[Node, list[Node]] = defaultdict(list)
    for chain in chains.values():
        for upper, lower in pairwise(chain):
            above[lower].append(upper)
            below[upper].append(lower)
    return above, below


def _order(
    rows: list[list[Node]], above: Mapping[Node, list[Node]], below: Mapping[Node, list[Node]]
) -> list[list[Node]]:
    """The order with the fewest crossings among those that barycentre sweeps find."""
    best, fewest = [list(row) for row in rows], _crossings(rows, below)
    for sweep in range(_ORDER_SWEEPS):
        downwards = sweep % 2 == 0
        neighbours = above if downwards else below
        sequence = range(1, len(rows)) if downwards else range(len(rows) - 2, -1, -1)
        for index in sequence:
            fixed = rows[index - 1 if downwards else index + 1]
            rank = {node: position for position, node in enumerate(fixed)}
            centres = {
                node: sum(rank[other] for other in neighbours[node]) / len(neighbours[node])
                if neighbours.get(node)
                else position
                for position, node in enumerate(rows[index])
            }
            rows[index] = sorted(rows[index], key=centres.__getitem__)
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
        if fewest == 0:
            break
    return best


def _crossings(rows: Sequence[Sequence[Node]], below: Mapping[Node, list[Node]]) -> int:
    total = 0
    for upper, lower in pairwise(rows):
        rank = {node: position for position, node in enumerate(lower)}
        ends = [position for node in upper for position in sorted(rank[other] for other in below.get(node, ()))]
        total += sum(first > second for index, first in enumerate(ends) for second in ends[index + 1 :])
    return total


def _positions(
    rows: Sequence[Sequence[Node]],
    above: Mapping[Node, list[Node]],
    below: Mapping[Node, list[Node]],
    widths: Mapping[Node, float],
    waypoint_width: float,
) -> dict[Node, float]:
    """The x-coordinate of each node: close to its neighbours, in order, without overlap."""
    half = {node: widths.get(node, waypoint_width) / 2 for row in rows for node in row}
    x: dict[Node, float] = {}
    for row in rows:
        x.update(zip(row, _separated([0.0] * len(row), [half[node] for node in row]), strict=True))
    for sweep in range(_POSITION_SWEEPS):
        downwards = sweep % 2 == 0
        neighbours = above if downwards else below
        for row in rows if downwards else reversed(rows):
            wanted = []
            for node in row:
                places = [x[neighbour] for neighbour in neighbours.get(node, ())]
                wanted.append(sum(places) / len(places) if places else x[node])
            x.update(zip(row, _separated(wanted, [half[node] for node in row]), strict=True))
    return x


def _separated(wanted: Sequence[float], half_widths: Sequence[float]) -> list[float]:
    """The positions closest to the wanted ones (least squares) that keep order and distance.

    Isotonic regression of the positions less the room that everything to the left takes, by pooling neighbours that
    violate the order.
    """
    offsets = [0.0]
    for left, right in pairwise(half_widths):
        offsets.append(offsets[-1] + left + right)
    pools: list[tuple[float, int]] = []  # mean, number of members
    for target, offset in zip(wanted, offsets, strict=False):
        mean, count = target - offset, 1
        while pools and pools[-1][0] >= mean:
            other_mean, other_count = pools.pop()
            mean = (mean * count + other_mean * other_count) / (count + other_count)
            count += other_count
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]
