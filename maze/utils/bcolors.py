"""Coloured text on the console."""

from __future__ import annotations


class BColors:
    """Escape sequences that terminals show as colours and styles."""

    HEADER = "\033[95m"
    OKBLUE = "\033[94m"
    OKGREEN = "\033[92m"
    WARNING = "\033[93m"
    FAIL = "\033[91m"
    ENDC = "\033[0m"
    BOLD = "\033[1m"
    UNDERLINE = "\033[4m"

    @staticmethod
    def format_colored(string: str, color: str) -> str:
        """Return the text in a colour.

        :param string: The text.
        :param color: One of this class's escape sequences.
        """
        return f"{color}{string}{BColors.ENDC}"

    @staticmethod
    def print_colored(string: str, color: str) -> None:
        """Print the text in a colour.

        :param string: The text.
        :param color: One of this class's escape sequences.
        """
        print(BColors.format_colored(string, color))
