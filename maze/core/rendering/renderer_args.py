"""Arguments of renderers that users choose in viewers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from maze.core.annotations import override
from maze.core.errors import optional_package


class RendererArg(ABC):
    """Keyword argument of :meth:`~maze.core.rendering.renderer.Renderer.render`.

    :param name: Keyword of the argument.
    :param title: Its label in the viewer.
    """

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.title = title

    @abstractmethod
    def create_widget(self) -> Any:
        """Return a notebook widget (ipywidgets) for the value of the argument."""


class IntRangeArg(RendererArg):
    """Integer within a range.

    :param name: Keyword of the argument.
    :param title: Its label in the viewer.
    :param min_value: Smallest value, and the initial one.
    :param max_value: Largest value.
    """

    def __init__(self, name: str, title: str, min_value: int, max_value: int) -> None:
        super().__init__(name, title)
        self.min_value = min_value
        self.max_value = max_value

    @override(RendererArg)
    def create_widget(self) -> Any:
        return require_ipywidgets().IntSlider(
            value=self.min_value, min=self.min_value, max=self.max_value, step=1, description=self.title
        )


class OptionsArrayArg(RendererArg):
    """One of several values.

    :param name: Keyword of the argument.
    :param title: Its label in the viewer.
    :param options: The values, or pairs of a label and a value.
    """

    def __init__(self, name: str, title: str, options: Sequence[Any | tuple[str, Any]]) -> None:
        super().__init__(name, title)
        self.options = list(options)

    @override(RendererArg)
    def create_widget(self) -> Any:
        return require_ipywidgets().Dropdown(options=self.options, description=self.title)


def require_ipywidgets() -> Any:
    """Return the module ipywidgets.

    :raises ConfigImportError: It is not installed; the message names the extra.
    """
    return optional_package("ipywidgets", "notebook", "Viewers in notebooks need the extra")
