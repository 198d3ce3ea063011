# SPDX-License-Identifier: Apache-2.0
"""Records of the device OS, as numpy reads and writes them: runtime/memory/records.def has their
fields.

Must not depend on where they lie.
"""

from __future__ import annotations

import numpy

from moeos import _runtime


def dtype_of(record: str) -> numpy.dtype[numpy.void]:
    """The type of a record, by its name in records.def."""
    fields, size = _runtime.record(record)
    formats = []
    for _, form, _, count in fields:
        kind = numpy.dtype(form) if form.startswith("<") else dtype_of(form)
        formats.append((kind, (count,)) if count > 0 else kind)
    return numpy.dtype(
        {
            "names": [name for name, *_ in fields],
            "formats": formats,
            "offsets": [offset for _, _, offset, _ in fields],
            "itemsize": size,
        }
    )
