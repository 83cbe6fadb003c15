"""Arguments of renderers that a viewer lets its user choose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from maze.core.annotations import override
from maze.core.errors import optional_package


class RendererArg(ABC):
    """An argument that is passed to :meth:`~maze.core.rendering.renderer.Renderer.render` by its name.

    :param name: Keyword of the argument.
    :param title: What the viewer shows beside it.
    """

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.title = title

    @abstractmethod
    def create_widget(self) -> Any:
        """A notebook widget (ipywidgets) whose value is the argument's."""


class IntRangeArg(RendererArg):
    """A whole number within a range.

    :param name: Keyword of the argument.
    :param title: What the viewer shows beside it.
    :param min_value: Smallest value, and the one to begin with.
    :param max_value: Largest value.
    :raises ValueError: The range is empty.
    """

    def __init__(self, name: str, title: str, min_value: int, max_value: int) -> None:
        if min_value > max_value:
            raise ValueError(f"Renderer argument `{name}`: min_value ({min_value}) exceeds max_value ({max_value}).")
        super().__init__(name, title)
        self.min_value = min_value
        self.max_value = max_value

    @override(RendererArg)
    def create_widget(self) -> Any:
        return require_ipywidgets().IntSlider(
            value=self.min_value, min=self.min_value, max=self.max_value, step=1, description=self.title
        )


class OptionsArrayArg(RendererArg):
    """One of several given values.

    :param name: Keyword of the argument.
    :param title: What the viewer shows beside it.
    :param options: The values, or pairs of a label and a value.
    :raises ValueError: There are no options.
    """

    def __init__(self, name: str, title: str, options: Sequence[Any | tuple[str, Any]]) -> None:
        if not options:
            raise ValueError(f"Renderer argument `{name}` has no options to choose from.")
        super().__init__(name, title)
        self.options = list(options)

    @override(RendererArg)
    def create_widget(self) -> Any:
        return require_ipywidgets().Dropdown(options=self.options, description=self.title)


def require_ipywidgets() -> Any:
    """The module ipywidgets.

    :raises ConfigImportError: It is not installed; names the extra.
    """
    return optional_package("ipywidgets", "notebook", "Viewers in notebooks need the extra")
