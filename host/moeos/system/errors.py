# SPDX-License-Identifier: Apache-2.0
"""The errors that are moeos's own, and what any error says.

Every other bad argument raises ValueError or TypeError.

Must not depend on what raises them.
"""

import contextlib
from collections.abc import Iterable, Sequence


class PeerTimeout(RuntimeError):
    """A wait for another rank ended without it: the deadline passed, or that rank gave up.

    The message names the rank that waited, the ranks that were missing and what it waited for. All
    ranks of the world end with this error, except one that ended with an error of its own.
    """


class ConfigMismatch(ValueError):
    """Ranks were given settings that must be equal on all of them and are not.

    Every rank raises it with the same message, which says which ranks hold which value.
    """


class NumericalError(ValueError):
    """The router's logits of some token are not finite, so it has no route.

    The message names the token and the logit.
    """


class RankError(Exception):
    """Which rank raised an error, and what it says; the first cause of that error.

    Python prints causes first. So what a rank prints begins with this sentence, and the error's own
    traceback follows.
    """


def tell_rank(error: BaseException, rank: str) -> None:
    """Makes what Python prints of an error begin with its origin, such as "rank 1 of 2"."""
    if not isinstance(error, Exception):  # such as SystemExit, for which Python prints nothing
        return
    chain: list[BaseException] = [error]
    while (before := _before(chain[-1])) is not None and before not in chain:
        chain.append(before)
    if any(isinstance(one, RankError) for one in chain):
        return
    with contextlib.suppress(Exception):  # its class may take no attributes
        chain[-1].__cause__ = RankError(f"{rank}: {said(error).splitlines()[0]}")


def _before(error: BaseException) -> BaseException | None:
    """What Python prints before an error."""
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def in_job(ranks: Iterable[int], job: Sequence[int]) -> str:
    """The end of a message that names ranks of a world whose ranks the job knows by other numbers.

    `job`: the job's number of each rank of the world, or nothing where they are not known.
    """
    told = [rank for rank in dict.fromkeys(ranks) if rank < len(job)]
    if all(job[rank] == rank for rank in told):
        return ""
    first, *others = (f"rank {rank} of the world is rank {job[rank]}" for rank in told)
    return "; " + ", ".join([f"{first} of the job", *others])


def said(error: BaseException) -> str:
    """The class of an error and what it says, in ASCII, also where asking it raises: its own error
    must come out, and no other.
    """
    try:
        text = str(error)
    except BaseException as raised:
        text = f"its text cannot be had ({type(raised).__name__})"
    return f"{type(error).__name__}: {text}".encode("ascii", "backslashreplace").decode()
