"""What takes a moment to find out about a run: settings that differ from the defaults, pictures of its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from maze.cli.hydra_setup import value_text
from maze.cli.run_info import CONFIG_FILE
from maze.core.errors import MazeError
from maze.core.utils.stored_run import StoredRun, chosen_options, read_plain_yaml
from maze.report.run_page import RunFacts

EPISODE = Path("episode") / "episode.html"
"""An inspected episode of the best policy, in the directory of its run."""
MOST_EPISODE_STEPS = 1000
_GROUPS = ("env", "wrappers", "algorithm", "model", "critic", "runner")


def with_details(facts: RunFacts, directory: Path) -> RunFacts:
    """Adds differences from the defaults, pictures of the model and a recorded episode, as far as there are some.

    :param facts: What is known already.
    :param directory: Of the run.
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


def episode_command(directory: Path) -> list[str] | None:
    """Arguments of the command that plays an episode for the report; `None`: there is one.

    :param directory: Of the run.
    """
    if (directory / EPISODE).is_file():
        return None
    run = directory.absolute()
    return [
        "-cn",
        "conf_inspect",
        f"policies=[{value_text(run)}]",
        f"runner.max_episode_steps={MOST_EPISODE_STEPS}",
        f"hydra.run.dir={value_text(run / EPISODE.parent)}",
    ]


def _differences(directory: Path) -> Sequence[tuple[str, str, str | None]]:
    """Name, value and default of each setting that is not what the chosen options bring; empty: it cannot be told."""
    from maze.core.log_stats.hyperparameters import flat_hyperparameters

    stored = read_plain_yaml(directory / CONFIG_FILE)
    try:
        default = _defaults(directory)
    except Exception:  # options that are not there any more, or are found by a project's own plugin only
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
    """What the root configuration gives with the same options and nothing else."""
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
    """Pictures of the networks as SVG, and the text of those that are no graphs of blocks."""
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
    from maze.perception.blocks.graph_drawing import model_graph, render
    from maze.perception.blocks.inference import InferenceBlock

    for kind, model in (("policy", composer.policy), ("critic", composer.critic)):
        networks: Mapping[Any, Any] = {} if model is None else model.networks
        for key, network in networks.items():
            name = f"{kind} {key}"
            block = next((part for part in network.modules() if isinstance(part, InferenceBlock)), None)
            try:
                svg = None if block is None else render(model_graph(block, title=name), "svg", None).decode()
            except Exception:  # whatever a drawing library is missing; the text says the same
                svg = None
            yield name, repr(network) if svg is None else svg[svg.index("<svg") :]
