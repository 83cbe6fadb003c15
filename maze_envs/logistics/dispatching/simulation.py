"""The simulation behind the dispatching environments."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
from typing_extensions import Self

from maze.core.errors import ConfigError
from maze_envs.logistics.dispatching.events import DispatchingEvents

Cell = tuple[int, int]


@dataclass
class Vehicle:
    """A vehicle at work."""

    agent_id: int
    position: Cell
    idle_from: int
    """Time from which it can be sent to the next order; its position is then the one above."""
    shift_end: int


@dataclass
class Order:
    """An open order."""

    position: Cell
    lost_at: int
    """Time from which it is too late."""


class DispatchingSimulation:
    """Orders appear on a grid; idle vehicles drive to them, one cell per unit of time.

    A vehicle whose shift is over goes home as soon as it is idle; a new one, with another identity, starts at the depot
    in the middle. Orders that no vehicle was sent to in time are lost.

    :param n_vehicles: Vehicles at work at a time.
    :param n_slots: Open orders at most; more are not accepted.
    :param size: Cells of the grid along each side.
    :param horizon: Units of time of an episode.
    :param arrival_rate: Probability of a new order per unit of time.
    :param patience: Units of time that an order waits.
    :param shift_length: Units of time that a vehicle works.
    :param distance_cost: What each cell of the way costs; an order is worth 1.
    """

    def __init__(
        self,
        n_vehicles: int = 4,
        n_slots: int = 8,
        size: int = 12,
        horizon: int = 120,
        arrival_rate: float = 0.9,
        patience: int = 25,
        shift_length: int = 40,
        distance_cost: float = 0.05,
    ) -> None:
        at_least_one = {"n_vehicles": n_vehicles, "n_slots": n_slots, "size": size, "horizon": horizon}
        for name, value in {**at_least_one, "patience": patience, "shift_length": shift_length}.items():
            if value < 1:
                raise ConfigError(f"env.{name}: must be at least 1, found {value}.")
        self.n_vehicles = n_vehicles
        self.n_slots = n_slots
        self.size = size
        self.horizon = horizon
        self.arrival_rate = arrival_rate
        self.patience = patience
        self.shift_length = shift_length
        self.distance_cost = distance_cost
        self.rng = np.random.default_rng()
        self.time = 0
        self.vehicles: list[Vehicle] = []
        self.orders: list[Order | None] = [None] * n_slots
        self.n_hired = 0

    def reset(self) -> None:
        """Begin a day: all vehicles are at the depot, some orders are open."""
        self.time = 0
        self.n_hired = 0
        self.vehicles = []
        self.orders = [None] * self.n_slots
        for index in range(self.n_vehicles):
            # Shifts end one after the other.
            self.vehicles.append(self._hired((index + 1) * self.shift_length // self.n_vehicles))
        for _ in range(self.n_slots // 2):
            self._accept_order()

    def copy(self) -> Self:
        """Return a simulation in the same state with the same future."""
        twin = copy.copy(self)
        twin.rng, twin.orders = copy.deepcopy(self.rng), self.orders.copy()  # orders never change
        twin.vehicles = [replace(vehicle) for vehicle in self.vehicles]
        return twin

    def idle_vehicles(self) -> list[Vehicle]:
        """Return the vehicles that can be sent to an order now."""
        return [vehicle for vehicle in self.vehicles if vehicle.idle_from <= self.time]

    def has_open_orders(self) -> bool:
        """Return whether there is anything to do."""
        return any(order is not None for order in self.orders)

    def distance(self, vehicle: Vehicle, order: Order) -> int:
        """Return the number of cells between them."""
        return abs(vehicle.position[0] - order.position[0]) + abs(vehicle.position[1] - order.position[1])

    def assign(self, vehicle: Vehicle, slot: int, events: DispatchingEvents) -> float | None:
        """Send a vehicle to an order.

        :return: What it earns; None: there is no such order.
        """
        order = self.orders[slot]
        if order is None:
            events.invalid_assignment()
            return None
        distance = self.distance(vehicle, order)
        vehicle.position = order.position
        vehicle.idle_from = self.time + max(1, distance)
        self.orders[slot] = None
        events.order_assigned(distance=distance)
        if vehicle.idle_from > order.lost_at:
            events.order_late()
        return 1.0 - self.distance_cost * distance

    def advance(self, events: DispatchingEvents) -> list[int]:
        """Let time pass until something is to be decided, or the day is over.

        :return: Identities of the vehicles that went home.
        """
        left: list[int] = []
        while True:
            self.time += 1
            left += self._change_shifts(events)
            self._lose_orders(events)
            if self.rng.random() < self.arrival_rate:
                self._accept_order()
            if self.is_over() or (self.has_open_orders() and self.idle_vehicles()):
                return left

    def is_over(self) -> bool:
        """Return whether the day is over."""
        return self.time >= self.horizon

    def _hired(self, shift_length: int) -> Vehicle:
        vehicle = Vehicle(self.n_hired, (self.size // 2, self.size // 2), self.time, self.time + shift_length)
        self.n_hired += 1
        return vehicle

    def _change_shifts(self, events: DispatchingEvents) -> list[int]:
        left = []
        for index, vehicle in enumerate(self.vehicles):
            if self.time >= max(vehicle.shift_end, vehicle.idle_from):
                left.append(vehicle.agent_id)
                events.vehicle_left()
                self.vehicles[index] = self._hired(self.shift_length)
        return left

    def _lose_orders(self, events: DispatchingEvents) -> None:
        for slot, order in enumerate(self.orders):
            if order is not None and order.lost_at <= self.time:
                self.orders[slot] = None
                events.order_lost()
                events.order_late()

    def _accept_order(self) -> None:
        position = self.rng.integers(self.size, size=2)
        if None in self.orders:
            order = Order((int(position[0]), int(position[1])), self.time + self.patience)
            self.orders[self.orders.index(None)] = order
