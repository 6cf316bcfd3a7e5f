"""Change that a user finally kept of a session, from its events; pure."""

from dataclasses import dataclass, field

from etude.common.feedback import payloads
from etude.common.feedback.events import AnyEvent
from etude.common.feedback.payloads import TaskOutcome
from etude.feedback.sessions.patches import FilePatch, split_patch

KINDS = frozenset({"demonstration", "edit_applied", "edit_observed", "task_closed"})
"""Events that tell it."""
_UNWANTED = frozenset({TaskOutcome.ABANDONED, TaskOutcome.REVERTED})


@dataclass(slots=True)
class SessionEvents:
    """Events of one session that tell what was kept."""

    demonstration: str = ""
    """Text that the user kept, the newest one."""
    edits: dict[str, payloads.EditAppliedPayload] = field(default_factory=dict)
    """The first of each name, in the order of the ledger."""
    alive: dict[str, int] = field(default_factory=dict)
    """Lines of an edit that the newest look found."""
    outcome: TaskOutcome | None = None

    def add(self, event: AnyEvent) -> None:
        """Add an event, in the order of the ledger."""
        match event.data.payload:
            case payloads.DemonstrationPayload() as kept:
                self.demonstration = kept.text
            case payloads.EditAppliedPayload() as edit:
                self.edits.setdefault(edit.edit, edit)
            case payloads.EditObservedPayload(is_file_seen=True) as look:
                self.alive[look.edit] = look.num_alive_lines
            case payloads.TaskClosedPayload() as end:
                self.outcome = end.outcome
            case _:  # a file that was not found
                pass

    def find_kept_change(self) -> list[FilePatch]:
        """The demonstration, if it is a patch; else the edits of which every line survived.

        Empty if there is none, or if the user abandoned or reverted the task.
        """
        if self.outcome in _UNWANTED:
            return []
        shown = [each for each in split_patch(self.demonstration) if each.path]
        if shown:
            return shown
        return [
            each
            for name, edit in self.edits.items()
            if edit.diff and self.alive.get(name, -1) >= edit.num_lines
            for each in split_patch(edit.diff)
            if each.path
        ]
