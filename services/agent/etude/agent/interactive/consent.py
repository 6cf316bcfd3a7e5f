"""A user's decision about feedback, stored on the user's machine and revocable."""

import contextlib
import json
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from etude.agent.interactive.demonstrations import DemonstrationJournal
from etude.agent.interactive.edits import EditJournal, observe_edits
from etude.common import atomic
from etude.common.errors import Problem, UserError
from etude.common.feedback.client import EventAuthor, EventClient, UserConsent
from etude.common.feedback.http_exchange import FeedbackHttp
from etude.common.feedback.spool import EventSpool

SOURCE = "etude-agent/0.1.0"
SHARED = """\
With your consent, the agent tells the feedback service of your tenant:
  - which of its edits and commands you accept or reject, and your next messages after a turn
  - hashes of the lines that it wrote, by a secret that stays on this machine, and how many of
    them are still there hours and days later
  - numbers of tests that passed or failed, of calls, and seconds
Text of your files is never sent, unless you add --demonstrations: then it also sends, a day after
the last edit of a session, what you keep of the edited files, as a patch.
The service redacts secrets and personal data, and encrypts the rest.
Take it back at any time: etude agent consent --revoke"""
"""Words that a user agrees to; the tenant's terms say the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConsent:
    """The decision, and where events go."""

    service: str
    """URL of the feedback service."""
    tenant: str
    user: str
    terms: str
    granted: bool
    decided: str
    """Time in RFC 3339."""
    demonstrations: bool = False
    """What the user keeps of edited files is sent, too."""


@dataclass(frozen=True, slots=True)
class AgentState:
    """Folder of the agent on a user's machine."""

    folder: Path

    @property
    def spool(self) -> EventSpool:
        """Events that wait."""
        return EventSpool(self.folder / "spool")

    @property
    def demonstrations(self) -> DemonstrationJournal:
        """Sessions whose files are compared a day later."""
        return DemonstrationJournal(self.folder / "demonstrations")

    @property
    def journal(self) -> EditJournal:
        """Edits that are looked at again."""
        return EditJournal(self.folder / "edits")

    def read_consent(self) -> StoredConsent | None:
        """Read the decision; None if there is none.

        Raises:
            UserError: the file is damaged.
        """
        file = self.folder / "consent.json"
        try:
            values = json.loads(file.read_bytes())
            # A word in place of a truth value would count as a consent.
            granted = {True: True, False: False}[values.pop("granted")]
            demonstrations = values.pop("demonstrations", False) is True
            texts = {name: str(value) for name, value in values.items()}
            return StoredConsent(**texts, granted=granted, demonstrations=demonstrations)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            fix = "decide again: etude agent consent"
            raise UserError(
                Problem("InvalidArgument", "holds no decision", str(file), fix)
            ) from error

    def store_consent(self, consent: StoredConsent) -> None:
        """Store a decision; what it no longer allows is forgotten."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = json.dumps(asdict(consent)).encode()
        atomic.write_bytes(self.folder / "consent.json", data, fsync=True, mode=0o600)
        if not (consent.granted and consent.demonstrations):
            self.demonstrations.clear()

    def read_secret(self) -> bytes:
        """The secret of line hashes; made once, whichever agent is the first."""
        file = self.folder / "secret"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            draft = self.folder / f"secret-{secrets.token_hex(8)}"
            atomic.write_bytes(draft, secrets.token_bytes(32), fsync=True, mode=0o600)
            with contextlib.suppress(FileExistsError):
                file.hardlink_to(draft)
            draft.unlink()
        return file.read_bytes()

    def open_client(self, key: str) -> EventClient | None:
        """Open the client of events; None without consent.

        Raises:
            UserError: the stored decision is damaged.
        """
        stored = self.read_consent()
        if stored is None or not stored.granted:
            return None
        return make_client(self, stored, key)

    def observe(self, client: EventClient) -> int:
        """Look at the files of earlier edits, and tell of it; returns the number of looks.

        Raises:
            OSError: the disk does not take events.
        """
        self.demonstrations.send_due(client)
        return observe_edits(self.journal, client, self.read_secret())

    def revoke(self, key: str, *, at: str) -> int:
        """Take the consent back; returns the number of events that were forgotten.

        Raises:
            UserError: there is no decision.
            OSError: the service could not be told; here, nothing is collected any more.
        """
        stored = self.read_consent()
        if stored is None:
            fix = "nothing is sent without a consent"
            raise UserError(Problem("NotFound", "holds no consent", str(self.folder), fix))
        # First here: whatever the service answers, nothing more is collected.
        self.store_consent(replace(stored, granted=False, decided=at))
        self.journal.clear()
        return make_client(self, stored, key).revoke()


def make_client(state: AgentState, consent: StoredConsent, key: str) -> EventClient:
    """Make the client of events.

    Raises:
        UserError: the address of the service cannot be used.
    """
    try:
        post = FeedbackHttp(consent.service, key).post
    except ValueError as error:
        where = f"feedback service {consent.service}"
        fix = "etude agent consent --feedback https://…"
        raise UserError(Problem("InvalidArgument", str(error), where, fix)) from error
    return EventClient(
        state.spool,
        post,
        EventAuthor(SOURCE, consent.tenant, consent.user),
        UserConsent(consent.granted, consent.terms, consent.decided),
    )
