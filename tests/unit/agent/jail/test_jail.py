"""What a linter can do in its jail: a shell stands in for it."""

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator

import pytest

from etude.agent.jail.client import JailedProgram
from etude.common.errors import UnavailableError

Run = Callable[[str], str]
_LANDLOCK = 444


def has_landlock() -> bool:
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(_LANDLOCK, None, ctypes.c_size_t(0), 1) >= 1)


@pytest.fixture
def run() -> Iterator[Run]:
    made: list[JailedProgram] = []

    def shell(script: str) -> str:
        jailed = JailedProgram(("/bin/sh", "-c", f"exec 2>&1; {script}"))
        made.append(jailed)
        output = jailed.run("name", b"")
        assert output is not None
        return output.decode()

    yield shell
    for each in made:
        each.close()


def test_it_gets_the_content_and_the_name() -> None:
    jailed = JailedProgram(("/bin/sh", "-c", 'printf "%s|" "$0"; cat'))
    assert jailed.run("é", b"\0content") == "--stdin-filename=é|".encode() + b"\0content"
    assert jailed.run("b", b"") == b"--stdin-filename=b|"
    jailed.close()


@pytest.mark.skipif(not has_landlock(), reason="this kernel has no Landlock")
def test_it_opens_nothing_of_the_host(run: Run) -> None:
    assert "Permission denied" in run("cat /etc/passwd")
    assert "Permission denied" in run("ls /")
    assert "Permission denied" in run("cat /proc/self/environ")
    assert "Permission denied" in run(f"cat {__file__}")


def test_it_writes_nothing(run: Run) -> None:
    for place in ("/tmp/x", "/dev/shm/x", "x"):
        assert not run(f"echo x > {place} && echo written").endswith("written\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_it_is_nobodys_user_and_cannot_become_another(run: Run) -> None:
    assert run("id -u; id -G") == "65531\n65531\n"
    assert "setpriv" in run("setpriv --reuid 0 id -u")


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip")
def test_it_has_no_network(run: Run) -> None:
    assert "lo" in (links := run("ip -o link"))
    assert links.count("\n") <= 1


def test_it_sees_no_environment(run: Run) -> None:
    assert sorted(line.partition("=")[0] for line in run("env").splitlines()) == [
        "PWD",
        "RAYON_NUM_THREADS",
    ]


def test_one_that_says_too_much_is_ended() -> None:
    flooding = JailedProgram(("/bin/sh", "-c", "exec cat /usr/bin/* /usr/bin/*"))
    assert flooding.run("a", b"") is None
    flooding.close()


def test_one_that_does_not_read_does_no_harm() -> None:
    jailed = JailedProgram(("/bin/sh", "-c", "echo done"))
    assert jailed.run("a", bytes(1 << 20)) == b"done\n"
    assert jailed.run("a", bytes(1 << 20)) == b"done\n"
    jailed.close()


def test_a_jail_that_died_is_made_again() -> None:
    jailed = JailedProgram(("/bin/sh", "-c", "cat"))
    assert jailed.run("a", b"one") == b"one"
    process = jailed._process
    assert process is not None
    process.kill()
    process.wait()
    assert jailed.run("a", b"two") == b"two"
    jailed.close()


def test_a_linter_that_is_not_there_is_the_platforms_fault() -> None:
    with pytest.raises(UnavailableError, match="jail"):
        JailedProgram(("/no/such/linter",)).run("a", b"")
