"""Dependencies of the installation that acts by bundles."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ACTING = """
import sys, time
begin = time.process_time()
from maze.serve.bundle import PolicyBundle
session = PolicyBundle.load(sys.argv[1]).session()
seconds = time.process_time() - begin
for _ in range(100):
    assert session.act([0.0, 0.1, 0.0, 0.2]) in (0, 1)
peak = next((line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")), 0)
print(seconds, int(peak) / 1024)
"""


def run(*command: object) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_serving_is_small_and_acts_without_torch(tmp_path, cartpole_bundle):
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("maze_rl-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh")
    python = tmp_path / "fresh" / "bin" / "python"
    (packages,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".maze")}
    assert shipped == {f"maze_envs/shelf/{path.name}" for path in (ROOT / "maze_envs" / "shelf").iterdir()}
    before = size_of(packages)
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q")
    run(*pip, "-c", ROOT / "constraints.txt", f"{wheel}[serve]")
    assert size_of(packages) - before < 200e6
    assert not {"torch", "hydra", "gymnasium", "pandas", "matplotlib"} & {path.name for path in packages.iterdir()}
    measured = [tuple(map(float, run(python, "-c", ACTING, cartpole_bundle).split())) for _ in range(5)]
    assert min(seconds for seconds, _ in measured) < 0.5
    assert max(megabytes for _, megabytes in measured) < 150
    refused = subprocess.run([tmp_path / "fresh" / "bin" / "maze-run"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr == 'maze-run needs hydra, which is not installed: pip install "maze-rl[train]>=1"\n'


def size_of(directory: Path) -> int:
    """Bytes of all files."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())
