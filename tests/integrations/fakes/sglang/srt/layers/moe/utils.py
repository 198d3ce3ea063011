# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for SGLang: names of backends, and those in force."""

from __future__ import annotations

import dataclasses
from enum import Enum

from sglang.srt.runtime_context import get_flags


class MoeA2ABackend(Enum):
    NONE = "none"
    DEEPEP = "deepep"

    def is_none(self) -> bool:
        return self is MoeA2ABackend.NONE


class _MoeRunnerBackendPredicates:
    value: str

    def is_triton(self) -> bool:
        return self.value == "triton"

    def is_flashinfer_cutlass(self) -> bool:
        return self.value == "flashinfer_cutlass"


class MoeRunnerBackend(_MoeRunnerBackendPredicates, Enum):
    AUTO = "auto"
    TRITON = "triton"
    DEEP_GEMM = "deep_gemm"


@dataclasses.dataclass(frozen=True)
class RegisteredMoeRunnerBackend(_MoeRunnerBackendPredicates):
    value: str


MoeRunnerBackendLike = MoeRunnerBackend | RegisteredMoeRunnerBackend
_names: set[str] = set()


def register_moe_runner_backend_name(name: str) -> None:
    _names.add(name)


def resolve_moe_runner_backend(backend: str | MoeRunnerBackendLike) -> MoeRunnerBackendLike:
    if not isinstance(backend, str):
        return backend
    if backend in _names:
        return RegisteredMoeRunnerBackend(backend)
    return MoeRunnerBackend(backend)


def get_moe_runner_backend() -> MoeRunnerBackendLike:
    return resolve_moe_runner_backend(get_flags().moe.runner_backend)


def get_moe_a2a_backend() -> MoeA2ABackend:
    return MoeA2ABackend(get_flags().moe.a2a_backend)


def is_tbo_enabled() -> bool:
    return bool(get_flags().moe.tbo_enabled)
