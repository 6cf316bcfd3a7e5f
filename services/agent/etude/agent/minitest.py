"""A test runner small and fast enough to run after every edit of a rollout.

It gives real pytest's verdict (exit code and failed tests) for repositories of test functions,
`Test…` classes and `unittest.TestCase`s, started like `python -m pytest` with the root importable.
Not covered: fixtures, `conftest.py`, parametrisation, plugins, tests that hang (the caller ends
them). Standard library only, so that a sandbox can run this file by itself.
"""
# mypy: disable-error-code=explicit-override
# typing.override came with Python 3.12, and its backport is no part of the standard library.

import contextlib
import functools
import importlib
import importlib.machinery
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import AsyncGeneratorType, CodeType, CoroutineType, GeneratorType, ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object

PASSED, FAILED, INTERRUPTED, NO_TESTS = 0, 1, 2, 5
"""Exit codes, equal to pytest's."""

_NOT_SEARCHED = {"build", "dist", "node_modules", "venv", "CVS", "_darcs", "__pycache__"}
_CODE_CACHE = 8_192

_one_at_a_time = threading.Lock()
"""Modules and standard output belong to the whole process."""


class Verdict(NamedTuple):
    """What a terminal would show, and the exit code."""

    output: str
    exit_code: int


class _Test(NamedTuple):
    name: str
    call: Callable[[], object]


def run(files: Mapping[str, bytes]) -> Verdict:
    """Run the tests among the files (path relative to the root -> content) in this process.

    The process is left as it was: the files' modules are forgotten and the output is captured.
    Whatever is no `Exception` and no `SystemExit` leaves this function, a caller's timer included.
    """
    with _one_at_a_time, _Importer(files) as importer:
        silence = io.StringIO()
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            return _run(importer)


def main(root: Path) -> int:
    """Run the tests of a folder, print the verdict and return pytest's exit code."""
    try:
        verdict = run(_Folder(root))
    except KeyboardInterrupt:
        verdict = Verdict("interrupted\n", INTERRUPTED)
    sys.stdout.write(verdict.output)
    sys.stdout.flush()
    return verdict.exit_code


def _run(importer: "_Importer") -> Verdict:
    tests: list[_Test] = []
    errors = []
    for path in sorted(filter(_is_test_file, importer.paths), key=lambda p: p.split("/")):
        try:
            tests += _tests_of(importer.load(path))
        except (Exception, SystemExit):  # noqa: BLE001 - the code under test may raise anything
            errors.append(path)
    if errors:
        return _verdict("ERROR", errors, "error", INTERRUPTED)
    failed = [test.name for test in tests if not _passes(test)]
    if failed:
        return _verdict("FAILED", failed, "failed", FAILED)
    if not tests:
        return Verdict("no tests ran\n", NO_TESTS)
    return Verdict(f"{len(tests)} passed\n", PASSED)


def _verdict(word: str, names: Sequence[str], total: str, exit_code: int) -> Verdict:
    plural = "s" if total == "error" and len(names) > 1 else ""
    lines = [f"{word} {name}" for name in names]
    return Verdict("\n".join([*lines, f"{len(names)} {total}{plural}"]) + "\n", exit_code)


def _is_test_file(path: str) -> bool:
    *folders, name = path.split("/")
    if any(f.startswith(".") or f in _NOT_SEARCHED or f.endswith(".egg") for f in folders):
        return False
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def _tests_of(module: ModuleType) -> Iterator[_Test]:
    for name, value in list(vars(module).items()):
        if getattr(value, "__test__", True) is False:
            continue
        if isinstance(value, type):
            yield from _tests_of_class(name, value)
        elif name.startswith("test") and callable(value):
            yield _Test(name, value)


def _tests_of_class(class_name: str, cls: type) -> Iterator[_Test]:
    unittest = sys.modules.get("unittest")
    is_case = unittest is not None and issubclass(cls, unittest.TestCase)
    has_init = any("__init__" in vars(base) for base in cls.__mro__[:-1])
    is_plain = class_name.startswith("Test") and not has_init
    if not is_case and not is_plain:
        return
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    for name in names:
        if name.startswith("test") and callable(getattr(cls, name)):
            call = cls(name).debug if is_case else functools.partial(_call_method, cls, name)
            yield _Test(f"{class_name}::{name}", call)


def _call_method(cls: type, name: str) -> object:
    result: object = getattr(cls(), name)()
    return result


def _passes(test: _Test) -> bool:
    try:
        result = test.call()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the code under test may raise anything
        return type(error).__name__ == "SkipTest"
    if isinstance(result, CoroutineType):
        result.close()
        return False
    return not isinstance(result, GeneratorType | AsyncGeneratorType)


class _Importer(Loader):
    """Imports modules out of the files while the block lasts, as pytest's "prepend" mode would.

    A loader without its base class where it runs: `importlib.abc` and `inspect` take more than
    half of the start of this program, which runs after every edit.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.paths = frozenset(files)
        self._files = files
        self._folders = {p[:i] for p in self.paths for i, c in enumerate(p) if c == "/"}
        self._roots = [""]
        self._hidden: dict[str, ModuleType] = {}
        self._loaded: list[str] = []

    def __enter__(self) -> "_Importer":
        own = {path.partition("/")[0].removesuffix(".py") for path in self.paths}
        self._hide(own)
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        for name in self._loaded:
            sys.modules.pop(name, None)
        sys.modules.update(self._hidden)

    def load(self, path: str) -> ModuleType:
        """Import one test file under the name that pytest gives it.

        Raises:
            ImportError: another test file has the same module name.
        """
        folder, _, file = path.rpartition("/")
        name = file.removesuffix(".py")
        while f"{folder}/__init__.py".lstrip("/") in self.paths and folder:
            folder, _, package = folder.rpartition("/")
            name = f"{package}.{name}"
        root = f"{folder}/" if folder else ""
        if root not in self._roots:
            self._hide(
                {p[len(root) :].split("/")[0].removesuffix(".py") for p in self._under(root)}
            )
            self._roots.insert(0, root)
        module = importlib.import_module(name)
        if module.__file__ != path:
            raise ImportError(f"{path} and {module.__file__} are both module {name}")
        return module

    def _under(self, root: str) -> Iterator[str]:
        return (path for path in self.paths if path.startswith(root))

    def _hide(self, names: set[str]) -> None:
        """Take modules of the same name out of sight, so that the files' own are imported."""
        # Looking at every module would write to its reference count, and so copy, in a fork of a
        # warm interpreter, two pages of memory for each.
        for name in [n for n in names if n in sys.modules and n not in sys.stdlib_module_names]:
            for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                if loaded not in self._loaded:
                    self._hidden[loaded] = sys.modules.pop(loaded)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        tail = fullname.replace(".", "/")
        for root in self._roots:
            base = root + tail
            if f"{base}/__init__.py" in self.paths:
                return self._spec(fullname, f"{base}/__init__.py", folder=base)
            if f"{base}.py" in self.paths:
                return self._spec(fullname, f"{base}.py")
        for root in self._roots:
            if root + tail in self._folders:
                return self._spec(fullname, None, folder=root + tail)
        return None

    def _spec(
        self, name: str, path: str | None, *, folder: str | None = None
    ) -> importlib.machinery.ModuleSpec:
        spec = importlib.machinery.ModuleSpec(name, self, origin=path, is_package=bool(folder))
        spec.has_location = path is not None
        if folder is not None:
            spec.submodule_search_locations = [folder]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave it to the import system."""

    def exec_module(self, module: ModuleType) -> None:
        self._loaded.append(module.__name__)
        spec = module.__spec__
        if spec is not None and spec.has_location and spec.origin is not None:
            code = _compiled(self._files[spec.origin], spec.origin)
            exec(code, vars(module))  # noqa: S102 - running the code under test is the purpose


@functools.lru_cache(maxsize=_CODE_CACHE)
def _compiled(source: bytes, path: str) -> CodeType:
    code: CodeType = compile(source, path, "exec", dont_inherit=True)
    return code


class _Folder(Mapping[str, bytes]):
    """The Python files below a folder, read when they are imported."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._paths: dict[str, None] = {}
        for parent, folders, names in os.walk(root):
            folders[:] = sorted(f for f in folders if not f.startswith("."))
            prefix = os.path.relpath(parent, root) + "/"
            for name in names:
                if name.endswith(".py"):
                    self._paths[(prefix + name).removeprefix("./")] = None

    def __getitem__(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


if __name__ == "__main__":
    sys.exit(main(Path.cwd()))
