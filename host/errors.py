# SPDX-License-Identifier: Apache-2.0
"""The errors that are moeos's own; every other bad argument raises ValueError or TypeError.

This file knows nothing of what raises them.
"""


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
