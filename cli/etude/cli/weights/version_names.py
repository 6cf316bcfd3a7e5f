"""Policy versions of a store by the text of a user, and copies of them."""

from pathlib import Path

from etude.cli.output import say
from etude.common.blobs import MissingError, Store
from etude.common.errors import Problem, UserError
from etude.common.weights import VersionId, accepted_chain, list_quarantined
from etude.common.weights.protocol.versions import list_all_published
from etude.common.weights.replicas.mirror import Mirror


def copy_version(store: Store, text: str, folder: Path) -> Mirror:
    """A copy of a version.

    Raises:
        UserError: the store has no such version, or misses a part of it.
    """
    version = find_version(store, text)
    mirror = Mirror(store, folder)
    try:
        mirror.move_to(version)
    except MissingError as error:
        if store.head(version.manifest_key) is None:
            raise UserError(missing_version(store, version)) from error
        raise UserError(_not_whole(version, error)) from error
    return mirror


def missing_version(store: Store, version: VersionId) -> Problem:
    """The problem of a version that is not in the store."""
    what = f"version {version} is not in the store"
    return Problem("NotFound", what, store.url, "etude weights ls shows what there is")


def _not_whole(version: VersionId, error: Exception) -> Problem:
    fix = "etude weights verify shows which versions are whole; take one, or restore this object"
    return Problem("NotFound", str(error), f"version {version}", fix)


def find_version(store: Store, text: str) -> VersionId:
    """The version that a user named; `newest` is the newest accepted one without quarantine.

    Raises:
        UserError: the text is not a version, or the store has none.
    """
    if text == "newest":
        return _newest(store)
    try:
        return VersionId.parse(text)
    except ValueError as error:
        raise UserError(Problem("Usage", str(error), "VERSION", "for example 1.37")) from error


def _newest(store: Store) -> VersionId:
    """The newest accepted version that is not quarantined.

    Raises:
        UserError: there is none.
    """
    chain, refused = accepted_chain(store), list_quarantined(store)
    if not chain:
        raise UserError(no_accepted_version(store, store.url))
    sound = [version for version in chain if version not in refused]
    if not sound:
        fix = "the run publishes again when it goes on; etude weights ls shows what there is"
        raise UserError(Problem("Quarantined", "every version is quarantined", store.url, fix))
    if sound[-1] != chain[-1]:
        say(f"newest is {sound[-1]}: what came after it is quarantined")
    return sound[-1]


def no_accepted_version(store: Store, run: str) -> Problem:
    """The problem of a store without an accepted version."""
    count = len(list_all_published(store))
    if not count:
        return no_versions(run)
    what = f"has {count} versions, but no epoch's record in weights/epochs/ says that they count"
    return Problem("Corrupt", what, run, "restore weights/epochs/ from a copy of the store")


def no_versions(run: str) -> Problem:
    """The problem of a run without any version."""
    return Problem(
        "NotFound",
        "has published no version yet",
        run,
        "versions come with the first step of reinforcement learning; etude watch shows it",
    )
