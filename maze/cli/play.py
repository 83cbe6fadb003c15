"""`maze-run --play <run>`: an episode of a run's best policy, to look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from maze.cli.errors import UsageError
from maze.core.errors import MazeError

FLAG = "--play"


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
    """Arguments of the rollout that shows the run: in a window, or recorded for a page where there is no display.

    :param run: Directory of the training.
    :param further: Overrides of the user.
    """
    from maze.core.rollout.rendering import has_display

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
        f"runner.record_trajectory={str(not shown).lower()}",
        *further,
    ]


def write_pages(run: str, directory: Path) -> None:
    """Makes pages of the trajectories that were recorded, and says where they are; the numbers are printed anyway.

    :param run: Directory of the training.
    :param directory: Directory of the rollout.
    """
    from maze.cli.run_info import CONFIG_FILE, read_plain_yaml
    from maze.cli.stored_model import targets_in
    from maze.core.utils.stored_config import NEVER_WHOLE

    targets = targets_in(read_plain_yaml(directory / CONFIG_FILE).get("env"))
    packages = {target.partition(".")[0] for target in targets} - NEVER_WHOLE  # of the environment that has been played
    for trajectory in sorted((directory / "trajectory_data").glob("*.pkl")):
        print(_page_of(trajectory, packages, f"{run}: an episode of its best policy"), flush=True)


def _page_of(trajectory: Path, packages: Iterable[str], title: str) -> str:
    from maze.core.rendering.trajectory_page import write_trajectory_page
    from maze.core.trajectory_recording.records.trajectory_record import load_trajectory

    try:
        episode: Any = load_trajectory(trajectory, own_packages=packages)
        page = write_trajectory_page(episode, trajectory.with_suffix(".html"), title=title)
    except MazeError as error:
        return f"No page of the episode could be made: {error}"
    return f"No display was found. Open the episode in a browser: {page}"
