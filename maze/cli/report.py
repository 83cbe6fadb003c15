"""HTML reports of runs (`maze-run --report <run> ...`) and episodes of a policy (`maze-run --play <run>`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from maze.cli.errors import FlagParser
from maze.cli.hydra_setup import value_text
from maze.cli.run_info import CONFIG_FILE, find_run, is_run
from maze.cli.run_summary import facts_of, record_of
from maze.core.errors import MazeError
from maze.core.utils.stored_run import StoredRun, chosen_options, read_plain_yaml
from maze.report.page import Page
from maze.report.progress import PROGRESS_FILE, read_progress
from maze.report.run_page import REPORT_FILE, RunFacts, run_page
from maze.report.runs_page import ReportedRun, read_trials, runs_page, sweep_sections
from maze.report.served_page import serve

EPISODE = Path("episode") / "episode.html"
"""An inspected episode of the best policy, in the directory of its run."""
MOST_EPISODE_STEPS = 1000
_GROUPS = ("env", "wrappers", "algorithm", "model", "critic", "runner")


def make_report(arguments: Sequence[str]) -> int:
    """Write the report of runs, or serve it on this machine while it is open.

    :param arguments: Arguments of `--report`.
    :return: Exit status.
    :raises UsageError: No run is named, or it does not exist.
    """
    wanted = _parsed(arguments)
    places = [directory if _runs_in(directory) else find_run(directory, "--report") for directory in wanted.runs]
    if wanted.live:
        serve(lambda: _page(places, is_quick=True))
        return 0
    path = wanted.output or places[0] / REPORT_FILE
    _page(places).write(path)
    print(f"The report is in {path}; open it in a browser.")
    return 0


def episode_wanted(arguments: Sequence[str]) -> list[str] | None:
    """Return the command that plays an episode for the report; `None`: not requested, or played before.

    :param arguments: Arguments of `--report`.
    """
    wanted = _parsed(arguments)
    directory = find_run(wanted.runs[0], "--report") if wanted.episode else None
    if directory is None or (directory / EPISODE).is_file():
        return None
    run = directory.absolute()
    return [
        "-cn",
        "conf_inspect",
        f"policies=[{value_text(run)}]",
        f"runner.max_episode_steps={MOST_EPISODE_STEPS}",
        f"hydra.run.dir={value_text(run / EPISODE.parent)}",
    ]


def _page(places: Sequence[Path], is_quick: bool = False) -> Page:
    """Return the report of a run, a sweep or several runs.

    :param is_quick: Leave out slow parts: a served report is written every few seconds.
    """
    runs = [run for place in places for run in (_runs_in(place) or [place])]
    trials = read_trials(places[0]) if len(places) == 1 else None
    if runs == list(places) and len(runs) == 1:
        run = _reported(runs[0])
        facts = run.facts if is_quick else _with_details(run.facts, runs[0])
        return run_page(facts, run.progress, run.state, datetime.now())
    reported = [run for run in map(_reported_if_readable, runs) if run is not None]
    if not reported:
        raise MazeError(f"None of the {len(runs)} runs has statistics that can be read ({PROGRESS_FILE}).")
    title = f"Sweep {places[0].name}" if trials is not None else ""
    return runs_page(reported, datetime.now(), title, [] if trials is None else sweep_sections(trials))


def _reported(directory: Path) -> ReportedRun:
    state = str((record_of(directory) or {}).get("state", ""))
    config = read_plain_yaml(directory / CONFIG_FILE)
    return ReportedRun(facts_of(directory, Path.cwd()), read_progress(directory), config, state)


def _reported_if_readable(directory: Path) -> ReportedRun | None:
    try:
        return _reported(directory)
    except MazeError as error:
        print(f"Left out: {error}", file=sys.stderr)
        return None


def _runs_in(directory: Path) -> list[Path]:
    """Return the runs of a sweep or of a directory of runs; empty for the directory of one run."""
    if is_run(directory) or not directory.is_dir():
        return []
    runs = [path.parent for path in directory.glob(f"*/{CONFIG_FILE}")]
    return sorted(runs, key=lambda run: (len(run.name), run.name))


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser("--report", "Write the report of a run, a sweep, or several runs.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="run", help="directory of a run, of a sweep, or of runs")
    parser.add_argument("--output", type=Path, default=None, help="file, report.html in the first directory by default")
    parser.add_argument("--episode", action="store_true", default=False, help="play an episode for the report of a run")
    parser.add_argument("--live", action="store_true", default=False, help="serve the report on this machine")
    wanted = parser.parse_intermixed_args(list(arguments))
    if wanted.episode and len(wanted.runs) > 1:
        parser.error("--episode needs exactly one run")
    return wanted


# -- differences from the defaults, and the model ----------------------------------------------------------------------


def _with_details(facts: RunFacts, directory: Path) -> RunFacts:
    """Add differences from the defaults, pictures of the model and a recorded episode, if available.

    :param facts: Facts so far.
    :param directory: Directory of the run.
    """
    pictures, networks = _model(directory)
    episode = directory / EPISODE
    return replace(
        facts,
        settings=_differences(directory) or facts.settings,
        pictures=pictures,
        networks=networks,
        episode=episode.read_text(encoding="utf-8") if episode.is_file() else None,
    )


def _differences(directory: Path) -> Sequence[tuple[str, str, str | None]]:
    """Return name, value and default of each setting that differs from the chosen options; empty: unknown."""
    from maze.core.log_stats.log_stats_writer_tensorboard import flat_hyperparameters

    stored = read_plain_yaml(directory / CONFIG_FILE)
    try:
        default = _defaults(directory)
    except Exception:  # options that were removed, or that only a project's own plugin finds
        return ()
    ours, theirs = (
        {name: value for name, value in flat_hyperparameters(each).items() if not name.startswith("seeding.")}
        for each in (stored, default)
    )
    return [
        (name, str(ours.get(name, "-")), str(theirs.get(name, "-")))
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]


def _defaults(directory: Path) -> dict[str, Any]:
    """Return the root configuration with the same options and no other overrides."""
    from omegaconf import OmegaConf

    from maze.cli.checks import complete
    from maze.core.utils.config_utils import read_hydra_config

    choices = chosen_options(directory)
    job: Any = read_plain_yaml(directory / ".hydra" / "hydra.yaml").get("hydra")
    root = str(job["job"]["config_name"])
    cfg = read_hydra_config("maze.conf", root, **{name: choices[name] for name in _GROUPS if choices.get(name)})
    complete(cfg, Path.cwd())
    plain: Any = OmegaConf.to_container(cfg)
    return dict(plain)


def _model(directory: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return pictures of the networks as SVG, and the text of networks that are no graphs of blocks."""
    from maze.cli.stored_model import packages_trusted_by
    from maze.core.utils.factory import Factory
    from maze.core.utils.import_guard import imports_guarded
    from maze.perception.models.model_composer import BaseModelComposer
    from maze.perception.models.space_config import SpacesConfig

    try:
        with imports_guarded():
            model = StoredRun(directory, packages_trusted_by(None)).sections(["model"]).get("model")
            spaces = SpacesConfig.load(directory / "spaces_config.pkl")
            composer = Factory(BaseModelComposer).instantiate(  # type: ignore[type-abstract]
                model, config_path="model", **vars(spaces)
            )
    except (MazeError, OSError):
        return [], []
    drawn = list(_drawn(composer))
    return [(name, text) for name, text in drawn if text.startswith("<")], [
        (name, text) for name, text in drawn if not text.startswith("<")
    ]


def _drawn(composer: Any) -> Iterator[tuple[str, str]]:
    from maze.perception.blocks.inference import InferenceBlock, model_graph, render

    for kind, model in (("policy", composer.policy), ("critic", composer.critic)):
        networks: Mapping[Any, Any] = {} if model is None else model.networks
        for key, network in networks.items():
            name = f"{kind} {key}"
            block = next((part for part in network.modules() if isinstance(part, InferenceBlock)), None)
            try:
                svg = None if block is None else render(model_graph(block, title=name), "svg").decode()
            except Exception:  # without a working drawing library, the text is shown
                svg = None
            yield name, repr(network) if svg is None else svg[svg.index("<svg") :]


# -- an episode --------------------------------------------------------------------------------------------------------


def play_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that shows an episode of a policy: in a window, as an HTML player, or as a video.

    :param arguments: Arguments of `--play`: the directory of a training run, `--video`, overrides.
    :raises UsageError: The run or the file of the video is missing.
    """
    parser = FlagParser("--play", "Show an episode of the best policy of a training run.")
    parser.add_argument("run", help="directory of the training run: outputs/<name>/<time>")
    parser.add_argument("--video", type=Path, default=None, help="write a video: episode.mp4 or .gif")
    wanted, further = parser.parse_known_args(list(arguments))
    for name, value in vars(wanted).items():
        if "=" in str(value):
            parser.error(f"{name}: expected a path, found the override {value}")
    if wanted.video is not None:
        named = [f"policies=[{value_text(wanted.run)}]", f"runner.video={value_text(wanted.video.absolute())}"]
        return ["-cn", "conf_inspect", *named, *further]
    from maze.core.rollout.recording import has_display

    shown = has_display()
    return [
        "policy=torch_policy",
        f"input_dir={wanted.run}",
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
