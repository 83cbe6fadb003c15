"""Who raised an error: an environment is made of many classes of its author, and the error says in which it arose."""

from __future__ import annotations

from typing import Any

_METHODS = (
    *("summarize_reward", "calculate_kpis", "space_to_maze", "maze_to_space"),
    *("step", "reset", "observation", "action", "reverse_action", "reward"),
)
"""In these methods the authors of environments write their code."""

_CALLERS = (
    "maze.core.env.maze_env",
    "maze.core.wrappers.wrapper",
    "maze.core.wrappers.log_stats_wrapper",
    "maze.core.wrappers.episode_recorder",
)
"""Modules whose methods of these names only call those of others."""

_NOTE = "Raised by "


def origin_of(error: BaseException) -> tuple[str, str] | None:
    """Finds the class and the method in which an error arose, such as a reward aggregator's `summarize_reward`.

    :param error: An error that was caught.
    :return: Their names; `None` if no class of an environment had a part in it.
    """
    origin = None
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_name in _METHODS and code.co_argcount:
            instance: Any = traceback.tb_frame.f_locals.get(code.co_varnames[0])
            if type(instance).__module__ not in _CALLERS:
                origin = type(instance).__qualname__, code.co_name
        traceback = traceback.tb_next
    return origin


def note_origin(error: BaseException, place: str = "") -> None:
    """Adds to an error's text in which class and method of an environment it arose, unless it says so already.

    :param error: An error that was caught and is going to be raised again.
    :param place: Environment and sub-step.
    """
    origin = origin_of(error)
    notes = getattr(error, "__notes__", ())
    if origin is None or not hasattr(error, "add_note") or any(note.startswith(_NOTE) for note in notes):
        return  # Python 3.10 has no notes; the traceback shows the class all the same
    error.add_note(f"{_NOTE}{'.'.join(origin)}{f' in {place}' if place else ''}.")
