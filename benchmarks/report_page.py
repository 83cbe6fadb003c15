"""Opening and scrolling times in a browser: report of a long run, HTML player of a long episode.

The report has 1,000 epochs with 200 statistics; the episode has 10,000 steps with a picture and a decision in each.
Both are opened in Chromium, several times, each time with nothing cached. Printed are medians: the size of the file;
the milliseconds until the browser calls the page loaded, and what they cost the thread that runs and lays out the page,
which other processes disturb less; and the same of a frame while the report is scrolled (from end to end
in 200 frames), holds an arrow key down in the episode, or drags its slider: the time between two frames, the share of
frames that took more than 50 ms, and the thread's time for one. Software draws the frames where there is no graphics
card, as in a container.

    python benchmarks/report_page.py            # 5 times
    python benchmarks/report_page.py --quick    # once
    python benchmarks/report_page.py --json out.json
"""

from __future__ import annotations

import argparse
import json
import shutil
from datetime import datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import gymnasium
import numpy as np

from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.log_stats.log_stats import LogStatsKey
from maze.core.rendering.trajectory_page import write_trajectory_page
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.trajectory_recording_wrapper import FrameRecordingWrapper
from maze.distributions.distribution_mapper import DistributionMapper
from maze.evaluation.inspection import inspected_episode
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet
from maze.report.progress import Progress
from maze.report.run_page import RunFacts, run_page

N_EPOCHS, N_STATISTICS, N_STEPS = 1000, 200, 10_000
MOST_OF_A_FRAME = 50.0

LOADED = 'performance.getEntriesByType("navigation")[0].loadEventEnd'
FRAMES = """async nFrames => {
    const act = ACT, times = [];
    let last = await new Promise(requestAnimationFrame);
    for (let frame = 0; frame < nFrames; frame++) {
        act(frame, nFrames);
        const now = await new Promise(requestAnimationFrame);
        times.push(now - last);
        last = now;
    }
    return times;
}"""
SCROLL = "(frame, n) => scrollTo(0, frame / n * document.documentElement.scrollHeight)"
ARROW_KEY = "() => document.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))"
DRAG = """(frame, n) => {
    const slider = document.getElementById("slider");
    slider.value = Math.round(frame / n * slider.max);
    slider.dispatchEvent(new Event("input"));
}"""


class Drawn(gymnasium.Env[Any, Any]):
    """An environment of 10,000 steps that draws a small picture of each."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (8,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)
    render_mode = "rgb_array"

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self._observation(), float(self.np_random.normal()), self.time >= N_STEPS, False, {}

    def render(self) -> Any:
        pixels = np.full((120, 160, 3), 245, np.uint8)
        row, column = divmod(self.time, 150)
        pixels[row : row + 20, column : column + 10] = (self.time % 256, 60, 90)
        return pixels

    def _observation(self) -> Any:
        return self.np_random.uniform(-1.0, 1.0, 8).astype(np.float32)


def write_report(path: Path) -> None:
    """The report of a long run."""
    progress, rng = Progress(), np.random.default_rng(1)
    keys = [LogStatsKey(BaseEnvEvents.kpi, "mean", (f"indicator_{index}",)) for index in range(N_STATISTICS)]
    for epoch in range(N_EPOCHS):
        progress.add("train", epoch + 1, epoch, epoch * 100, dict(zip(keys, rng.random(N_STATISTICS), strict=True)))
        progress.finish_step()
    run_page(RunFacts("run", "A long run"), progress, "ended", datetime(2026, 1, 1)).write(path)


def write_episode(path: Path) -> None:
    """The page of a long episode, with every decision in it."""
    env = FrameRecordingWrapper.wrap(GymMazeEnv(Drawn()))
    env.seed(1)
    network = FlattenConcatPolicyNet(
        {"observation": (8,)}, {"action": (4,)}, hidden_units=[16], non_lin="torch.nn.Tanh"
    )
    policy = TorchPolicy({0: network}, DistributionMapper(env.action_spaces_dict[0], []), "cpu")
    others = {"random": RandomPolicy(env.action_spaces_dict)}
    episode = inspected_episode(env, policy, others, None, 0.99, deterministic=True)
    write_trajectory_page(episode.record, path, decisions=episode.decisions)


def measured(browser: Any, path: Path, movements: dict[str, str], n_frames: int) -> dict[str, float]:
    """Open a page once and scroll it."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def thread_ms() -> float:
        metrics = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
        return 1000.0 * float(metrics["TaskDuration"])

    page.goto(path.as_uri())
    page.wait_for_timeout(500)
    results = {"loaded_ms": page.evaluate(LOADED), "loaded_thread_ms": thread_ms()}
    for name, source in movements.items():
        before = thread_ms()
        times = page.evaluate(FRAMES.replace("ACT", source), n_frames)
        results[f"{name}_frame_ms"] = median(times)
        results[f"{name}_slow_share"] = sum(each > MOST_OF_A_FRAME for each in times) / len(times)
        results[f"{name}_thread_ms"] = (thread_ms() - before) / n_frames
    context.close()
    return results


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    results: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as directory:
        pages = {"report": Path(directory) / "report.html", "episode": Path(directory) / "episode.html"}
        write_report(pages["report"])
        write_episode(pages["episode"])
        movements = {"report": {"scroll": SCROLL}, "episode": {"arrow_key": ARROW_KEY, "drag": DRAG}}
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name, path in pages.items():
                rounds = [measured(browser, path, movements[name], 200) for _ in range(1 if options.quick else 5)]
                results[name] = {key: median(each[key] for each in rounds) for key in rounds[0]}
                results[name]["megabytes"] = path.stat().st_size / 1e6
            browser.close()
    for name, values in results.items():
        print(name, *(f"  {key:<22} {value:.3g}" for key, value in values.items()), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
