"""Candidates: several actions to choose from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.action_conversion import ActionBounds, ActionConversionInterface
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType
from maze.core.errors import EnvironmentContractError


class ActionCandidates(Mapping[str, Any]):
    """Actions of an agent, best first, with their probabilities.

    As a mapping it is the best action, for wrappers, statistics and event logs.

    :param candidates_and_probabilities: The actions and, in the same order, their probabilities or scores.
    :raises EnvironmentContractError: There is no candidate, or not one probability for each.
    """

    def __init__(self, candidates_and_probabilities: tuple[Sequence[Any], Sequence[float]]) -> None:
        self.candidates, self.probabilities = candidates_and_probabilities
        if not self.candidates or len(self.candidates) != len(self.probabilities):
            raise EnvironmentContractError(
                f"Candidates: expected at least one action and a probability for each, found {len(self.candidates)} "
                f"actions and {len(self.probabilities)} probabilities. `compute_top_action_candidates` of the policy "
                f"has to return both in the same order."
            )

    def __getitem__(self, key: str) -> Any:
        return self.candidates[0][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.candidates[0])

    def __len__(self) -> int:
        return len(self.candidates[0])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.candidates!r}, {self.probabilities!r})"


@dataclass(eq=False)
class MazeActionCandidates:
    """Actions of the simulation, best first, with their probabilities.

    :param candidates: The actions.
    :param probabilities: Their probabilities or scores, in the same order.
    """

    candidates: Sequence[MazeActionType]
    probabilities: Sequence[float]


class ActionConversionCandidatesInterface(ActionConversionInterface):
    """Convert each candidate by the conversion of single actions, after clipping it to the bounds of `Box` heads.

    :param action_conversion: Conversion of single actions.
    """

    def __init__(self, action_conversion: ActionConversionInterface) -> None:
        self.action_conversion = action_conversion
        self._bounds = ActionBounds(action_conversion.space())

    @override(ActionConversionInterface)
    def space_to_maze(self, action: ActionCandidates, maze_state: MazeStateType) -> MazeActionCandidates:  # type: ignore[override]
        is_candidates: Any = isinstance(action, ActionCandidates)
        if not is_candidates:
            raise EnvironmentContractError(
                "num_candidates: a wrapper replaces the candidates by a single action. Use num_candidates=1, or derive "
                "the wrapper from ActionWrapper, whose `action` is applied to each candidate."
            )
        convert, clip = self.action_conversion.space_to_maze, self._bounds.clip
        return MazeActionCandidates([convert(clip(one), maze_state) for one in action.candidates], action.probabilities)

    @override(ActionConversionInterface)
    def maze_to_space(self, maze_action: MazeActionType) -> Any:
        if not isinstance(maze_action, MazeActionCandidates):
            return self.action_conversion.maze_to_space(maze_action)
        convert = self.action_conversion.maze_to_space
        return ActionCandidates(([convert(one) for one in maze_action.candidates], maze_action.probabilities))

    @override(ActionConversionInterface)
    def space(self) -> spaces.Dict:
        return self.action_conversion.space()

    @override(ActionConversionInterface)
    def noop_action(self) -> Any:
        return self.action_conversion.noop_action()
