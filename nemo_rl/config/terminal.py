"""Text on a terminal: what a file, a model or a data set says is shown, and cannot control the terminal."""

import logging


def visible(text: str) -> str:
    """Escape every control character but newline and tab."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class VisibleFormatter(logging.Formatter):
    """Makes the text of a log record `visible`."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
