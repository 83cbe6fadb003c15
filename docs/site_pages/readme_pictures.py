"""Take the pictures of the guide on inspecting results from a real run: report, HTML player and model.

`python docs/site_pages/readme_pictures.py docs/pictures` needs Chromium and the extra `dev-all`. It trains a
policy that orders goods for a minute.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTH, HEIGHT = 1200, 760
SHORTER = ("algorithm.epoch_length=6", "runner.eval_concurrency=64", "algorithm.rollout_evaluator.n_episodes=64")
COLORS = 128
"""Of a palette, which makes pictures of pages several times smaller and looks the same."""


def main(arguments: list[str]) -> int:
    """Train, open the pages, and write the pictures into the first argument; the second one names an existing run."""
    from playwright.sync_api import sync_playwright

    from maze.maze_cli import main as maze_run

    directory = Path(arguments[0]).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        run = Path(arguments[1]).absolute() if arguments[1:] else Path(place, "run")
        if not run.exists():
            seeds = ["seeding.env_base_seed=1", "seeding.agent_base_seed=1"]
            maze_run(["-cn", "conf_train", "+experiment=lost_sales_ppo", *SHORTER, *seeds, f"hydra.run.dir={run}"])
        maze_run(["--report", str(run)])
        maze_run(["--play", str(run), f"hydra.run.dir={place}/played", "seeding.env_base_seed=2"])
        (player,) = Path(place, "played").rglob("*.html")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, reduced_motion="reduce")
            page.goto((run / "report.html").as_uri())
            drawing = page.locator("figure.picture img").first.get_attribute("src")
            page.locator("h2", has_text="Return of episodes").evaluate("each => each.scrollIntoView()")
            page.wait_for_timeout(1000)
            save(page.screenshot(), directory / "report.png")
            page.goto(player.as_uri())
            for _ in range(40):
                page.keyboard.press("ArrowRight")
            page.wait_for_timeout(1000)
            save(page.screenshot(), directory / "player.png")
            page.set_content(f'<img src="{drawing}" style="max-width: 1100px">')
            page.wait_for_timeout(1000)
            save(page.locator("img").screenshot(), directory / "model.png")
            browser.close()
    return 0


def save(png: bytes, path: Path) -> None:
    """Write a picture with a palette of few colours."""
    picture: Any = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(COLORS).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
