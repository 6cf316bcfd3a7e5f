"""The programs behind `etude tasks from-sessions` and `withdrawn`, and `etude agent replay`.

python -m etude.feedback.commands.sessions list|accept|withdrawn|turns --store URI --key-store URI …
"""

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from etude.agent.chat import ChatFormat
from etude.common.api.storage import StoreAccess
from etude.common.blobs import Store
from etude.common.errors import CorruptError, EtudeError, UserError
from etude.common.redact.redactor import Redactor
from etude.common.stores import open_source
from etude.feedback.ledger.reading import LedgerReader
from etude.feedback.ledger.user_keys import LedgerSecret, UserId
from etude.feedback.sessions import review as reviews
from etude.feedback.sessions import task_records
from etude.feedback.sessions.candidates import (
    CandidateOptions,
    SessionFinder,
    find_user_refusals,
    read_session,
)
from etude.feedback.sessions.review import SessionEntry
from etude.feedback.sessions.task_records import TaskRecord

_CODES = {"NotFound": 3, "Forbidden": 5, "Conflict": 8}
_INVALID = 4


def _list(given: argparse.Namespace) -> int:
    """Write a new review."""
    store, ledger = _open(given)
    options = CandidateOptions(tenant=given.tenant, terms=tuple(given.terms), limit=given.limit)
    chat = None if given.model is None else ChatFormat.load(given.model)
    found = SessionFinder(store, ledger, chat, options).find()
    reviews.write_review(given.review, found)
    refusals = [each.refusals for each in found.sessions]
    refusals += [each.refusals for each in found.refused]
    reasons = Counter(itertools.chain.from_iterable(refusals))
    counts = ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items()))
    sys.stdout.write(
        f"{len(found.sessions)} candidates, {len(found.refused)} other sessions in {given.review}"
        f"; reasons: {counts or 'none'}\n"
    )
    return 0


def _accept(given: argparse.Namespace) -> int:
    """Print each accepted entry that may become a task as a line of JSON, and record it."""
    store, ledger = _open(given)
    review = reviews.read_review(given.review)
    redactor = Redactor(ledger.secret.redaction_key(review.tenant))
    num_refused = 0
    for entry in review.sessions:
        if not entry.accepted:
            continue
        user = UserId(review.tenant, entry.user)
        reasons = find_user_refusals(ledger, user, entry.started_ms, review.terms)
        reasons += reviews.find_refusals(entry, redactor)
        if reasons:
            num_refused += 1
            sys.stderr.write(f"session {entry.session}: refused: {', '.join(reasons)}\n")
            continue
        task_id = ledger.secret.task_id(review.tenant, entry.session)
        terms = ledger.state.consents[user].policy_version
        record = TaskRecord(session=entry.session, started_ms=entry.started_ms, terms=terms)
        # Before the task is there: killed in between, an erasure looks for one too many.
        task_records.record_task(store, user, task_id, record)
        sys.stdout.write(_format_row(task_id, entry))
    return 1 if num_refused else 0


def _format_row(task_id: str, entry: SessionEntry) -> str:
    fields = {"request", "commit", "reference", "tests", "answer"}
    return json.dumps({"task_id": task_id, **entry.model_dump(include=fields)}) + "\n"


def _withdrawn(given: argparse.Namespace) -> int:
    """Print each task whose user was erased, or does not agree any more, with the reason."""
    store, ledger = _open(given)
    num_found = 0
    for task in task_records.list_tasks(store):
        try:
            record = task_records.read_record(store, task)
        except CorruptError as error:  # keeps no other task from being listed
            num_found += 1
            sys.stderr.write(f"{task.task_id} cannot be judged: {error}\n")
            continue
        for reason in find_user_refusals(ledger, task.user, record.started_ms, given.terms):
            num_found += 1
            sys.stdout.write(f"{task.task_id} {reason}\n")
    return 1 if num_found else 0


def _turns(given: argparse.Namespace) -> int:
    """Print each turn of a session as a line of JSON."""
    store, ledger = _open(given)
    for turn in read_session(store, ledger, given.tenant, given.session, given.terms):
        row = {
            "num_prefix_tokens": turn.num_prefix_tokens,
            "prompt_ids": [*turn.prompt_token_ids],
            "token_ids": [*turn.token_ids],
        }
        sys.stdout.write(json.dumps(row) + "\n")
    return 0


def _open(given: argparse.Namespace) -> tuple[Store, LedgerReader]:
    access = StoreAccess(endpoint=given.endpoint, region=given.region)
    store, key_store = open_source(given.store, access), open_source(given.key_store, access)
    secret = LedgerSecret.read(given.secret)
    return store, LedgerReader.open(store, key_store, secret, uid=given.ledger)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m etude.feedback.commands.sessions")
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list")
    listing.add_argument("--tenant", required=True)
    listing.add_argument("--model", type=Path, help="folder with the tokenizer")
    listing.add_argument("--limit", type=int, default=200)
    listing.set_defaults(run=_list)
    accepting = verbs.add_parser("accept")
    accepting.set_defaults(run=_accept)
    for verb in (listing, accepting):
        verb.add_argument("--review", type=Path, required=True)
    withdrawn = verbs.add_parser("withdrawn")
    withdrawn.set_defaults(run=_withdrawn)
    turns = verbs.add_parser("turns")
    turns.add_argument("--tenant", required=True)
    turns.add_argument("--session", required=True)
    turns.set_defaults(run=_turns)
    for verb in (listing, withdrawn, turns):
        verb.add_argument("--terms", action="append", required=True)
    for verb in (listing, accepting, withdrawn, turns):
        verb.add_argument("--store", required=True, help="URI of the ledger's folder or bucket")
        verb.add_argument("--key-store", required=True, help="URI of the users' keys")
        verb.add_argument("--secret", type=Path, required=True, help="64 hexadecimal digits")
        verb.add_argument("--ledger", default="feedback", help="name of the ledger")
        verb.add_argument("--endpoint")
        verb.add_argument("--region")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run one program; its exit code is 1 where something was refused or withdrawn."""
    given = _parser().parse_args(arguments)
    try:
        code: int = given.run(given)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return _CODES.get(error.problem.reason, _INVALID)
    except (EtudeError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
