"""ENV, USER and WORKDIR of images, which are not trusted."""

import os
from pathlib import Path
from typing import Any

import pytest

from etude.common.pinned_images import InvalidImageError
from etude.envserver.images.pull.image_config import ImageConfig, adopt_user, parse_config
from etude.envserver.isolation.sandbox_layout import INSIDE_UID

PASSWD = "root:x:0:0:root:/root:/bin/sh\nmine:x:1000:1000::/home/mine:/bin/sh\n"


def test_a_configuration_is_read_as_docker_writes_it() -> None:
    found = parse_config(
        {"Env": ["PATH=/opt/bin:/bin", "EMPTY=", "A=b=c"], "User": "app", "WorkingDir": "/srv/x/"}
    )
    assert found.environment == {"PATH": "/opt/bin:/bin", "EMPTY": "", "A": "b=c"}
    assert (found.user, found.working_folder) == ("app", "srv/x")
    assert parse_config({}) == ImageConfig()
    assert parse_config({"Env": None, "User": None, "WorkingDir": ""}) == ImageConfig()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"Env": ["no pair"]}, "ENV"),
        ({"Env": ["1A=b"]}, "ENV"),
        ({"Env": ["A=b\0c"]}, "ENV"),
        ({"Env": "A=b"}, "ENV"),
        ({"Env": {"A": "b"}}, "ENV"),
        ({"Env": [f"A{n}=b" for n in range(600)]}, "ENV"),
        ({"Env": ["A=" + "b" * 70_000]}, "ENV"),
        ({"User": 7}, "user"),
        ({"User": "a\nroot:x:0:0"}, "user"),
        ({"WorkingDir": "/etc/app"}, "belongs to the system"),
        ({"WorkingDir": "/usr"}, "belongs to the system"),
        ({"WorkingDir": "/usr/src"}, "belongs to the system"),
        ({"WorkingDir": "/var/tmp/x"}, "belongs to the system"),
        ({"WorkingDir": "/app/../etc"}, "belongs to the system"),
        ({"WorkingDir": "/a\0b"}, "working folder"),
    ],
)
def test_a_configuration_that_cannot_be_honoured_is_refused(
    config: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidImageError, match=why):
        parse_config(config)


@pytest.mark.parametrize("folder", ["/app", "/usr/src/app", "/var/www/html", "/home/user/x"])
def test_an_application_may_work_where_images_put_one(folder: str) -> None:
    assert parse_config({"WorkingDir": folder}).working_folder == folder[1:]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(PASSWD + "app:x:2000:2000::/home/app:/bin/sh\n")
    (tmp_path / "home/app").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("user", ["", "root", "0", "root:root", "0:0"])
def test_root_gives_commands_no_rights(tree: Path, user: str) -> None:
    assert adopt_user(tree, user) == {}
    assert (tree / "etc/passwd").read_text().startswith(PASSWD)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("user", ["app", "2000", "app:staff"])
def test_a_user_becomes_the_one_that_runs_commands(tree: Path, user: str) -> None:
    os.chown(tree / "home/app", 2000, 2000)
    (tree / "leads").symlink_to("/etc/hostname")
    os.chown(tree / "leads", 2000, 2000, follow_symlinks=False)
    host = Path("/etc/hostname").stat()
    found = adopt_user(tree, user)
    assert found == {"HOME": "/home/app", "LOGNAME": "app", "USER": "app"}
    assert (tree / "home/app").stat().st_uid == INSIDE_UID
    assert (tree / "etc").stat().st_uid == os.geteuid()
    assert Path("/etc/hostname").stat() == host
    lines = (tree / "etc/passwd").read_text().splitlines()
    assert [line for line in lines if f":{INSIDE_UID}:" in line] == [
        f"app:x:{INSIDE_UID}:{INSIDE_UID}::/home/app:/bin/sh"
    ]


def test_a_user_without_an_entry_is_refused_by_name_and_taken_by_number(tree: Path) -> None:
    with pytest.raises(InvalidImageError, match="'nobody-here' is not in /etc/passwd"):
        adopt_user(tree, "nobody-here")
    assert adopt_user(tree, "4711")["USER"] == "agent"


def test_a_list_of_users_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").symlink_to("/etc/passwd")
    with pytest.raises(InvalidImageError, match="is not in /etc/passwd"):
        adopt_user(tmp_path, "daemon")
    before = Path("/etc/passwd").read_bytes()
    adopt_user(tmp_path, "4711")
    assert Path("/etc/passwd").read_bytes() == before


def test_a_folder_of_users_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir()
    (host / "passwd").write_text("app:x:2000:2000::/home/app:/bin/sh\n")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "etc").symlink_to(host)
    with pytest.raises(InvalidImageError):
        adopt_user(tree, "app")
    assert (host / "passwd").read_text() == "app:x:2000:2000::/home/app:/bin/sh\n"
