# SPDX-License-Identifier: Apache-2.0
"""Hides functions from Dynamo, the tracer of `torch.compile`, and does not import it.

Its import takes seconds, and on a full machine longer than peers wait. These functions run during
calls. So a program that compiles nothing never imports it here. Must depend on PyTorch alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo
from torch.compiler import is_compiling

P = ParamSpec("P")
T = TypeVar("T")


def hidden(function: Callable[P, T]) -> Callable[P, T]:
    """The function, into which Dynamo does not look, nor into what it calls.

    As `torch.compiler.disable`, which imports Dynamo when it decorates or at the first call.
    """
    behind = _disable_dynamo(function)
    is_active = eval_frame.get_eval_frame_callback

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Dynamo looks at frames of this thread only with a callback, which is its own: then it has
        # been imported. Where it traces the caller of this one, the first question is a constant.
        if not is_compiling() and is_active() is None:
            return function(*args, **kwargs)
        return behind(*args, **kwargs)

    _pass_by(call)
    return call


def _pass_by(function: Callable[..., Any]) -> None:
    """Tells Dynamo to run the frames of a function as they are, and to look at those within."""
    code = function.__code__
    if hasattr(eval_frame, "skip_code"):  # PyTorch before 2.8
        eval_frame.skip_code(code)
    else:
        skip, look = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, look))
