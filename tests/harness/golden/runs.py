"""Turns that run commands, in the foreground and in the background."""

from collections.abc import Iterator

from tests.harness.golden.calls import Need, Turn, step

_PATIENCE_S = 600


def run(command: str, *needs: Need, **more: object) -> Turn:
    """A turn of one command."""
    return (step("run_terminal", *needs, command=command, **more),)


def io(job: int, op: str, **more: object) -> Turn:
    """A turn of one question about a job."""
    return (step("terminal_io", job=job, op=op, **more),)


def commands() -> Iterator[Turn]:
    """Exit codes, both streams, encodings, caps, limits."""
    for command in (
        "echo hello",
        "echo out; echo err >&2; echo out again; exit 3",
        "true",
        "printf 'no newline'",
        "printf '\\n\\n  kept, but for the last ends\\n\\n'",
        "printf 'caf\\351 \\303\\251 \\342\\202\\254\\n'",
        "cat shell/words.txt | sort | head -n 2",
        "sh shell/run.sh a 'b c'; ./shell/run.sh",
        "kill -9 $$",
        "sh -c 'kill -15 $$'; echo $?",
        "seq 1 20000",
        "i=0; while [ $i -lt 40000 ]; do printf '€'; i=$((i+1)); done",
        'echo "$CI $HOME $PAGER $TERM $USER $LANG"',
        "read line; echo \"read: $? '$line'\"",
        "sleep 300 & echo started",
        "cat > shell/heredoc.txt <<'END'\n$HOME stays\nEND\ncat shell/heredoc.txt",
        "mkdir -p shell/made && printf x > shell/made/x && chmod +x shell/made/x && ls shell/made",
    ):
        yield run(command)
    yield run("echo begun; exec sleep 300", timeout=2)
    yield run("trap 'echo asked; exit 7' TERM; echo begun; while :; do :; done", timeout=2)
    yield run("pwd; ls /workspace | head -n 3", Need.WALL)
    yield run("no-such-command", Need.GNU)
    yield run("cat none.txt; ls none", Need.GNU)
    yield run("head -c 9000000 /dev/zero > shell/big; wc -c < shell/big")
    yield (
        step("read_file", Need.SHELL, path="shell/big"),
        step("read_file", Need.SHELL, path="shell/heredoc.txt"),
        step("run_terminal", command="echo two; rm shell/big"),
        step("run_terminal", command="echo three; ls shell"),
        step("glob", Need.SHELL, pattern="shell/**"),
    )
    yield run("ln -s ../README.md shell/link; ln -s /etc shell/etc; mkdir -p shell/empty")
    yield (
        step("read_file", Need.SHELL, path="shell/link"),
        step("list_dir", Need.SHELL, path="shell"),
        step("list_dir", Need.SHELL, path="shell/etc"),
        step("write_file", Need.SHELL, path="shell/etc/x", content="x"),
        step("list_dir", Need.SHELL, path="shell/empty"),
        step("search_replace", Need.SHELL, path="shell/run.sh", old_string="ran", new_string="RAN"),
        step("run_terminal", command="./shell/run.sh; rm shell/link shell/etc"),
    )


def checks() -> Iterator[Turn]:
    """What the sandbox's own checkers say of an edit."""
    yield (step("write_file", Need.SHELL, path="shell/broken.sh", content="if true; then\n"),)
    yield (step("read_lints", Need.SHELL, Need.GNU, paths=["shell/broken.sh", "shop/cli.py"]),)


def background() -> Iterator[Turn]:
    """Jobs: talked to, waited for, ended, and asked about wrongly."""
    yield run("echo one; echo two >&2; exit 4", is_background=True)
    yield io(1, "await", timeout=_PATIENCE_S)
    yield io(1, "read", offset=4)
    yield io(1, "read", offset=9)
    yield run('while read line; do echo "got $line"; done; echo end', is_background=True)
    yield (*io(2, "read"), *io(2, "stdin", input="first"), *io(2, "stdin", input="ünï\n€"))
    yield io(2, "stdin", end_input=True)
    yield io(2, "await", timeout=_PATIENCE_S)
    yield io(2, "stdin", input="late")
    yield run("exec sleep 300", is_background=True)
    yield (*io(3, "read"), *io(3, "await", timeout=1), *io(3, "kill"), *io(3, "kill"))
    yield run("echo up > shell/flag; exec sleep 300", is_background=True, timeout=2)
    yield io(4, "await", timeout=_PATIENCE_S)
    yield (step("read_file", Need.JOBS, path="shell/flag"), *io(4, "stdin", input="x"))
    yield run("seq 1 30000; printf '€€€ no end'", is_background=True)
    yield io(5, "await", timeout=_PATIENCE_S)
    yield io(5, "read", offset=150_000)
    yield io(5, "read", offset=999_999)
    yield (*io(6, "read"), *io(9, "kill"), *io(5, "stdin"))
    yield io(5, "stdin", input="x" * 5000)
    many = tuple(run("exec sleep 300", is_background=True)[0] for _ in range(9))
    yield many
    yield tuple(io(job, "kill")[0] for job in range(6, 14))
