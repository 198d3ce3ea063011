# SPDX-License-Identifier: Apache-2.0
"""Standard output and standard error as a command needs them, whatever reads them.

This file must not depend on what commands print.
"""

from __future__ import annotations

import codecs
import io
import os
import sys

CLOSED_PIPE = 141
"""Exit code of a command whose reader has left: 128 + SIGPIPE, as a shell has it for others."""

_ERRORS = "moeos-plain"
_PLAIN = {
    "\N{MICRO SIGN}": "u",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{MINUS SIGN}": "-",
    "\N{RIGHTWARDS ARROW}": "->",
    "\N{MIDDLE DOT}": "*",
    "\N{SUPERSCRIPT TWO}": "^2",
    "\N{SUPERSCRIPT THREE}": "^3",
}
"""Replacements for characters that a terminal does not have."""


class Descriptor(io.RawIOBase):
    """A file descriptor to write to. Once a write has failed, what is written goes nowhere.

    So the command goes on to its end: the other ranks would wait for one that left during a call.

    Attributes:
        failure: of the first write that failed, or None.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.failure: OSError | None = None

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        if self.failure is None:
            try:
                return os.write(self._descriptor, view)
            except OSError as error:
                self.failure = error
        return view.nbytes


def prepare() -> Descriptor:
    """Makes both streams safe to print to; returns what standard output is written to.

    A stream that is closed takes everything and shows nothing. A sign that the stream's encoding
    lacks is printed as plain letters, or as its escape.
    """
    codecs.register_error(_ERRORS, _plain)
    stdout = Descriptor(1)
    for name, descriptor in (("stdout", stdout), ("stderr", Descriptor(2))):
        stream = getattr(sys, name)
        if stream is None:  # the descriptor was closed when the process began
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):  # the process has not replaced it
            stream.flush()
            buffered = io.BufferedWriter(descriptor)
            lines = stream.line_buffering or name == "stderr"
            encoding = stream.encoding
            made = io.TextIOWrapper(buffered, encoding, _ERRORS, line_buffering=lines)
            setattr(sys, name, made)
    return stdout


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(sign) or ascii(sign)[1:-1] for sign in text), error.end
