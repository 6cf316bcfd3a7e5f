"""Sparse files: the parts of a file that hold data."""

import errno
import os
from collections.abc import Iterator


def data_extents(descriptor: int) -> Iterator[tuple[int, int]]:
    """Iterate over the start and end of each part of a file that holds data, in order.

    Raises:
        OSError: it cannot be read.
    """
    end = 0
    while True:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as cause:
            if cause.errno != errno.ENXIO:
                raise
            return
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, end
