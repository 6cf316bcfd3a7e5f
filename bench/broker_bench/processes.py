"""Processes of brokers: free ports and CPU time."""

import time
from socket import socket


def process_cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, from its clock: clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
