"""Mutations, requests and the journal of mined tasks."""

import ast
import asyncio
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.errors import UserError
from etude.envserver.tasks.mining import mutations, requests
from etude.envserver.tasks.mining.journal import NAME, JournalLine, open_journal
from etude.envserver.tasks.mining.languages import PYTHON
from etude.envserver.tasks.mining.miner import run_in_order
from etude.envserver.tasks.mining.mutations import Mutation

_SOURCES = tuple(Path(mutations.__file__).parent.glob("*.py"))
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SHOP = textwrap.dedent(
    '''\
    class Cart:
        def total(self, prices, limit=10):
            """Sum of the prices up to a limit. Later ones do not count."""
            sum = 0
            for price in prices:
                if price < 0 and limit:
                    raise ValueError(price)
                sum += price
            return min(sum, limit)


    def short(x):
        return x
    '''
)


def _list_all(path: str, source: bytes) -> list[Mutation]:
    return [each for found in mutations.list_mutations(path, source, PYTHON) for each in found]


@pytest.mark.parametrize("path", _SOURCES, ids=lambda path: path.name)
def test_a_mutation_keeps_the_syntax_and_changes_one_line_range(path: Path) -> None:
    source = path.read_bytes()
    for mutation in _list_all(path.name, source)[::7]:
        broken = mutation.apply(source)
        assert broken != source
        tree = ast.parse(broken)
        name = mutation.function.name.rpartition(".")[2]
        named = [n for n in ast.walk(tree) if isinstance(n, _FUNCTIONS) and n.name == name]
        first = source[: mutation.start].count(b"\n") + 1
        assert any(n.lineno <= first <= (n.end_lineno or 0) for n in named)
        assert broken[: mutation.start] == source[: mutation.start]
        assert broken.endswith(source[mutation.end :])


def test_each_kind_of_mutation_is_found_in_the_function_and_not_in_its_documentation() -> None:
    found = _list_all("shop.py", _SHOP.encode())
    assert {each.function.name for each in found} == {"Cart.total"}
    changes = {(each.kind, each.replacement) for each in found}
    assert changes >= {
        ("Body", "raise NotImplementedError"),
        ("Operator", "<="),
        ("Operator", "or"),
        ("Operator", "-="),
        ("Condition", "not (price < 0 and limit)"),
        ("Integer", "1"),
        ("Statement", "return None"),
    }
    assert all("Sum of the prices" in each.apply(_SHOP.encode()).decode() for each in found)


def test_a_change_of_one_function_leaves_the_choices_of_the_others() -> None:
    other = "def late(x):\n    if x:\n        x = x + 1\n    return x\n"
    alone, beside = (
        mutations.choose_mutations(
            mutations.list_mutations("a.py", text.encode(), PYTHON), seed=3, per_function=2
        )
        for text in (_SHOP, _SHOP + other)
    )
    assert [each for each in beside if each[0].function.name != "late"] == alone


def test_further_mutations_come_behind_those_that_are_tried_at_first() -> None:
    found = mutations.list_mutations("a.py", _SHOP.encode(), PYTHON)
    first, more = (
        mutations.choose_mutations(found, seed=3, per_function=2, num_more=num_more)
        for num_more in (0, 8)
    )
    for few, many in zip(first, more, strict=True):
        assert many[: len(few)] == few
        assert len({each.key for each in many}) == len(many) <= len(few) + 8
    assert sum(map(len, more)) > sum(map(len, first))


@given(
    documentation=st.text(max_size=600),
    errors=st.dictionaries(st.sampled_from(["AssertionError", "KeyError"]), st.integers(1, 9)),
    hidden=st.lists(
        st.text(st.characters(codec="ascii", categories=["L"]), min_size=5), max_size=3
    ),
    seed=st.integers(0, 99),
)
def test_a_request_is_short_and_holds_nothing_hidden(
    documentation: str, errors: dict[str, int], hidden: list[str], seed: int
) -> None:
    mutation = _list_all("shop.py", _SHOP.encode())[seed % 7]
    function = mutations.MinedFunction(
        path="shop.py", name="Cart.total", line=2, documentation=documentation
    )
    changed = Mutation(
        function=function, kind=mutation.kind, start=0, end=1, replacement=mutation.replacement
    )
    text = requests.write_request(changed, errors, hidden, seed=seed)
    assert 0 < len(text) <= requests.MAX_CHARACTERS
    assert text == _LAST or not [secret for secret in hidden if secret in text]


_LAST = "Something in shop.py does not work any more. Please repair it."


def test_a_documentation_is_summarised_by_its_first_sentence_without_markup() -> None:
    text = "Reverse of :meth:`.dumps`. Raises an error.\n\nMore."
    assert requests.summarise_documentation(text) == "Reverse of dumps."


@pytest.mark.parametrize("cut", [1, 2, 20, 40])
def test_a_journal_goes_on_after_a_line_that_was_cut_off(tmp_path: Path, cut: int) -> None:
    with open_journal(tmp_path, {"seed": "1"}) as journal:
        journal.append(JournalLine(stable_tests=("a", "b"), suite_s=2.5))
        before = (tmp_path / NAME).read_bytes()
        journal.append(JournalLine(mutation="a.py:1-2:Body", task_id="shop-1"))
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(whole[: max(len(before), len(whole) - cut)])
    with open_journal(tmp_path, {"seed": "1"}) as again:
        assert (again.stable_tests, again.suite_s, again.num_tasks) == (("a", "b"), 2.5, 0)
        again.append(JournalLine(mutation="a.py:1-2:Body", task_id="shop-1"))
    assert (tmp_path / NAME).read_bytes() == whole


def _open(folder: Path, seed: str) -> None:
    with open_journal(folder, {"seed": seed}):
        pass


def test_a_journal_in_use_or_of_other_settings_or_damaged_is_refused(tmp_path: Path) -> None:
    with (
        open_journal(tmp_path, {"seed": "1"}),
        pytest.raises(UserError, match="in use"),
    ):
        _open(tmp_path, "1")
    with pytest.raises(UserError, match="another seed"):
        _open(tmp_path, "2")
    with (tmp_path / NAME).open("ab") as file:
        file.write(b"{}x\n")
    with pytest.raises(UserError, match="damaged"):
        _open(tmp_path, "1")


@given(delays=st.lists(st.integers(0, 3), max_size=8), jobs=st.integers(1, 4))
def test_results_come_in_order_and_no_more_work_is_under_way_than_allowed(
    delays: list[int], jobs: int
) -> None:
    running, most = 0, 0

    async def work(item: tuple[int, int]) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(item[1]):
            await asyncio.sleep(0)
        running -= 1
        return item[0]

    async def collect() -> list[int]:
        return [found async for found in run_in_order(list(enumerate(delays)), work, jobs)]

    assert asyncio.run(collect()) == list(range(len(delays)))
    assert most <= jobs
