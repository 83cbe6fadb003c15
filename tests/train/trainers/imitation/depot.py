"""An environment as users write them: sub-steps, a mask, states and actions of its own classes, and a heuristic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.agent.policy import Policy
from maze.core.env.action_conversion import ActionConversionInterface
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import ObservationConversionInterface
from maze.core.env.structured_env import ActorID

N_PARCELS, N_CARTS, N_STEPS = 3, 5, 20


@dataclass
class DepotState:
    """Parcels that wait, and once one is chosen: how much room the carts have, and which are free."""

    weights: np.ndarray
    chosen: int | None = None
    room: np.ndarray | None = None
    is_free: np.ndarray | None = None


@dataclass
class Choice:
    """Which parcel is next."""

    parcel: int


@dataclass
class Loading:
    """Which cart takes it, or a part of it."""

    cart: int


class DepotCoreEnv(CoreEnv):
    """In each step a parcel is chosen, and then loaders, one after the other, take a cart each.

    :param loaders: The loaders in the order of their turns.
    """

    def __init__(self, loaders: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        self.loaders = loaders
        self.rng = np.random.default_rng(0)

    def seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def reset(self) -> DepotState:
        self.n_steps, self.turn = 0, 0
        self.state = DepotState(self.rng.random(N_PARCELS))
        return self.state

    def step(self, maze_action: Choice | Loading) -> Any:
        reward = 0.0
        if isinstance(maze_action, Choice):
            room, chosen = self.rng.random(N_CARTS), maze_action.parcel
            self.state = DepotState(self.state.weights, chosen, room, self.rng.random(N_CARTS) < 0.7)
            self.state.is_free[self.rng.integers(N_CARTS)] = True
            self.turn = 1
        else:
            reward = float(self.state.room[maze_action.cart] + self.state.weights[self.state.chosen])
            self.turn += 1
            self.state.room = self.rng.random(N_CARTS)
            if self.turn > len(self.loaders):
                self.n_steps, self.turn = self.n_steps + 1, 0
                self.state = DepotState(self.rng.random(N_PARCELS))
        return self.state, reward, self.n_steps == N_STEPS, {}

    def get_maze_state(self) -> DepotState:
        return self.state

    def actor_id(self) -> ActorID:
        return ActorID("choose", 0) if self.turn == 0 else ActorID("load", self.loaders[self.turn - 1])

    def is_step_complete(self) -> bool:
        return self.turn == 0

    @property
    def agent_counts_dict(self) -> dict[str, int]:
        return {"choose": 1, "load": len(set(self.loaders))}


class ChoiceConversion(ActionConversionInterface):
    def space(self) -> spaces.Dict:
        return spaces.Dict({"parcel": spaces.Discrete(N_PARCELS)})

    def space_to_maze(self, action: Any, maze_state: Any) -> Choice:
        return Choice(int(action["parcel"]))

    def maze_to_space(self, maze_action: Choice) -> Any:
        return {"parcel": maze_action.parcel}


class LoadingConversion(ActionConversionInterface):
    def space(self) -> spaces.Dict:
        return spaces.Dict({"cart": spaces.Discrete(N_CARTS)})

    def space_to_maze(self, action: Any, maze_state: Any) -> Loading:
        return Loading(int(action["cart"]))

    def maze_to_space(self, maze_action: Loading) -> Any:
        return {"cart": maze_action.cart}


class Weights(ObservationConversionInterface):
    def space(self) -> spaces.Dict:
        return spaces.Dict({"weights": spaces.Box(0, 1, (N_PARCELS,), np.float32)})

    def maze_to_space(self, maze_state: DepotState) -> Any:
        return {"weights": maze_state.weights.astype(np.float32)}


class Carts(ObservationConversionInterface):
    """Only there once a parcel is chosen."""

    def space(self) -> spaces.Dict:
        return spaces.Dict({"room": spaces.Box(0, 1, (N_CARTS,), np.float32), "cart_mask": spaces.MultiBinary(N_CARTS)})

    def maze_to_space(self, maze_state: DepotState) -> Any:
        return {"room": maze_state.room.astype(np.float32), "cart_mask": maze_state.is_free.astype(np.int8)}


class DepotEnv(MazeEnv[DepotCoreEnv]):
    """See :class:`DepotCoreEnv`."""

    def __init__(self, loaders: tuple[int, ...] = (0,)) -> None:
        super().__init__(
            DepotCoreEnv(tuple(loaders)),
            {"choose": ChoiceConversion(), "load": LoadingConversion()},
            {"choose": Weights(), "load": Carts()},
        )


class Heaviest(Policy):
    """The heaviest parcel; the free cart with the most room."""

    def compute_action(self, observation: Any, *args: Any, actor_id: Any = None, **kwargs: Any) -> Any:
        if actor_id.step_key == "choose":
            return {"parcel": int(observation["weights"].argmax())}
        return {"cart": int(np.where(observation["cart_mask"], observation["room"], -1).argmax())}
