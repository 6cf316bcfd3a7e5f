"""Extensions: objects that installed packages add to what manifests may name, by entry points.

A package registers one in its pyproject.toml, under a name with a prefix of its own:

    [project.entry-points."etude.reward_functions"]
    "acme.Coverage" = "acme_rewards.coverage:COVERAGE"

A name without a dot is Etude's own and never looked for here, so that no package can replace it.
"""

from importlib import metadata
from typing import TypeVar

from etude.common.errors import Problem, UserError

NAME = r"[a-z][a-z0-9_-]*\.[A-Z][A-Za-z0-9]*"
"""Form of a name: the package's prefix in lower case, a dot, the name in capitals and letters."""
REWARD_FUNCTIONS = "etude.reward_functions"
TOOLSETS = "etude.toolsets"
MCP_SERVERS = "etude.mcp_servers"
TASK_FORMATS = "etude.task_formats"
CURRICULA = "etude.curricula"

T = TypeVar("T")


def is_extension(name: str) -> bool:
    """True if a name is of an installed package, not of Etude."""
    return "." in name


def is_installed(group: str, name: str) -> bool:
    """True if a package of this Python environment registers the name."""
    return bool(metadata.entry_points(group=group, name=name))


def load_extension(group: str, name: str, kind: type[T]) -> T:
    """Load what a package registers under a name.

    Raises:
        UserError: no package registers it, or more than one, or it cannot be imported, or it is no
            object of the kind.
    """
    entries = {entry.value: entry for entry in metadata.entry_points(group=group, name=name)}
    if not entries:
        fix = f'install the package that registers it in the group "{group}", in the image too'
        raise UserError(_problem("ExtensionNotInstalled", group, name, "is not installed", fix))
    if len(entries) > 1:
        what = f"is registered twice: {', '.join(sorted(entries))}"
        raise UserError(_problem("ExtensionAmbiguous", group, name, what, "uninstall one of them"))
    (entry,) = entries.values()
    try:
        found = entry.load()
    except Exception as cause:
        what = f"cannot be imported from {entry.value}: {type(cause).__name__}: {cause}"
        fix = f"mend the package: python -c 'import {entry.module}' shows where"
        raise UserError(_problem("ExtensionBroken", group, name, what, fix)) from cause
    if not isinstance(found, kind):
        what = f"is no {kind.__name__} but a {type(found).__name__}: {entry.value}"
        fix = f"register an object of {kind.__module__}.{kind.__qualname__}"
        raise UserError(_problem("ExtensionBroken", group, name, what, fix))
    return found


def _problem(reason: str, group: str, name: str, what: str, fix: str) -> Problem:
    return Problem(reason=reason, what=f"{name} {what}", where=group, fix=fix)
