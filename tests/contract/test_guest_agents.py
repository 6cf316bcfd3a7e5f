"""The agent in Go against the one in Python: the same calls get the same replies.

Searches are compared with the host's own in test_guest_searches.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.vm import guests

from etude.envserver.guest.calls import GuestReply, GuestRequest
from etude.envserver.isolation.sandbox_layout import ENVIRONMENT
from etude.v1 import environments_pb2, guest_pb2

DATA = [b"", b"a\nb\n", b"\0\xff", b"x" * 300_000]
paths = st.lists(st.sampled_from(["a", "b", "é", ".c", "..", "", "x" * 300]), max_size=3).map(
    "/".join
)
few = st.sampled_from([0, 0, 1, 3, 70_000, 2**40])
modes = st.sampled_from([0, 0o700, 0o7644])


def read(path: str, offset: int, limit: int, *, digest: bool) -> guest_pb2.GuestCall:
    asked = guest_pb2.GuestRead(path=path, offset=offset, limit=limit, digest=digest)
    return guest_pb2.GuestCall(read=asked)


def write(path: str, data: bytes, announced: bytes, mode: int) -> tuple[guest_pb2.GuestCall, bytes]:
    digest = hashlib.sha256(announced).digest()
    asked = guest_pb2.GuestWrite(path=path, size=len(announced), sha256=digest, mode=mode)
    return guest_pb2.GuestCall(write=asked), data


def execute(line: str, head: int, tail: int, *, merged: bool) -> guest_pb2.GuestCall:
    asked = guest_pb2.GuestExec(
        shell=line.encode(), env=dict(ENVIRONMENT), head_bytes=head, tail_bytes=tail, merged=merged
    )
    return guest_pb2.GuestCall(exec=asked)


lines = st.sampled_from(
    [
        *("ls -a", "echo out; echo err >&2", "exit 3", "kill -9 $$", "seq 500", "no-such"),
        *("mkdir -p a/b; seq 5 > a/b/n", "ln -s a link", "rm -rf a", "mkfifo p", "chmod +x a b"),
        "printf '\\377\\n' > a",
    ]
)
sizes = st.sampled_from([0, 1, 10, 1000])
calls = st.one_of(
    st.builds(read, paths, few, few, digest=st.booleans()),
    # Folders are made before data comes, so data that is not what was announced goes to the top.
    st.builds(
        write, st.sampled_from(["a", ".."]), st.sampled_from(DATA), st.sampled_from(DATA), modes
    ),
    st.tuples(paths, st.sampled_from(DATA)).map(lambda it: write(it[0], it[1], it[1], 0)),
    st.builds(execute, lines, sizes, sizes, merged=st.booleans()),
    paths.map(lambda p: guest_pb2.GuestCall(list=guest_pb2.GuestList(path=p))),
    paths.map(lambda p: guest_pb2.GuestCall(stat=guest_pb2.GuestStat(path=p))),
    paths.map(lambda p: guest_pb2.GuestCall(delete=guest_pb2.GuestDelete(path=p))),
    paths.map(lambda p: guest_pb2.GuestCall(hashes=guest_pb2.GuestHashes(path=p))),
    st.builds(guest_pb2.GuestWalk, path=paths, hidden=st.booleans()).map(
        lambda walk: guest_pb2.GuestCall(walk=walk)
    ),
    st.sampled_from(["**", "a/*", "{a,b}", ".*"]).map(
        lambda p: guest_pb2.GuestCall(glob=guest_pb2.GuestGlob(pattern=p))
    ),
    st.sampled_from(["", "m", "n"]).map(
        lambda n: guest_pb2.GuestCall(mark=guest_pb2.GuestMark(name=n))
    ),
    st.sampled_from(["", "m", "never"]).map(
        lambda n: guest_pb2.GuestCall(
            diff=guest_pb2.GuestDiff(mark=n, max_files=20, max_bytes=400_000)
        )
    ),
    st.just(guest_pb2.GuestCall()),
    st.just(guest_pb2.GuestCall(job=guest_pb2.GuestJob(job=999))),
    st.just(guest_pb2.GuestCall(freeze_fs=guest_pb2.GuestFreeze())),
)


def essence(call: guest_pb2.GuestCall, reply: GuestReply) -> object:
    """What must agree: not times, not what a message says to people."""
    result = guest_pb2.GuestResult()
    result.CopyFrom(reply.result)
    for field in ("usage", "message"):
        result.ClearField(field)
    result.info.ClearField("mtime_ns")
    if result.info.kind != guest_pb2.GUEST_KIND_FILE:
        # A folder's size, and the mode of a link, are the file system's affair.
        result.info.ClearField("mode")
        result.info.ClearField("size")
    if result.status != guest_pb2.GUEST_STATUS_OK:
        return result, {}  # what was sent before the error is nobody's
    if call.HasField("diff"):
        diff = environments_pb2.WorkspaceDiff.FromString(reply.data.get(0, b""))
        return (
            result,
            sorted(file.SerializeToString() for file in diff.written),
            sorted(diff.deleted),
        )
    return result, {channel: data for channel, data in reply.data.items() if data}


def test_the_agents_cannot_be_told_apart(tmp_path: Path) -> None:
    with guests.running(guests.AGENTS, tmp_path) as run:

        @settings(max_examples=150)
        @given(st.lists(calls, max_size=12))
        def check(script: list[guest_pb2.GuestCall | tuple[guest_pb2.GuestCall, bytes]]) -> None:
            async def compare(made: dict[str, guests.Guest]) -> None:
                with tempfile.TemporaryDirectory() as base:
                    roots = {agent: f"{base}/{agent}" for agent in made}
                    for root in roots.values():
                        os.mkdir(root)  # noqa: PTH102 - no loop to block
                    for step in script:
                        call, data = step if isinstance(step, tuple) else (step, None)
                        replies = []
                        for agent, guest in made.items():
                            call.cwd = roots[agent]
                            request = GuestRequest(operation=call, data=data, deadline_s=60)
                            replies.append(essence(call, await guest.channel.call(request)))
                        assert replies[0] == replies[1], call

            run(compare)

        check()
