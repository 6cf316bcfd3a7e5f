"""Programs of generated files: their functions, called in this process."""

import builtins
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, SimpleNamespace
from typing import Any

RAISED = {"raised": True}
"""Answer of a call that raised, as the verifier has it."""


@dataclass(slots=True)
class Program:
    """Modules of one package by path, loaded when they are first needed.

    They are kept out of sys.modules: two programs of one package do not meet. Runs the files in
    this process: only for those that come from the generator's own table.
    """

    files: Mapping[str, str]
    _modules: dict[str, SimpleNamespace] = field(default_factory=dict)

    def answer(self, path: str, function: str, arguments: Sequence[object]) -> object:
        """Answer of a call as JSON gives it back, or RAISED."""
        given = json.loads(json.dumps(arguments))
        try:
            answer = getattr(self._module(path), function)(*given)
        except Exception:  # noqa: BLE001 - a half-changed program may raise anything
            return RAISED
        return json.loads(json.dumps(answer))

    def _module(self, path: str) -> SimpleNamespace:
        if path not in self._modules:
            names: dict[str, Any] = {
                "__name__": path.removesuffix(".py").replace("/", "."),
                "__builtins__": {**vars(builtins), "__import__": self._import},
            }
            exec(_compile(self.files[path]), names)  # noqa: S102 - the table's own text, see above
            self._modules[path] = SimpleNamespace(**names)
        return self._modules[path]

    def _import(
        self,
        name: str,
        scope: Mapping[str, object] | None = None,
        local: Mapping[str, object] | None = None,
        wanted: Sequence[str] = (),
        level: int = 0,
    ) -> object:
        paths = {each: f"{name}/{each}.py" for each in wanted or ()}
        if paths and all(path in self.files for path in paths.values()):
            return SimpleNamespace(**{each: self._module(path) for each, path in paths.items()})
        return __import__(name, scope, local, wanted, level)


@functools.lru_cache(maxsize=4_096)
def _compile(source: str) -> CodeType:
    return compile(source, "<generated>", "exec")
