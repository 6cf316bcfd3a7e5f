"""The stacks that SIGUSR1 shows."""

import subprocess
import sys

PROGRAM = """
import asyncio, os, signal
from etude.common.process import shutdown_signals

async def waits_for_ever():
    await asyncio.Event().wait()

async def main():
    with shutdown_signals(asyncio.Event()):
        task = asyncio.create_task(waits_for_ever(), name="patient")
        await asyncio.sleep(0)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.sleep(0.1)
        task.cancel()

asyncio.run(main())
print("went on")
"""


def test_threads_and_tasks_are_shown_each_time_and_the_process_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "went on\n"
    assert done.stderr.count("Current thread") == 2
    assert done.stderr.count("in waits_for_ever") == 2
    assert "patient" in done.stderr


SERVER = """
import asyncio, os, signal
import grpc
from etude.common.process import shutdown_signals

async def main():
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with shutdown_signals(asyncio.Event()):
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.1)
    await server.stop(None)

asyncio.run(main())
"""


def test_the_tasks_of_a_server_are_shown_though_their_frames_have_no_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=60, check=True
    )
    assert "in main" in done.stderr
    assert "_server_main_loop" in done.stderr
    assert "Error" not in done.stderr
