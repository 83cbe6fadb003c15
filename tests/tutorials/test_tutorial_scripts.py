"""The scripts of the tutorial print what the documentation shows."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

TUTORIAL = Path(__file__).resolve().parents[2] / "tutorials" / "tutorial_maze_env"


def output_of(part: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    runpy.run_path(str(TUTORIAL / part / "main.py"), run_name="__main__")
    return capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def drawing_without_windows():
    import matplotlib.pyplot as plt

    mpl.use("Agg")
    yield
    plt.close("all")


@pytest.mark.parametrize("part", ["part01_core_env", "part02_renderer"])
def test_the_simulation_reports_rewards_and_messages(part, capsys):
    lines = output_of(part, capsys)
    assert len(lines) == 15
    assert lines[:3] == [
        "reward -1 | done False | info {'msg': 'valid_cut'}",
        "reward 0 | done False | info {'msg': 'valid_cut'}",
        "reward 0 | done False | info {'msg': 'valid_cut'}",
    ]
    # 30 x 15 from the oldest piece, worked out by hand: the raw piece is the oldest one in steps 4 and 10, and the
    # strip of 10 x 100 is too narrow from step 11 on.
    deliveries = [index for index, line in enumerate(lines, 1) if "reward -1" in line]
    invalid = [index for index, line in enumerate(lines, 1) if "invalid_cut" in line]
    assert (deliveries, invalid) == ([1, 4, 10], [11, 12, 13, 14, 15])


def test_the_trainable_environment_is_stepped_at_random(capsys):
    lines = output_of("part03_maze_env", capsys)
    assert len(lines) == 15
    pattern = (
        r"reward (-2|-1|0)\.0 \| done False \| info {'(msg|error)': '(valid_cut|invalid_cut|piece_id_out_of_bounds)'}"
    )
    assert all(re.fullmatch(pattern, line) for line in lines)


DOCUMENTED_ROWS = [
    "DiscreteActionEvents action substep_0/cut_order",
    "DiscreteActionEvents action substep_0/cut_rotati..",
    "DiscreteActionEvents action substep_0/piece_idx",
    "BaseEnvEvents reward median_step_count",
    "BaseEnvEvents reward mean_step_count",
    "BaseEnvEvents reward total_step_count",
    "BaseEnvEvents reward total_episode_count",
    "BaseEnvEvents reward episode_count",
    "BaseEnvEvents reward std",
    "BaseEnvEvents reward mean",
    "BaseEnvEvents reward min",
    "BaseEnvEvents reward max",
    "InventoryEvents piece_replenished mean_episode_total",
    "InventoryEvents pieces_in_inventory step_max",
    "InventoryEvents pieces_in_inventory step_mean",
    "BaseEnvEvents kpi max/raw_piece_usage_..",
    "BaseEnvEvents kpi min/raw_piece_usage_..",
    "BaseEnvEvents kpi std/raw_piece_usage_..",
    "BaseEnvEvents kpi mean/raw_piece_usage..",
]


@pytest.mark.parametrize("part", ["part04_events", "part05_reward"])
def test_statistics_have_the_documented_rows_in_the_documented_order(part, capsys):
    lines = output_of(part, capsys)
    assert re.match(r"\s*step\|path\s+\|\s+value", lines[0])
    rows = {}
    for line in lines[2:]:
        step, path, value = line.split("|", 2)
        assert (step.strip(), path.split()[0]) == ("1", "main")
        # the last column starts right behind a shortened event name
        name = (
            " ".join(path.replace("..", ".. ", 1).split()[1:]) if path.count("..") > 1 else " ".join(path.split()[1:])
        )
        rows[name] = value.rpartition("|")[2].strip()
    positions = [list(rows).index(row) for row in DOCUMENTED_ROWS]
    assert positions == sorted(positions)
    assert rows["BaseEnvEvents reward total_step_count"] == "15.000"
    assert rows["BaseEnvEvents reward episode_count"] == "1.000"
    assert rows["DiscreteActionEvents action substep_0/piece_idx"].startswith("[len:15, ")


def test_sub_steps_alternate_their_spaces_and_masks_are_part_of_them(capsys):
    lines = output_of("part06_struct_env", capsys)
    plain, masked = lines[:6], lines[6:]
    assert plain[0].endswith("Dict('piece_idx': Discrete(200))")
    assert plain[2].endswith("dict_keys(['inventory', 'inventory_size', 'ordered_piece'])")
    assert plain[3].endswith("Dict('cut_order': Discrete(2), 'cut_rotation': Discrete(2))")
    assert plain[5].endswith("dict_keys(['selected_piece', 'ordered_piece'])")
    assert masked[2].endswith("dict_keys(['inventory', 'inventory_size', 'ordered_piece', 'inventory_mask'])")
    assert masked[5].endswith("dict_keys(['selected_piece', 'ordered_piece', 'cutting_mask'])")
    assert "'inventory_mask': Box(0.0, 1.0, (200,), float32)" in masked[1]
    assert "'cutting_mask': Box(0.0, 1.0, (2,), float32)" in masked[4]


def drawn(rotate: bool, reverse: bool):
    """Draws a cut of 30 x 15 from 70 x 100; gives the axes."""
    import matplotlib.pyplot as plt

    part = "tutorial_maze_env.part02_renderer.env"
    renderer = importlib.import_module(f"{part}.renderer").Cutting2DRenderer()
    state = importlib.import_module(f"{part}.maze_state").Cutting2DMazeState(
        [(100, 100), (70, 100)], 10, (30, 15), (100, 100)
    )
    action = importlib.import_module(f"{part}.maze_action").Cutting2DMazeAction(1, rotate, reverse)
    renderer.render(state, action, None)
    return plt.gcf().axes


@pytest.mark.parametrize(
    ("rotate", "reverse", "horizontal", "vertical"),
    [
        (False, False, [0, 30], [0, 100]),  # the first cut runs along the second axis, through the whole piece
        (False, True, [0, 70], [0, 15]),
        (True, False, [0, 100], [0, 15]),  # the piece is shown turned, 100 x 70
        (True, True, [0, 30], [0, 70]),
    ],
)
def test_the_renderer_shows_the_cut_and_the_stock(rotate, reverse, horizontal, vertical):
    cut, stock = drawn(rotate, reverse)
    assert [axes.get_title(loc="left") for axes in (cut, stock)] == ["MazeAction", "Inventory Pieces"]
    piece, order = cut.patches
    assert (piece.get_width(), piece.get_height()) == ((100, 70) if rotate else (70, 100))
    assert (order.get_width(), order.get_height()) == (30, 15)
    lines = [[np.asarray(data).tolist() for data in line.get_data()] for line in cut.lines]
    assert lines == [[horizontal, [15, 15]], [[30, 30], vertical]]
    assert [line.get_label() for line in stock.lines] == [
        "inventory pieces",
        "current demand",
        "cutting inventory piece",
    ]
    assert [data.tolist() for data in stock.lines[0].get_data()] == [[100, 70], [100, 100]]


def test_the_renderer_shows_states_without_an_action_and_with_an_impossible_one():
    import matplotlib.pyplot as plt

    part = "tutorial_maze_env.part02_renderer.env"
    renderer = importlib.import_module(f"{part}.renderer").Cutting2DRenderer()
    state = importlib.import_module(f"{part}.maze_state").Cutting2DMazeState([(100, 100)], 10, (30, 15), (100, 100))
    action = importlib.import_module(f"{part}.maze_action").Cutting2DMazeAction(7, False, False)
    for given, title in ((None, "MazeAction (none)"), (action, "MazeAction (no such piece)")):
        renderer.render(state, given, None)
        assert plt.gcf().axes[0].get_title(loc="left") == title
