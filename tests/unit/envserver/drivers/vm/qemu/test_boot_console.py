"""A template's console, which its guest may flood."""

import asyncio

from etude.envserver.drivers.vm.qemu.boot import KEPT_BYTES, BootConsole


async def said(console: BootConsole, end: str) -> None:
    while not console.tail().endswith(end):  # noqa: ASYNC110 - there is nothing to wait for
        await asyncio.sleep(0)


async def test_the_end_of_what_was_written_is_kept_and_no_more() -> None:
    console = BootConsole()
    console.theirs.settimeout(0)
    loop = asyncio.get_running_loop()
    for _ in range(64):
        await loop.sock_sendall(console.theirs, b"x" * 8192)
    await loop.sock_sendall(console.theirs, b"\xffKernel panic")
    await said(console, "panic")
    assert len(console.tail()) == KEPT_BYTES
    console.close()
    console.close()


async def test_a_monitor_that_ends_leaves_its_last_words() -> None:
    console = BootConsole()
    console.theirs.send(b"bye")
    console.theirs.close()
    await said(console, "bye")
    console.close()
