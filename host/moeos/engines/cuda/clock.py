# SPDX-License-Identifier: Apache-2.0
"""Compares a GPU's clock with its host's, so that times of several GPUs can be compared.

Each GPU's `%globaltimer` counts nanoseconds from a moment of its own. The host asks a kernel of
one thread what time it is, as NTP asks a server (RFC 5905, section 8). It uses the question that
was answered soonest: the answer belongs to the middle between question and answer.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch

from moeos.compile import jit
from moeos.engines.cuda import driver as cuda_driver

QUESTIONS = 200
DEADLINE = 5.0
"""Seconds that host and GPU wait for each other."""

_SOURCE = "kernels/clock.cu"
_ASKED, _ANSWERED, _ANSWER = 0, 16, 17  # places in ClockExchange, in words of 8 bytes
_WORDS = 32


class Answer(NamedTuple):
    """When the host asked, what the GPU said, and when the host knew; in ns of either's clock."""

    asked: int
    gpu: int
    known: int


class Difference(NamedTuple):
    """The nanoseconds between two clocks, and by how many they may be wrong."""

    nanoseconds: int
    uncertainty: int


def difference_of(answers: Iterable[Answer]) -> Difference:
    """By how much the GPU's clock is behind: by the answer that was known soonest."""
    best = min(answers, key=lambda answer: answer.known - answer.asked)
    round_trip = best.known - best.asked
    return Difference(best.asked + round_trip // 2 - best.gpu, (round_trip + 1) // 2)


def behind_host() -> Difference:
    """By how much the current GPU's clock is behind this host's `time.time_ns()`.

    Raises `RuntimeError` if the kernel cannot be compiled or run, or does not answer.
    """
    driver = cuda_driver.load()
    major, minor = torch.cuda.get_device_capability()
    memory = torch.zeros(_WORDS, dtype=torch.int64, device="cpu", pin_memory=True)
    words = memory.numpy()
    stream = torch.cuda.Stream()
    cubin = jit.compile_file(_SOURCE, f"sm_{major}{minor}")
    library = cuda_driver.ask(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    try:
        function = cuda_driver.function(library, "moeos_clock")
        arguments = (memory.data_ptr(), QUESTIONS, int(DEADLINE * 1e9))
        types = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
        cuda_driver.ask(
            driver.cuLaunchKernel(
                function, 1, 1, 1, 1, 1, 1, 0, stream.cuda_stream, (arguments, types), 0
            )
        )
        answers = []
        for question in range(1, QUESTIONS + 1):
            asked = time.time_ns()
            words[_ASKED] = question
            while words[_ANSWERED] != question:
                if time.time_ns() - asked > DEADLINE * 1e9:
                    raise RuntimeError(
                        f"the GPU did not tell its time within {DEADLINE:g} s: is another program "
                        "using all of it?"
                    )
            answers.append(Answer(asked, int(words[_ANSWER]), time.time_ns()))
        return difference_of(answers)
    finally:
        stream.synchronize()  # at the latest when the kernel has waited for its deadline
        cuda_driver.ask(driver.cuLibraryUnload(library))
