"""The agent's own protobuf codec against Google's: 10,000 messages both ways."""

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from tests.support import needs

from etude.v1 import environments_pb2, guest_pb2

SOURCES = Path(__file__).parents[3] / "services" / "envserver" / "guest"
MESSAGES: dict[str, type[Message]] = {
    kind.DESCRIPTOR.name: kind
    for kind in (
        *(guest_pb2.GuestHello, guest_pb2.GuestResetAck, guest_pb2.GuestSync),
        *(guest_pb2.GuestSyncAck, guest_pb2.GuestCall, guest_pb2.GuestResult),
        *(guest_pb2.GuestEntries, guest_pb2.GuestPaths, guest_pb2.GuestMatches),
        *(guest_pb2.GuestDigests, guest_pb2.GuestEvent, environments_pb2.WorkspaceDiff),
    )
}
NUM_MESSAGES = 10_000
TEXTS = ["", "a", "é", "\0", "日本語", "x" * 200, "\U0010ffff"]


SCALARS: dict[int, Callable[[random.Random], object]] = {
    FieldDescriptor.TYPE_STRING: lambda r: r.choice(TEXTS),
    FieldDescriptor.TYPE_BYTES: lambda r: r.randbytes(r.choice([0, 1, 16, 300])),
    FieldDescriptor.TYPE_BOOL: lambda r: r.random() < 0.5,
    FieldDescriptor.TYPE_ENUM: lambda r: r.randrange(13),
    FieldDescriptor.TYPE_UINT32: lambda r: r.choice([0, 1, 127, 128, 2**31, 2**32 - 1]),
    FieldDescriptor.TYPE_INT64: lambda r: r.choice([0, 1, -1, 2**63 - 1, -(2**63)]),
    FieldDescriptor.TYPE_UINT64: lambda r: r.choice([0, 1, 2**35, 2**64 - 1]),
    FieldDescriptor.TYPE_FIXED64: lambda r: r.choice([0, 1, 2**35, 2**64 - 1]),
}


OF_HOSTS = {"accesses", "accesses_incomplete"}
"""Fields of a change that a host adds to what an agent answers."""


def fill(message: Message, random_: random.Random) -> None:
    for field in message.DESCRIPTOR.fields:
        if random_.random() < 0.4 or field.name in OF_HOSTS:
            continue
        if field.is_repeated:
            fill_many(getattr(message, field.name), field, random_)
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            inner.SetInParent()
            fill(inner, random_)
        else:
            setattr(message, field.name, SCALARS[field.type](random_))


def fill_many(values: Any, field: Any, random_: random.Random) -> None:
    for _ in range(random_.randrange(4)):
        if field.message_type is None:
            values.append(SCALARS[field.type](random_))
        elif field.message_type.GetOptions().map_entry:
            values[random_.choice(TEXTS)] = random_.choice(TEXTS)
        else:
            fill(values.add(), random_)


def made(name: str, random_: random.Random) -> Message:
    message = MESSAGES[name]()
    fill(message, random_)
    return message


def through_go(lines: list[str], folder: Path) -> list[str]:
    """What the agent's codec writes after it has read each message."""
    corpus = folder / "corpus"
    corpus.write_text("".join(f"{line}\n" for line in lines))
    done = subprocess.run(
        ("go", "test", "-count=1", "-run", "TestMessagesOfAnotherEncoder", "."),
        cwd=SOURCES,
        env={**os.environ, "GUEST_CORPUS": str(corpus), "CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "corpus.out").read_text().splitlines()


needs_go = pytest.mark.skipif(
    shutil.which("go") is None and not needs.is_required("guest", "qemu"),
    reason="there is no go on PATH to test the agent's codec with",
)


@needs_go
def test_10_000_messages_survive_the_way_through_the_agents_codec(tmp_path: Path) -> None:
    random_ = random.Random(0)
    names = random_.choices(list(MESSAGES), k=NUM_MESSAGES)
    sent = [made(name, random_) for name in names]
    lines = [f"{n} {m.SerializeToString().hex()}" for n, m in zip(names, sent, strict=True)]
    back = through_go(lines, tmp_path)
    assert len(back) == NUM_MESSAGES
    for name, message, text in zip(names, sent, back, strict=True):
        assert MESSAGES[name].FromString(bytes.fromhex(text)) == message


@needs_go
def test_what_one_codec_refuses_the_other_does_not_take_for_something_else(tmp_path: Path) -> None:
    random_ = random.Random(1)
    names, broken = [], []
    for name in random_.choices(list(MESSAGES), k=3000):
        data = bytearray(made(name, random_).SerializeToString())
        for _ in range(random_.randrange(1, 4)):
            if data:
                data[random_.randrange(len(data))] = random_.randrange(256)
        names.append(name)
        broken.append(bytes(data[: random_.randrange(len(data) + 1)]))
    lines = [f"{n} {data.hex()}" for n, data in zip(names, broken, strict=True)]
    both = 0
    for name, cut, text in zip(names, broken, through_go(lines, tmp_path), strict=True):
        try:
            theirs = MESSAGES[name].FromString(cut)
        except DecodeError:
            # What Google refuses may be in a field that the agent skips unread.
            continue
        if text != "refused":
            ours = MESSAGES[name].FromString(bytes.fromhex(text))
            theirs.DiscardUnknownFields()
            for field in OF_HOSTS & {each.name for each in theirs.DESCRIPTOR.fields}:
                theirs.ClearField(field)
            both += 1
            assert ours == theirs, cut.hex()
    assert both > 500


def test_every_message_of_the_wire_is_known_to_the_agents_tests() -> None:
    source = (SOURCES / "messages_test.go").read_text()
    assert [name for name in MESSAGES if f'"{name}":' not in source] == []
