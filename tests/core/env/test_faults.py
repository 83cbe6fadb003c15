"""Errors of environments name the place where they happened."""

from __future__ import annotations

import numpy as np
import pytest

from maze.core.env.faults import Place, Seeding, failure, failure_of_acting, non_finite_entry
from maze.core.env.structured_env import ActorID
from maze.core.errors import EnvironmentContractError, EnvironmentFailedError, MazeError, NonFiniteError

PLACE = Place("environment 3", ActorID("cut", 1), 17, Seeding(1927, 612))


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (PLACE, "environment 3, sub-step 'cut' (agent 1), after 17 steps of its episode, 612 ticks after it was seeded with 1927"),  # noqa: E501
        (Place("environment 3", ActorID(0, 0), 0), "environment 3, sub-step 0, after 0 steps of its episode"),
        (Place("environment 3"), "environment 3"),
    ],
)  # fmt: skip
def test_an_error_place_contains_the_known_coordinates(place: Place, expected: str) -> None:
    assert str(place) == expected


def test_environment_without_a_place_is_named() -> None:
    class Silent:
        def actor_id(self) -> None:
            raise SystemExit

        def get_env_time(self) -> int:
            raise ValueError

    assert str(Place.of(Silent(), "environment 1")) == "environment 1"


def test_exceptions_of_user_code_become_one_error() -> None:
    class OddError(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()

        def __str__(self) -> str:
            raise RuntimeError

    error = failure(ValueError("no marbles left."), PLACE, "step")
    assert isinstance(error, EnvironmentFailedError)
    assert str(error) == f"{PLACE}: `step` raised ValueError: no marbles left."
    assert "raised OddError: <its message cannot be shown: RuntimeError>." in str(
        failure(OddError(1, 2), PLACE, "step")
    )
    assert str(failure(SystemExit(), PLACE, "reset")) == f"{PLACE}: `reset` raised SystemExit."
    assert failure(error, Place("environment 4"), "step") is error  # named where it happened


def test_maze_errors_keep_their_type_and_name_the_environment_once() -> None:
    when = f"({PLACE.when})"
    error = failure(EnvironmentContractError("GymMazeEnv, sub-step 0: no mask."), PLACE, "step")
    assert type(error) is EnvironmentContractError
    assert str(error) == f"environment 3: GymMazeEnv, sub-step 0: no mask. {when}"
    error = failure(EnvironmentContractError("environment 3, sub-step 0: no mask."), PLACE, "step")
    assert str(error) == f"environment 3, sub-step 0: no mask. {when}"


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        ({"a": np.zeros((2, 3)), "b": np.array([[1.0], [np.nan]])}, "`b` (index [0]) is NaN or None"),
        ({"a": np.array([[1.0, 2.0], [-np.inf, 2.0]])}, "`a` (index [0]) is -inf"),
        ({"a": np.array([[1.0, 2.0], [3.0, None]])}, "`a` (index [1]) is NaN or None"),
    ],
)
def test_non_finite_logits_are_traced_to_the_observation(observation: dict[str, np.ndarray], expected: str) -> None:
    error = NonFiniteError("policy.networks[0]: the logits ... are not finite in row 0.")
    named = failure_of_acting(error, observation, lambda row: PLACE._replace(name=f"environment {row}"))
    assert isinstance(named, NonFiniteError)
    assert str(named).startswith(f"{PLACE._replace(name='environment 1')}: observation {expected}.")


def test_an_error_in_a_batch_row_names_its_environment() -> None:
    for kind in (NonFiniteError, EnvironmentContractError):
        error: MazeError = kind("head `cut`: broken.")
        assert failure_of_acting(error, {"a": np.zeros(3)}, lambda _: PLACE) is error
        error.row = 2
        named = failure_of_acting(error, {"a": np.zeros(3)}, lambda row: PLACE._replace(name=f"environment {row}"))
        assert type(named) is kind
        assert str(named) == f"{PLACE._replace(name='environment 2')}: head `cut`: broken."


def test_integers_and_texts_are_finite() -> None:
    assert non_finite_entry({"a": np.arange(3), "b": np.array(["x", None])}) is None
