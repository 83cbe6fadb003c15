"""Draw the picture of the README: run its example and plot stock, orders and cost of both policies.

`python docs/site_pages/readme_picture.py` takes half a minute and writes `docs/pictures/example.png`.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "pictures" / "example.png"
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
N_DAYS = 28
COLORS = {"heuristic": "#b45309", "trained": "#1d4ed8"}


def run_example(directory: Path) -> dict[str, Any]:
    """Run the Python listing of the README in a directory and return its names."""
    (listing,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    script = directory / "store.py"
    script.write_text(listing, encoding="utf-8")
    sys.path.insert(0, str(directory))
    os.chdir(directory)
    return runpy.run_path(str(script), run_name="__main__")


def episode(names: dict[str, Any], policy: Any, seed: int) -> tuple[list[float], list[float]]:
    """Return the stock and the order of each day of an episode."""
    env = names["rc"].env_factory()
    env.seed(seed)
    observation, stock, orders = env.reset(), [], []
    for _ in range(70):
        action = policy.compute_action(observation, actor_id=env.actor_id(), deterministic=True)
        stock.append(float(observation["units"][0]))
        orders.append(float(action["action"]))
        observation, *_ = env.step(action)
    return stock, orders


def main() -> None:
    """Run the example and write the picture."""
    with tempfile.TemporaryDirectory() as place:
        names = run_example(Path(place))
        policies = {"heuristic": names["OrderUpTo"](), "trained": names["rc"].policy}
        costs = pd.read_csv(Path(names["rc"].run_dir, "comparison", "comparison.csv"))
        played = {name: [episode(names, policy, seed) for seed in range(20)] for name, policy in policies.items()}
    figure, (problem, policy_axes, comparison) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for name, episodes in played.items():
        problem.step(range(N_DAYS), episodes[0][0][:N_DAYS], where="post", color=COLORS[name], label=name)
        by_weekday = np.array([orders for _, orders in episodes]).reshape(-1, 7).mean(axis=0)
        policy_axes.plot(WEEKDAYS, by_weekday, marker="o", color=COLORS[name], label=name)
    problem.set(title="Problem: stock at opening, same demand", xlabel="day (weekends shaded)", ylabel="units")
    for weekend in range(5, N_DAYS, 7):
        problem.axvspan(weekend, weekend + 2, color="#e5e7eb", zorder=0)
    policy_axes.set(title="Policy: mean order by weekday", ylabel="units")
    rows = costs[costs["measure"] == "return"].set_index("policy")
    for position, name in enumerate(policies):
        mean, low, high = -rows.loc[name, "mean"], -rows.loc[name, "mean_high"], -rows.loc[name, "mean_low"]
        comparison.barh(position, mean, color=COLORS[name], xerr=[[mean - low], [high - mean]], capsize=4)
        comparison.text(10, position, f"{mean:.0f}", va="center", color="white", fontweight="bold")
    comparison.set(title="Comparison: cost of 100 common episodes", xlabel="mean cost of 10 weeks, 95 % interval")
    comparison.set_yticks(range(len(policies)), list(policies))
    comparison.invert_yaxis()
    policy_axes.legend(frameon=False)
    for axes in (problem, policy_axes, comparison):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=110)
    print(f"{PICTURE}: {PICTURE.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
