"""What the notebook viewers share."""

from __future__ import annotations

from typing import Any


def require_ipywidgets() -> Any:
    """The module ipywidgets; an error that names the extra, where it is not installed."""
    try:
        import ipywidgets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ImportError('Viewers in notebooks need the extra: pip install "maze-rl[notebook]".') from error
    return ipywidgets


def show(widget: Any) -> None:
    """Shows a widget below the cell."""
    from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

    display(widget)  # type: ignore[no-untyped-call, unused-ignore]
