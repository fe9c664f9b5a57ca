"""Progress of long steps: an updating line on a terminal, plain lines now and then elsewhere."""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

PREFIX = "dcr set-up"
PLAIN_SECONDS = 15.0
"""Without a terminal, a running step reports itself this often."""


LONGEST_DETAIL = 80


class Step:
    """One running step. `said` notes the last line of its command; `tick` shows it when it is time to."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self.title = title
        self.detail = ""
        self._stream = stream
        self._live = stream.isatty()
        self._began = time.monotonic()
        self._shown = self._began
        if not self._live:
            self._line(f"{title} ...")

    def said(self, line: str) -> None:
        """Note what the command just printed; cargo's and the linker's long command lines are passed over."""
        text = line.strip()
        if text and len(text) <= LONGEST_DETAIL:
            self.detail = text

    @property
    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._began

    def tick(self) -> None:
        """Show where the step stands; cheap to call often."""
        text = f"{self.title}, {self.seconds:.0f} s" + (f": {self.detail}" if self.detail else "")
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{f'{PREFIX}: {text}'[:width]}")
            self._stream.flush()
        elif time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            self._line(text)

    def end(self, how: str) -> None:
        """Close the step's line."""
        if self._live:
            self._stream.write("\r\x1b[K")
        self._line(f"{self.title}: {how} {self.seconds:.1f} s")

    def _line(self, text: str) -> None:
        self._stream.write(f"{PREFIX}: {text}\n")
        self._stream.flush()


@contextmanager
def step(title: str, stream: TextIO | None = None) -> Iterator[Step]:
    """Show `title` while the block runs and its seconds when it is through."""
    running = Step(title, stream or sys.stderr)
    try:
        yield running
    except BaseException:
        running.end("stopped after")
        raise
    running.end("done in")
