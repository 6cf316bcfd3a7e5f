"""Line ranges of a parsed file: definitions whole, long ones by their parts, short ones together.

Only this module and its worker use the parser. It runs in the worker's process, over bytes that a
policy may have written, and has no limit of its own: the worker has.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

MAX_LINES = 80
MIN_LINES = 15
WINDOW_LINES, WINDOW_STEP = 60, 40
_MAX_DEPTH = 64
_PREFIXES = ("comment", "decorator", "attribute_item", "annotation")
"""Parts of the kinds of nodes that stand before a definition and belong to it."""


class LineRange(NamedTuple):
    """Lines of a file, counted from 0; the end is not part of it."""

    start: int
    end: int


class SyntaxNode(Protocol):
    """The part of a syntax tree's node that is used here."""

    @property
    def type(self) -> str: ...
    @property
    def children(self) -> Sequence["SyntaxNode"]: ...
    @property
    def start_point(self) -> tuple[int, int]: ...
    @property
    def end_point(self) -> tuple[int, int]: ...


class _NodeLines(NamedTuple):
    span: LineRange
    node: SyntaxNode | None
    """The node of these lines, besides its prefixes."""


def windows(span: LineRange) -> list[LineRange]:
    """Overlapping windows of lines without a known structure."""
    starts = range(
        span.start, max(span.start + 1, span.end - WINDOW_LINES + WINDOW_STEP), WINDOW_STEP
    )
    return [LineRange(start, min(start + WINDOW_LINES, span.end)) for start in starts]


def cut_tree(root: SyntaxNode, num_lines: int) -> list[LineRange]:
    """Line ranges that cover a file in order; windows inside of one may overlap."""
    found: list[LineRange] = []
    open_pieces = [(part, 1) for part in _parts(root, LineRange(0, num_lines))]
    while open_pieces:
        piece, depth = open_pieces.pop()
        if piece.span.end - piece.span.start <= MAX_LINES:
            _add(found, piece.span)
            continue
        parts = _parts(piece.node, piece.span) if depth < _MAX_DEPTH else []
        if len(parts) > 1 or (parts and parts[0].node is not piece.node):
            open_pieces += [(part, depth + 1) for part in parts]
        else:
            found += windows(piece.span)
    return found


def _add(found: list[LineRange], span: LineRange) -> None:
    """Append a range, or extend the last one if both are short."""
    last = found[-1] if found else None
    if last and max(last.end - last.start, span.end - span.start) < MIN_LINES:
        found[-1] = LineRange(last.start, span.end)
    else:
        found.append(span)


def _parts(node: SyntaxNode | None, span: LineRange) -> list[_NodeLines]:
    """The lines along the node's children, last first."""
    return list(_siblings(node, span))[::-1] if node else []


def _siblings(node: SyntaxNode, span: LineRange) -> Iterator[_NodeLines]:
    """One piece per child that begins on a line of its own, together covering the span."""
    start, at = span.start, span.start
    held: SyntaxNode | None = None
    for child in node.children:
        first, last = child.start_point[0], _last_line(child)
        if last < at:
            continue
        if held is not None and first >= at:
            yield _NodeLines(LineRange(start, at), held)
            start = at
        is_prefix = any(word in child.type for word in _PREFIXES)
        # A child that begins on the line on which another ended shares its piece.
        held = None if is_prefix else child
        at = min(max(at, last + 1), span.end)
    if start < span.end:
        yield _NodeLines(LineRange(start, span.end), held)


def _last_line(node: SyntaxNode) -> int:
    """The last line that holds something of the node."""
    row, column = node.end_point
    return row if column else max(row - 1, node.start_point[0])
