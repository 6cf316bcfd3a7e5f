"""A delta's stream against streams made by hand and a reader written apart from it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.vm import qemu_streams

from etude.envserver.drivers.vm.dirty_pages import GuestPages
from etude.envserver.drivers.vm.errors import FormatError
from etude.envserver.drivers.vm.qemu.stream_splicing import parse, splice

PAGE_BYTES = qemu_streams.PAGE_BYTES
BEFORE = qemu_streams.devices(timer=b"then", apic=b"x" * 40)
AFTER = qemu_streams.devices(timer=b"now!", apic=b"y" * 40, rtc=b"z")
FIRMWARE = {0x1000: b"F" * PAGE_BYTES}
TEMPLATE = qemu_streams.template_stream(firmware=FIRMWARE, devices=BEFORE)
STATE = qemu_streams.device_state(AFTER)


def pages(contents: dict[int, bytes]) -> GuestPages:
    joined = b"".join(contents[number] for number in sorted(contents))
    return GuestPages(numbers=tuple(sorted(contents)), content=memoryview(joined))


def page(seed: int) -> bytes:
    return random.Random(seed).randbytes(PAGE_BYTES)


@given(st.dictionaries(st.integers(0, 255), st.integers(0, 1 << 30).map(page), max_size=20))
def test_a_delta_restores_the_changed_pages_and_the_vms_own_devices(
    changed: dict[int, bytes],
) -> None:
    stream = b"".join(splice(parse(TEMPLATE), STATE, pages(changed)))
    found = qemu_streams.restored(stream)
    assert found.memory == {number * PAGE_BYTES: content for number, content in changed.items()}
    assert found.firmware == FIRMWARE
    assert found.devices == AFTER + b"\0"


def test_without_changed_pages_and_with_the_same_devices_a_delta_is_the_template() -> None:
    state = qemu_streams.device_state(BEFORE)
    assert b"".join(splice(parse(TEMPLATE), state, pages({}))) == TEMPLATE


def test_a_page_outside_of_the_memory_is_refused() -> None:
    with pytest.raises(FormatError, match="page 256 lies outside"):
        list(splice(parse(TEMPLATE), STATE, pages({256: bytes(PAGE_BYTES)})))


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (b"", "begin"),
        (STATE[:-1] + b"\1", "no end"),
        (STATE.replace(b"timer", b"timex"), "begin"),
        (STATE.replace(b"\x04\0\0\0\x07", b"\x04\0\0\0\x09"), "not once"),
    ],
    ids=["empty", "cut off", "another first device", "another number"],
)
def test_a_device_state_of_another_form_is_refused(state: bytes, what: str) -> None:
    with pytest.raises(FormatError, match=what):
        list(splice(parse(TEMPLATE), state, pages({})))


def test_a_template_in_which_the_devices_could_begin_twice_is_refused() -> None:
    twice = qemu_streams.template_stream(devices=BEFORE + BEFORE)
    with pytest.raises(FormatError, match="not once"):
        list(splice(parse(twice), STATE, pages({})))


@given(st.integers(0, len(TEMPLATE) - 1 - len(BEFORE)), st.integers(1, 255))
def test_a_template_with_any_other_byte_before_its_devices_is_refused_or_harmless(
    position: int, change: int
) -> None:
    garbled = bytearray(TEMPLATE)
    garbled[position] ^= change
    try:
        parsed = parse(bytes(garbled))
    except FormatError:
        return
    # What is left are numbers that QEMU checks itself: sizes, addresses, the section's number.
    assert parsed.memory_bytes > 0
    assert 0 < parsed.setup_end <= len(garbled)


@given(st.integers(0, parse(TEMPLATE).setup_end - 1))
def test_a_template_cut_off_before_its_pages_is_refused(length: int) -> None:
    with pytest.raises(FormatError):
        parse(TEMPLATE[:length])


@given(st.binary(max_size=300))
def test_bytes_that_are_no_template_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse(data)


def test_a_template_with_an_unknown_block_of_memory_is_refused() -> None:
    with pytest.raises(FormatError, match="vga"):
        parse(qemu_streams.template_stream(blocks={b"vga.vram": 0x1000}))


def test_as_many_bytes_as_pages_are_demanded() -> None:
    with pytest.raises(ValueError, match="1 pages"):
        GuestPages(numbers=(1,), content=memoryview(b"short"))
