"""zstd frames of a size that was checked before a byte of it was allocated."""

import threading

import zstandard

from etude.common.errors import CorruptError

LEVEL = 1
"""Level 3 saves 1 % of the bytes and costs twice the time: modelling wins, not a bigger LZ."""


class _Contexts(threading.local):
    """Compressors are dear to build and serve one thread each."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress(data: bytes | memoryview) -> bytes:
    """One frame that declares its content size."""
    return _contexts.compressor.compress(data)


def decompress(frame: bytes | memoryview, *, least: int, most: int, where: str) -> bytes:
    """The content of one frame.

    Args:
        frame: exactly one frame and nothing behind it.
        least: fewest bytes that the content can have.
        most: most bytes that it can have.
        where: names the frame in errors.

    Raises:
        CorruptError: damaged, followed by more, or of another size.
    """
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        # Also refuses frames of undeclared size: that is the largest number there is.
        if not least <= size <= most:
            raise CorruptError(f"{where}: a zstd frame of {size} bytes, not {least} to {most}")
        content = _contexts.decompressor.decompress(
            frame, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as cause:
        raise CorruptError(f"{where}: {cause}") from cause
    if len(content) != size:
        raise CorruptError(f"{where}: {len(content)} bytes in a zstd frame of {size}")
    return content
