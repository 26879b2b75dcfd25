"""Copy of what is printed, line by line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

LARGEST = 1_000_000
"""Characters after which no more lines are copied."""


class ConsoleLog:
    """Copies the lines printed by this process to stdout and stderr; of a progress bar the last state alone.

    Lines are kept until there is somebody to send them to. Forked processes copy nothing.
    """

    def __init__(self) -> None:
        self._left = LARGEST
        self._waiting: list[str] = []
        self._send: Callable[[str], object] | None = None
        self._streams: list[tuple[Any, Any]] = []
        self._process = os.getpid()

    def start(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError):  # a stream of a notebook or an editor may allow no change
                self._copy(stream)

    def _copy(self, stream: Any) -> None:
        write, begun = stream.write, ""

        def write_and_copy(text: Any) -> Any:
            nonlocal begun
            written = write(text)
            if isinstance(text, str) and os.getpid() == self._process:
                *lines, begun = (begun + text).split("\n")
                begun = begun.rpartition("\r")[2][-10_000:]
                for line in lines:
                    self._line(line.rpartition("\r")[2])
            return written

        stream.write = write_and_copy
        self._streams.append((stream, write))

    def _line(self, line: str) -> None:
        if self._left <= 0:
            return
        self._left -= len(line) + 1
        self._waiting.append(line if self._left > 0 else "(no more is copied)")
        self.send_to(self._send)

    def send_to(self, send: Callable[[str], object] | None) -> None:
        """Gives all lines, also those printed so far, to a function, which must not print and not raise."""
        self._send = send
        while send is not None and self._waiting:
            send(self._waiting.pop(0))

    def stop(self) -> None:
        """Copies nothing any more."""
        self._left, self._send = 0, None
        for stream, write in self._streams:
            if getattr(stream.write, "__name__", "") == "write_and_copy":  # else somebody has changed it since
                stream.write = write
        self._streams = []
