"""URIs of models on a hub: hf://organisation/name@revision."""

import re
from typing import NamedTuple

from etude.common.errors import Problem, UserError

SCHEME = "hf://"
_NAME = r"[A-Za-z0-9][-A-Za-z0-9._]{0,95}"
# A revision is a branch, a tag or a commit; git itself allows no "..", space, ~, ^, :, ? and *.
PATTERN = rf"^hf://{_NAME}/{_NAME}(@[A-Za-z0-9][-A-Za-z0-9._/]{{0,254}})?$"
COMMIT = re.compile(r"[0-9a-f]{40}")


class HubUri(NamedTuple):
    """A repository of a hub at a revision."""

    repository: str
    """organisation/name."""
    revision: str
    """Branch, tag or commit."""

    @property
    def name(self) -> str:
        """Name without the organisation."""
        return self.repository.partition("/")[2]

    def text(self) -> str:
        """The URI again."""
        return f"{SCHEME}{self.repository}@{self.revision}"


def is_hub_uri(uri: str) -> bool:
    """Return true if the URI names a model on a hub."""
    return uri.startswith(SCHEME)


def parse_hub_uri(uri: str) -> HubUri:
    """The repository and revision of hf://organisation/name@revision; main without a revision.

    Raises:
        UserError: the URI has another form.
    """
    if not re.fullmatch(PATTERN, uri) or ".." in uri or "--" in uri.partition("@")[0]:
        fix = "use hf://organisation/name@revision, such as hf://Qwen/Qwen2.5-7B-Instruct@main"
        raise UserError(Problem("InvalidSpec", "names no model of a hub", uri, fix))
    repository, _, revision = uri.removeprefix(SCHEME).partition("@")
    return HubUri(repository, revision or "main")
