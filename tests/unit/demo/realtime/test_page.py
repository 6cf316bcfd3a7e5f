"""The page of a demo shows promises, curves and decisions, and escapes what it shows."""

from pathlib import Path

from tests.unit.demo.realtime.test_second_act import ASK, BREAK, WORK, close_window

from etude.common.blobs import open_store
from etude.common.feedback.windows import create_window
from etude.demo.realtime.figures import PromiseCheck, RoundTruth
from etude.demo.realtime.page import chart_hacks, chart_rounds, write_page
from etude.demo.realtime.second_act import HackRates, SecondAct
from etude.demo.realtime.summary import PlayedActs
from etude.feedback.release.records import ReleaseRecord, create_release
from etude.feedback.release.state import ReleaseState

ACT = SecondAct(
    before=HackRates(0.04, 0.03),
    fired=HackRates(0.12, 0.1),
    peak=HackRates(0.25, 0.4),
    after=HackRates(0.02, 0.05),
    fired_at_window=2,
    frozen=1,
    num_requests=5_000,
    num_failed=0,
    num_retried=0,
    checks=(PromiseCheck("P7", "questions <win>", is_held=True),),
)


def decide(number: int, action: str, sentence: str) -> ReleaseRecord:
    return ReleaseRecord(
        number=number,
        action=action,
        sentence=sentence,
        evidence="a" * 64,
        decided_ms=1_000 + 1_500 * number,
        state=ReleaseState(),
    )


def test_the_page_shows_the_promises_and_decisions_of_the_acts_that_were_played(
    tmp_path: Path,
) -> None:
    store = open_store((tmp_path / "act-2" / "run").as_uri())
    create_release(store, decide(1, "Promote", "1.0 promoted"))
    create_release(store, decide(2, "Freeze", "frozen: <script>"))
    create_window(store, close_window(WORK, ASK))
    create_window(store, close_window(WORK, BREAK, number=2))

    page = write_page(tmp_path, PlayedActs(second=ACT), 300.0).read_text("utf-8")

    shown = ["4% → 25% → 2%", "3% → 40% → 5%", "1.5 s", "frozen: &lt;script&gt;", "a" * 12]
    assert [text for text in [*shown, "questions &lt;win&gt;", "act 2"] if text not in page] == []
    assert "Decisions of act 1" not in page
    assert (tmp_path / "hacks-2.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.glob("*.png")] == ["hacks-2.png"]


def test_curves_are_those_of_the_windows_and_rounds(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    create_window(store, close_window(WORK, WORK))
    create_window(store, close_window(WORK, ASK, number=2))
    questions, broken = chart_hacks("hacks", "Do hacks win?", store).curves
    assert (questions.x, questions.y, broken.y) == ((1, 2), (0.0, 0.5), (0.0, 0.0))

    kept, complaints = chart_rounds([RoundTruth(0.7, 0.5), RoundTruth(0.8, 0.3)]).curves
    assert (kept.x, kept.y, complaints.y) == ((1, 2), (0.7, 0.8), (0.5, 0.3))
