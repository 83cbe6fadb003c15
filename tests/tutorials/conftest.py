"""Makes the tutorial importable as its documentation imports it."""

import sys
from pathlib import Path

TUTORIALS = str(Path(__file__).resolve().parents[2] / "tutorials")
if TUTORIALS not in sys.path:
    sys.path.append(TUTORIALS)
