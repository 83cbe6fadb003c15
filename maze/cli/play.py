"""`maze-run --play <run>`: an episode of a run's best policy, to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from maze.cli.errors import UsageError

FLAG, VIDEO = "--play", "--video"


def played_run(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """The run that is to be played and the command's further arguments; `None`: the command plays none.

    :raises UsageError: The run is missing.
    """
    flag, equals, value = command[0].partition("=") if command else ("", "", "")
    if flag != FLAG:
        return None
    run, further = (value, command[1:]) if equals else ("".join(command[1:2]), command[2:])
    if not run or "=" in run:
        raise UsageError(f"{FLAG}: name the directory of a training: maze-run {FLAG} outputs/<name>/<time>")
    return run, list(further)


def rollout_arguments(run: str, further: Sequence[str]) -> list[str]:
    """Arguments of the rollout that shows the run: in a window, or as a page where there is no display.

    :param run: Directory of the training.
    :param further: Overrides of the user.
    """
    from maze.core.rollout.recording import has_display

    if VIDEO in further:
        return _film_arguments(run, further)
    shown = has_display()
    return [
        "policy=torch_policy",
        f"input_dir={run}",
        "runner=sequential",
        "runner.n_episodes=1",
        "runner.max_episode_steps=0",
        "runner.deterministic=true",
        "runner.record_event_logs=false",
        f"runner.render={str(shown).lower()}",
        "runner.record_trajectory=false",
        f"runner.record_pages={str(not shown).lower()}",
        *further,
    ]


def _film_arguments(run: str, further: Sequence[str]) -> list[str]:
    """Arguments of the command that writes a film of the run.

    :raises UsageError: The film has no name.
    """
    from maze.cli.hydra_setup import value_text

    position = further.index(VIDEO)
    film = "".join(further[position + 1 : position + 2])
    if not film or "=" in film:
        raise UsageError(f"{VIDEO}: name the film: maze-run {FLAG} {run} {VIDEO} episode.mp4 (or .gif)")
    overrides = [*further[:position], *further[position + 2 :]]
    named = [f"policies=[{value_text(run)}]", f"runner.video={value_text(Path(film).absolute())}"]
    return ["-cn", "conf_inspect", *named, *overrides]
