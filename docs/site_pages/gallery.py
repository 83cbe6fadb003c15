"""The gallery: every shipped environment after some steps, drawn by its renderer.

`python docs/site_pages/gallery.py DIRECTORY` draws the pictures without building the site.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from site_pages.configurations import options
from site_pages.names import ROOT
from site_pages.written import write_pages

_INTRO = """# Environment gallery

Shipped environments after some steps of the policy in the command below them, drawn by their renderers while this site
was built (`docs/site_pages/gallery.py`). gymnasium environments and those of other packages are selected by id
([environments of other packages](../../guide/third_party.md)). Published values are in [operations
problems](../../guide/operations.md).

`runner=sequential runner.n_episodes=1 runner.record_pages=true` adds an HTML player to a command.

"""


class Exhibit(NamedTuple):
    """Settings of the picture of an environment."""

    arguments: tuple[str, ...]
    """Arguments of the command."""
    steps: int = 30
    """Sub-steps before the picture."""
    describe: bool = True
    """Whether the docstring of the factory describes the environment."""


_SHOWN = {
    "lost_sales": Exhibit(("policy=base_stock",), 40),
    "dual_sourcing": Exhibit(("policy=dual_index",), 60),
    "criss_cross": Exhibit(("policy=priority", "env.network=B.H."), 300),
    "extended_network": Exhibit(("policy=priority",), 300),
    "bin_packing": Exhibit(("policy=packing_rule",), 100),
    "job_shop": Exhibit(("policy=job_shop_rule",), 60),
    "cutting_2d": Exhibit(("policy=cutting_2d_greedy_policy", "wrappers=cutting_2d"), 12),
    "tutorial_cutting_2d_flat": Exhibit(
        ("policy=tutorial_cutting_2d_greedy_policy", "wrappers=tutorial_cutting_2d"), 12
    ),
}
_LOOKS_THE_SAME = ("tutorial_cutting_2d_basic", "tutorial_cutting_2d_events", "tutorial_cutting_2d_struct")
_GYM = {
    "CartPole-v1": Exhibit(("env.name=CartPole-v1", "policy=dummy_cartpole"), 40, describe=False),
    "LunarLander-v3": Exhibit(("env.name=LunarLander-v3", "policy=lunar_lander_heuristics"), 60, describe=False),
}


def exhibits() -> dict[str, Exhibit]:
    """Return the settings of all pictures by title: shipped environments and two of gymnasium."""
    found = {}
    for option in options():
        is_of_others = option.path is None or option.path.is_relative_to(ROOT / "maze" / "conf")
        if option.group == "env" and not is_of_others and option.name not in _LOOKS_THE_SAME:
            shown = _SHOWN.get(option.name, Exhibit(("policy=random_policy",)))
            found[option.name] = shown._replace(arguments=(f"env={option.name}", *shown.arguments))
    return found | _GYM


def write_gallery(directory: Path) -> None:
    """Draw the pictures and write the page.

    :param directory: Where to; other files in it are removed.
    """
    import matplotlib as mpl

    mpl.use("agg")
    pages: dict[str, str | bytes] = {}
    parts = [_INTRO, ":::::{container} gallery\n"]
    for name, exhibit in exhibits().items():
        picture, sentence = drawn(exhibit)
        if picture:
            pages[f"{name}.png"] = picture
        command = f"maze-run {' '.join(exhibit.arguments)}"
        shown = f"![{name} after {exhibit.steps} steps]({name}.png)" if picture else "No renderer."
        parts.append(f"::::{{container}}\n**{name}**\n\n{shown}\n")
        parts.append(f"{sentence}\n\n```text\n{command}\n```\n::::\n")
    parts.append(":::::\n")
    same = ", ".join(f"`env={name}`" for name in _LOOKS_THE_SAME)
    parts.append(f"Pictures of other stages of the tutorial are equal to its last one: {same}.\n")
    pages["environments.md"] = "\n".join(parts)
    write_pages(directory, pages)


def drawn(exhibit: Exhibit) -> tuple[bytes, str]:
    """Play some steps of an environment.

    :return: Its picture, empty where it has no renderer, and a sentence about it.
    """
    from hydra import compose, initialize_config_module

    from maze.core.agent.policy import acting_in
    from maze.core.log_events.step_event_log import StepEventLog
    from maze.core.rendering.renderer import figure_png, offscreen
    from maze.core.rollout.sequential_rollout_runner import SequentialRolloutRunner
    from maze.core.utils.factory import locate, plain_container

    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose("conf_rollout", list(exhibit.arguments))
    env_config = plain_container(cfg.env, "env")
    if not exhibit.describe:
        env_config["render_mode"] = "rgb_array"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env, policy = SequentialRolloutRunner.init_env_and_agent(
            env_config, plain_container(cfg.wrappers, "wrappers"), 0, plain_container(cfg.policy, "policy")
        )
        env.seed(4)
        policy.seed(4)
        act = acting_in(env, policy, deterministic=True)
        observation, before = env.reset(), None
        for step in range(exhibit.steps):
            if step == exhibit.steps - 1:
                before = copy.deepcopy(env.get_maze_state())
            observation, _, done, _ = env.step(act(observation, env.actor_id()))
            if done:
                observation = env.reset()
        events = StepEventLog(env.get_env_time())
        picture, renderer = b"", env.get_renderer()
        if renderer is not None:
            with offscreen() as plt:
                renderer.render(before, env.get_maze_action(), events)
                picture = figure_png(plt.gcf(), dpi=80)
    made = locate(str(env_config["_target_"]), "env")
    sentence = inspect.cleandoc(made.__doc__ or "").split("\n\n")[0] if exhibit.describe else "Of gymnasium."
    return picture, re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", " ".join(sentence.split()))


def main(arguments: list[str]) -> int:
    """Draw the pictures into the directory of the command line."""
    directory = Path(arguments[0])
    directory.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = exhibits()
    for name, exhibit in found.items():
        (directory / f"{name}.png").write_bytes(drawn(exhibit)[0])
        print(directory / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
