"""Files that a verifier's fresh workspace gets: the first files with the agent's artefacts."""

from collections.abc import Sequence
from typing import NamedTuple

from etude.envserver.host.grading.protected_paths import path_matcher, restore_protected
from etude.envserver.host.workspace_sources import WorkspaceSource
from etude.envserver.storage import trees
from etude.envserver.storage.trees import Tree
from etude.v1 import environments_pb2


class GradedFiles(NamedTuple):
    """Files to write into a fresh workspace, and files of its image to delete from it."""

    written: Tree
    deleted: Sequence[str]


def graded_files(source: WorkspaceSource, job: environments_pb2.GradeJob) -> GradedFiles:
    """The agent's changes on the first files, but for those of protected paths.

    Raises:
        InvalidFieldError: a path or a pattern is invalid.
    """
    changed = trees.apply_diff(source.first, job.diff, job.artefacts)
    protected, allowed = job.protected_paths, job.allowed_paths
    result = restore_protected(source.first, changed, protected, allowed)
    if source.base is None:
        return GradedFiles(result, ())
    is_protected = path_matcher(protected, "protected_paths")
    is_allowed = path_matcher(allowed, "allowed_paths")
    deleted = [
        path
        for path in trees.allowed_deletions(job.diff, job.artefacts)
        if path not in result
        and (path in source.first or not is_protected(path) or is_allowed(path))
    ]
    # What the image has is there already.
    written = {
        path: file
        for path, file in result.items()
        if path in source.tree or source.first.get(path) != file
    }
    return GradedFiles(written, deleted)
