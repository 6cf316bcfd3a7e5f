"""The program behind `etude feedback find-subject` and `etude feedback delete-subject`.

python -m etude.feedback.commands.subject --tenant NAME --user NAME --store URI --key-store URI
    --secret FILE [--url URL --key-file FILE]
"""

import argparse
import http.client
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from etude.common.api.storage import StoreAccess
from etude.common.errors import EtudeError, Problem, UserError
from etude.common.feedback.http_exchange import FeedbackHttp
from etude.common.stores import open_source
from etude.feedback.ledger.reading import LedgerReader
from etude.feedback.ledger.user_keys import LedgerSecret
from etude.feedback.subject_report import SubjectReport, report_subject

_INVALID = 4


def _erase(given: argparse.Namespace) -> None:
    """Order the erasure; safe to repeat.

    Raises:
        UserError: the service refuses it.
        OSError: no answer comes: repeat it.
    """
    try:
        service = FeedbackHttp(given.url, given.key_file.read_text("utf-8").strip(), given.ca_file)
    except ValueError as error:
        raise UserError(Problem("InvalidField", str(error), given.url, "give its URL")) from None
    body = json.dumps({"user": given.user}).encode()
    answer = service.post("/v1/erasures", "application/json", body)
    if answer.status != 200:
        what = f"answered {answer.status}: {answer.body[:500].decode(errors='replace')}"
        fix = "the key needs scope admin or users, of the user's tenant; after 503 repeat it"
        raise UserError(Problem("Refused", what, given.url, fix))


def write_report(report: SubjectReport) -> str:
    """Write a report for people."""
    times = f"erased {report.erasures} times" if report.erasures else "not erased"
    lines = [
        f"user {report.user.digest} of tenant {report.user.tenant}: {times}",
        f"events: {report.events}, of which {report.readable_events} can be read",
        f"recorded turns: {report.turns}, of which {report.readable_turns} can be read",
        f"rollouts: {len(report.rollouts)} = {report.trained.total()} in windows"
        f" + {report.waiting} waiting + {report.excluded} left out",
        f"stored rollouts: {report.stored_rollouts}",
        f"tasks: {', '.join(report.tasks) or 'none'}",
        f"windows: {', '.join(map(str, sorted(report.trained))) or 'none'}",
        f"checkpoints that may have seen the user: {len(report.checkpoints)}",
    ]
    for seen in report.checkpoints:
        numbers = ", ".join(map(str, seen.windows))
        lines.append(f"  {seen.prefix} of run {seen.run_uid}, version {seen.version}: {numbers}")
    if report.unencrypted_turns:
        lines.append(f"not reached: {report.unencrypted_turns} turns were recorded unencrypted")
    if report.remaining_keys:
        lines.append("not done: the old key is there until the feedback service starts again")
    elif report.erasures and report.stored_rollouts:
        lines.append("rollouts that were stored before an erasure go with the next pass of windows")
    lines += [f"damaged, and may have seen the user: {each}" for each in report.damaged]
    return "\n".join(lines) + "\n"


def _to_json(report: SubjectReport) -> str:
    values = {each.name: getattr(report, each.name) for each in fields(report)}
    values |= {"tenant": report.user.tenant, "user": report.user.digest}
    values |= {"rollouts": len(report.rollouts), "waiting": report.waiting}
    values["checkpoints"] = [each._asdict() for each in report.checkpoints]
    return json.dumps(values) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m etude.feedback.commands.subject")
    parser.add_argument("--tenant", required=True)
    parser.add_argument("--user", required=True)
    parser.add_argument("--store", required=True, help="URI of the ledger's folder or bucket")
    parser.add_argument("--key-store", required=True, help="URI of the users' keys")
    parser.add_argument("--secret", type=Path, required=True, help="64 hexadecimal digits")
    parser.add_argument("--ledger", default="feedback", help="name of the ledger")
    parser.add_argument("--run-store", action="append", help="of runs with checkpoints; --store")
    parser.add_argument("--url", help="erase the user first, at this feedback service")
    parser.add_argument("--key-file", type=Path, help="file with an API key, for --url")
    parser.add_argument("--ca-file", type=Path, help="certificates to trust, for --url")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--endpoint")
    parser.add_argument("--region")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Erase a user if told to, and print what is stored of the user."""
    given = _parser().parse_args(arguments)
    access = StoreAccess(endpoint=given.endpoint, region=given.region)
    try:
        secret = LedgerSecret.read(given.secret)
        if given.url:
            _erase(given)
        store, key_store = open_source(given.store, access), open_source(given.key_store, access)
        runs = [open_source(uri, access) for uri in given.run_store or [given.store]]
        ledger = LedgerReader.open(store, key_store, secret, uid=given.ledger)
        report = report_subject(ledger, secret.user_id(given.tenant, given.user), runs)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return _INVALID
    except (EtudeError, OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(_to_json(report) if given.json else write_report(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
