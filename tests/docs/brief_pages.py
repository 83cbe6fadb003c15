"""Sphinx extension for tests: tutorials are executed with less data and fewer updates than on the site."""

from __future__ import annotations

from sphinx.application import Sphinx

LESS = {
    "tutorials/cutting_structure": {'n_rollout_steps": 100': 'n_rollout_steps": 10', "n_epochs=3": "n_epochs=1"},
    "tutorials/log_to_policy": {
        "n_steps=500": "n_steps=50",
        "range(400)": "range(20)",
        "algorithm.n_epochs=2": "algorithm.n_epochs=1 algorithm.epoch_length=20",
        "[fqe]": "[wis]",  # without training
        "range(1000, 1100)": "range(1000, 1010)",
    },
    "tutorials/plain_python": {"n_epochs=8": "n_epochs=2"},
    "tutorials/truck_docks": {"horizon=16, scenarios=16)": "horizon=4, scenarios=2)"},
}
"""Texts of pages, and what replaces them."""


def _shorten(app: Sphinx, page: str, content: list[str]) -> None:
    for text, less in LESS.get(page, {}).items():
        if text not in content[0]:
            raise ValueError(f"docs/{page}.md has no {text!r}, which tests replace to execute it faster.")
        content[0] = content[0].replace(text, less)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("source-read", _shorten)
    return {"parallel_read_safe": True}
