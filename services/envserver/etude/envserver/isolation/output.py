"""Sizes of the command output that is kept, for every driver and for guests."""

HEAD_BYTES, TAIL_BYTES = 16 * 1024, 48 * 1024
"""Head and tail of a tool call's output that are kept: twice what the policy is shown (30 KiB), so
that the gap is never in the shown part."""
