"""Configuration of an image that commands in its environments go by: ENV, USER and WORKDIR.

Source: https://github.com/opencontainers/image-spec/blob/main/config.md
"""

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from etude.common.pinned_images import InvalidImageError
from etude.envserver.isolation.sandbox_layout import INSIDE_UID

MAX_VARIABLES, MAX_ENVIRONMENT_BYTES = 512, 64 << 10
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_SYSTEM = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp"}
)
_PARTLY_SYSTEM = frozenset({"usr", "var"})
"""A folder two levels below is an application's: /usr/src/app, /var/www/html."""
_APPLICATION_DEPTH = 3
_MAX_PASSWD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """Configuration of one image."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """ENV."""
    user: str = ""
    """USER: a name or a number, perhaps with a group behind a colon; empty for root."""
    working_folder: str = ""
    """WORKDIR without its first slash; empty for the root folder."""


def parse_config(found: Mapping[str, Any]) -> ImageConfig:
    """Parse the configuration of an image, which is not trusted.

    Raises:
        InvalidImageError: a part cannot be honoured; it is named.
    """
    user = found.get("User") or ""
    if not isinstance(user, str) or "\n" in user or "\0" in user:
        raise InvalidImageError("image", "its user is no name", "give the image a USER")
    return ImageConfig(
        environment=dict(_variables(found.get("Env") or [])),
        user=user,
        working_folder=_working_folder(found.get("WorkingDir") or "/"),
    )


def _variables(given: Sequence[object]) -> Iterator[tuple[str, str]]:
    """Variables of ENV.

    Raises:
        InvalidImageError: one is no pair, or all are too large.
    """
    fix = "correct ENV in the image"
    is_list = isinstance(given, list) and len(given) <= MAX_VARIABLES
    if not is_list or sum(len(str(each).encode()) for each in given) > MAX_ENVIRONMENT_BYTES:
        what = f"its ENV is no list of {MAX_VARIABLES} pairs or {MAX_ENVIRONMENT_BYTES >> 10} KiB"
        raise InvalidImageError("image", what, fix)
    for each in given:
        name, found, value = str(each).partition("=")
        if not found or "\0" in value or not _NAME.fullmatch(name):
            raise InvalidImageError("image", f"its ENV has {str(each)[:80]!r}", fix)
        yield name, value


def _working_folder(given: object) -> str:
    """The folder of the root whose content is the workspace; empty: none.

    Raises:
        InvalidImageError: the image's working folder belongs to the system.
    """
    if not isinstance(given, str) or "\0" in given:
        fix = "give the image a WORKDIR"
        raise InvalidImageError("image", "its working folder is no path", fix)
    folder = posixpath.normpath(f"/{given.lstrip('/')}")
    parts = folder.split("/")[1:]
    is_system = parts[0] in _SYSTEM or parts[:2] == ["var", "tmp"]
    if is_system or (parts[0] in _PARTLY_SYSTEM and len(parts) < _APPLICATION_DEPTH):
        fix = "give the image a WORKDIR of its own, such as /app"
        raise InvalidImageError(
            "image", f"its working folder {folder!r} belongs to the system", fix
        )
    return folder.lstrip("/")


class Account(NamedTuple):
    """A line of /etc/passwd."""

    name: str
    uid: int
    gid: int
    home: str


def adopt_user(tree: Path, user: str) -> Mapping[str, str]:
    """Make the image's USER the user of commands, whose number is the same in each environment.

    Its files belong to that number from here on. Root stays root: commands never get its rights.

    Args:
        tree: the unpacked root; links in it may lead anywhere.
        user: of the configuration.

    Returns:
        Variables that say who it is; none for root.

    Raises:
        InvalidImageError: the image has no such user.
    """
    wanted, _, _ = user.partition(":")
    passwd = tree / "etc/passwd"
    accounts = {} if passwd.parent.is_symlink() else _accounts(passwd)
    account = accounts.get(wanted) or next(
        (each for each in accounts.values() if str(each.uid) == wanted), None
    )
    if account is None and wanted.isdecimal() and len(wanted) < 10:
        account = Account("agent", int(wanted), int(wanted), "/tmp")  # noqa: S108 - the guest's
    if account is None and wanted not in {"", "root"}:
        fix = "add the user in the image, or leave USER out"
        raise InvalidImageError("image", f"its user {wanted[:80]!r} is not in /etc/passwd", fix)
    if account is None or account.uid == 0:
        return {}
    if account.uid != INSIDE_UID:
        _give_files(tree, account)
        _renumber(passwd, account)
    return {"HOME": account.home, "LOGNAME": account.name, "USER": account.name}


def _accounts(passwd: Path) -> Mapping[str, Account]:
    """The accounts of an image by name; none where the file is a link or is not one."""
    found = dict[str, Account]()
    for line in _lines(passwd):
        match line.split(":"):
            case [name, _, uid, gid, _, home, _] if uid.isdecimal() and gid.isdecimal():
                if name and home.startswith("/") and len(uid) < 10 and len(gid) < 10:
                    found.setdefault(name, Account(name, int(uid), int(gid), home))
            case _:
                continue
    return found


def _lines(passwd: Path) -> list[str]:
    try:
        descriptor = os.open(passwd, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_MAX_PASSWD_BYTES).decode(errors="replace").splitlines()


def _give_files(tree: Path, account: Account) -> None:
    """Give the files of an account, and of its group, to the user of commands."""
    for folder, names, files in os.walk(tree):
        for name in (*names, *files):
            path = os.path.join(folder, name)  # noqa: PTH118 - millions of them
            found = os.lstat(path)
            uid = INSIDE_UID if found.st_uid == account.uid else -1
            gid = INSIDE_UID if found.st_gid == account.gid else -1
            if uid != -1 or gid != -1:
                os.chown(path, uid, gid, follow_symlinks=False)


def _renumber(passwd: Path, account: Account) -> None:
    """Let the account have the number of the user of commands, and no other one."""
    lines = _lines(passwd)
    if not lines or passwd.parent.is_symlink():
        return
    found = []
    for line in lines:
        parts = line.split(":")
        if parts[0] == account.name and len(parts) > 3:
            parts[2:4] = [str(INSIDE_UID)] * 2
            found.append(":".join(parts))
        elif len(parts) < 3 or parts[2] != str(INSIDE_UID):
            found.append(line)
    passwd.write_text("\n".join(found) + "\n", encoding="utf-8")
