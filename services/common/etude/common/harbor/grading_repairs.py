"""Repairs of grading: files, variables and protected paths that keep a verdict the verifier's own.

An agent may leave more in its workspace than a solution: settings and plugins of the test runner,
changed tests, caches, code that ends the test process. Every grade is in a fresh sandbox without
the agent; the repairs here are for what comes with its change. All are on. Benches and tests switch
single ones off, to prove that an attack scores without them.
"""

import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from etude.common.harbor.task import HarborTask

GUARD_FOLDER = ".etude"
"""Folder of the guard below /tests."""
_GUARD = "etude_session_guard"

_START_UP = (
    "abc,argparse,array,ast,base64,bdb,binascii,bisect,bz2,calendar,codecs,collections,contextlib,"
    "copy,copyreg,csv,dataclasses,datetime,decimal,difflib,dis,email,encodings,enum,fcntl,fnmatch,"
    "functools,genericpath,gettext,glob,hashlib,heapq,hmac,html,importlib,inspect,io,ipaddress,"
    "json,keyword,linecache,locale,logging,lzma,math,ntpath,numbers,opcode,operator,os,pathlib,"
    "platform,posixpath,pprint,pyexpat,quopri,random,re,reprlib,secrets,select,selectors,shlex,"
    "shutil,signal,site,socket,stat,string,struct,subprocess,tempfile,textwrap,threading,token,"
    "tokenize,traceback,types,typing,unicodedata,urllib,uuid,warnings,weakref,xml,zipfile,"
    "zipimport,zlib,iniconfig,packaging,pygments,exceptiongroup,tomli,attr,py,six"
)
"""Modules that pytest imports before its guard counts: it takes them from the workspace's root
where that comes first in the path of modules, as with `python -m pytest`."""
RUNNER_PATHS = (
    "**/conftest.py",
    "**/{pytest.ini,.pytest.ini,pytest.toml,.pytest.toml,tox.ini,noxfile.py}",
    "**/{setup.cfg,pyproject.toml,package.json}",
    "**/{sitecustomize.*,usercustomize.*,*.pth}",
    "**/{sitecustomize,usercustomize}/**",
    "**/*.{egg-info,dist-info}/**",
    "**/{jest.config.*,vitest.config.*,.mocharc*,babel.config.*}",
    "{pytest,_pytest,unittest,pluggy}.*",
    "{pytest,_pytest,unittest,pluggy}/**",
    f"{{{_START_UP}}}.py",
    f"{{{_START_UP}}}.*so",
    f"{{{_START_UP}}}/__init__.py",
)
"""Settings, plugins and stand-ins of test runners."""
TEST_PATHS = (
    "**/{test_*.py,*_test.py,*_test.go,*.test.*,*.spec.*}",
    "**/{tests,test,__tests__,__snapshots__,testdata}/**",
)
"""Tests that the workspace holds, with their data."""
CACHE_PATHS = ("**/__pycache__/**", "**/*.{pyc,pyo}")
"""Compiled code, which would be run in place of its source."""
_MAKE = re.compile(rb"(?:^|[\s;&|(])make\s", re.MULTILINE)
_STARTED_PATHS = (
    (_MAKE, "{Makefile,makefile,GNUmakefile}"),
    (_MAKE, "**/*.{mk,mak}"),
    (re.compile(rb"\bsetup\.py\b|\bpip3?\s+install\b"), "setup.py"),
)
"""Files of the workspace that a verifier starts, by the text that starts them."""

PINS: Mapping[str, str] = MappingProxyType(
    {
        "PYTHONNOUSERSITE": "1",
        "PYTHONBREAKPOINT": "0",
        "PYTHONSTARTUP": "",
        "PYTEST_PLUGINS": "",
        "LD_PRELOAD": "",
        "LD_AUDIT": "",
        "BASH_ENV": "",
        "ENV": "",
        "NODE_OPTIONS": "",
        "PERL5OPT": "",
        "RUBYOPT": "",
        "PIP_NO_USER_CONFIG": "1",
    }
)
"""Variables by which a program runs other code than its own."""
_ISOLATED = "-c /dev/null --confcutdir=/tests --rootdir=/tests"
_RUNS_HIDDEN = re.compile(rb"\bpytest\b[^\n;&|]*\s/tests(?:[/\s\"']|$)|\bcd /tests\b")
_OWN_SETTINGS = re.compile(rb"\s(?:-c|--config-file|--rootdir|--confcutdir)[\s=]")
_OWN_PATH = re.compile(
    rb"\bPYTHONPATH=(?![^\s;&|]*\$\{?PYTHONPATH)|[\"']PYTHONPATH[\"']|\bpython[0-9.]*\s+-[a-zA-Z]*[IE]"
)
"""A path of Python's modules without the entries that it had, or none from the environment."""
_SET_PATH = re.compile(r"\bPYTHONPATH=(?![^\s;&|]*\$\{?PYTHONPATH)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingRepairs:
    """Repairs that are on."""

    runner_paths: bool = True
    test_paths: bool = True
    cache_paths: bool = True
    pins: bool = True
    session_guard: bool = True


ALL_REPAIRS = GradingRepairs()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedGrading:
    """Additions to a grading job."""

    files: Mapping[str, bytes]
    """The hidden tests, and what the platform adds to them."""
    environment: Mapping[str, str]
    protected: tuple[str, ...]
    allowed: tuple[str, ...]


def repair_grading(
    task: HarborTask, tests: Mapping[str, bytes], repairs: GradingRepairs = ALL_REPAIRS
) -> RepairedGrading:
    """The hidden tests of a task with the repairs that apply to it."""
    scripts = _scripts(task, tests)
    guard = _guard(scripts, tests) if repairs.session_guard else {}
    environment = dict(PINS) if repairs.pins else {}
    options = _pytest_options(task, scripts, tests) if repairs.pins else ""
    if guard:
        environment["PYTHONPATH"] = f"/tests/{GUARD_FOLDER}"
        options += f" -p {_GUARD}"
    if options:
        environment["PYTEST_ADDOPTS"] = options.strip()
    if repairs.pins and task.pytest_plugins is not None:
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return RepairedGrading(
        files={**tests, **guard},
        environment=environment,
        protected=_protected(task, scripts, repairs),
        allowed=task.allowed,
    )


def keep_module_path(command: str) -> str:
    """A shell command whose own PYTHONPATH comes after the entries of its environment.

    The guard of pytest is in one of them.
    """
    return _SET_PATH.sub("PYTHONPATH=$PYTHONPATH:", command)


def _protected(task: HarborTask, scripts: bytes, repairs: GradingRepairs) -> tuple[str, ...]:
    found = list[str]()
    if repairs.runner_paths:
        found += [*RUNNER_PATHS, *task.protected]
        found += [path for text, path in _STARTED_PATHS if text.search(scripts)]
    found += TEST_PATHS if repairs.test_paths else ()
    found += CACHE_PATHS if repairs.cache_paths else ()
    return tuple(found)


def _scripts(task: HarborTask, tests: Mapping[str, bytes]) -> bytes:
    """Text of what the verifier runs first."""
    return b"\n".join([task.command.encode(), tests.get("test.sh", b"")])


def _guard(scripts: bytes, tests: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """The guard, unless the verifier has no pytest or could not load it."""
    has_pytest = any(b"pytest" in data for path, data in tests.items() if _is_program(path))
    # A grader may read its command from JSON.
    commands = [scripts, *(data for path, data in tests.items() if path.endswith((".sh", ".json")))]
    has_own_path = any(_OWN_PATH.search(each) for each in commands)
    if has_own_path or not (has_pytest or b"pytest" in scripts):
        return {}
    source = importlib.resources.files(__package__).joinpath("session_guard.py").read_bytes()
    return {f"{GUARD_FOLDER}/{_GUARD}.py": source}


def _is_program(path: str) -> bool:
    return path.endswith((".py", ".sh", ".json"))


def _pytest_options(task: HarborTask, scripts: bytes, tests: Mapping[str, bytes]) -> str:
    options = "-p no:cacheprovider"
    own = {"pytest.ini", "pytest.toml", "pyproject.toml", "setup.cfg", "tox.ini"}.isdisjoint(tests)
    if own and _RUNS_HIDDEN.search(scripts) and not _OWN_SETTINGS.search(scripts):
        options += f" {_ISOLATED}"
    for plugin in task.pytest_plugins or ():
        options += f" -p {plugin}"
    return options
