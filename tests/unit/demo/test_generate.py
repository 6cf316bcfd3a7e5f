"""The generator: complete folders, equal for equal seeds, readable by those who need them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.chat_tokens import encode_opening
from tokenizers import Tokenizer

from etude.agent.chat import ChatFormat
from etude.agent.toolsets import toolset
from etude.common.harbor import task
from etude.demo import generate, tokenizer
from etude.demo.generate import Sizes

SMALL = Sizes(train=6, held_out=4, traces=400, repositories=5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "demo"
    generate.generate(folder, seed=0, sizes=SMALL)
    return folder


def _content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_equal_seeds_give_equal_bytes_also_in_another_process(made: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from etude.demo.generate import Sizes, generate;"
        "generate(Path(sys.argv[1]), seed=0,"
        " sizes=Sizes(train=6, held_out=4, traces=400, repositories=5))"
    )
    other = tmp_path / "other"
    subprocess.run([sys.executable, "-c", code, str(other)], check=True, timeout=120)
    assert _content(other) == _content(made)


def test_another_seed_gives_other_tasks(made: Path, tmp_path: Path) -> None:
    generate.generate(tmp_path / "other", seed=1, sizes=SMALL)
    one, other = (
        {task.digest() for task in map(task.read_task, task.task_folders(folder))}
        for folder in (made / "tasks/train", tmp_path / "other/tasks/train")
    )
    assert not one & other


def test_a_folder_that_holds_something_is_not_touched(made: Path) -> None:
    with pytest.raises(Exception, match="is not empty"):
        generate.generate(made, seed=0, sizes=SMALL)


@pytest.mark.parametrize("wrong", [("--train", "0"), ("--held-out", "-1"), ("--traces", "70000")])
def test_a_wrong_size_is_refused_before_anything_is_written(
    wrong: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--out", str(tmp_path / "x"), *wrong]) == 2
    assert not (tmp_path / "x").exists()
    said = capsys.readouterr().err
    assert wrong[0] in said
    assert "fix:" in said


def test_a_folder_in_use_is_a_conflict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert generate.main(["--out", str(tmp_path)]) == 8
    assert "is not empty" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert generate.main(["--out", str(file)]) == 1
    said = capsys.readouterr().err
    assert str(file) in said
    assert "fix:" in said


def test_every_task_folder_is_valid_harbor_and_all_are_different(made: Path) -> None:
    folders = [
        *task.task_folders(made / "tasks/train"),
        *task.task_folders(made / "tasks/held-out"),
    ]
    tasks = [task.read_task(folder) for folder in folders]
    assert len({task.digest() for task in tasks}) == len(tasks) == 10
    assert all(not task.unknown_keys for task in tasks)
    assert all(task.command == "python3 /tests/verify.py" for task in tasks)
    assert set(tasks[0].tests()) == {"test.sh", "verify.py", "cases.json"}


def test_facts_say_what_was_made(made: Path) -> None:
    facts = json.loads((made / "facts.json").read_text())
    assert (facts["seed"], facts["train"], facts["held_out"], facts["traces"]) == (0, 6, 4, 400)
    assert 0.35 < facts["demonstrators_success"] < 0.6
    # The recipe's transcripts: 144 tokens, 95 % under 210, none above 303.
    assert 138 < facts["transcript_tokens_mean"] < 158
    assert facts["transcript_tokens_max"] < 350
    lines = (made / "data/traces.jsonl").read_text().splitlines()
    assert len(lines) == 400
    assert set(json.loads(lines[0])) == {"messages"}
    plain = (made / "data/repositories.jsonl").read_text().splitlines()
    assert [set(json.loads(line)) for line in plain] == [{"text"}] * 5


def test_the_tokenizer_has_its_size_its_tags_and_loses_nothing(made: Path) -> None:
    found = Tokenizer.from_file(str(made / "model/tokenizer.json"))
    assert found.get_vocab_size(with_added_tokens=True) == 1024
    for position, token in enumerate(tokenizer.SPECIAL_TOKENS):
        assert found.encode(token).ids == [position]
    for text in ("return a // 2\n\n\tif x:\r\n", "naïve → ключ 🙂", "\x00\x7f", "  two  blanks "):
        assert found.decode(found.encode(text).ids, skip_special_tokens=False) == text


def test_the_tags_are_those_of_the_compact_toolset() -> None:
    tools = toolset("Compact").tools
    assert set(tokenizer.TOOLS) == set(tools)
    fields = {name for tool in tools.values() for name in tool.model_fields}
    assert set(tokenizer.PARAMETERS) == fields
    assert len(tokenizer.SPECIAL_TOKENS) == 22


def test_the_first_prompt_has_forty_five_tokens_and_transcripts_round_trip(made: Path) -> None:
    chat = ChatFormat.load(made / "model")
    opening = encode_opening(chat, toolset("Compact").system_prompt, "Fix add_price.")
    assert len(opening) == 45
    rows = (made / "data/traces.jsonl").read_text().splitlines()
    for row in rows[:50]:
        messages = json.loads(row)["messages"]
        supervised = chat.encode_messages(messages)
        for message in messages:
            parts = [message["content"]] if isinstance(message["content"], str) else []
            for part in parts or message["content"]:
                assert part in chat.decode(supervised.token_ids)


def test_generating_needs_no_tensor_library(tmp_path: Path) -> None:
    code = (
        "import sys; from etude.demo import generate;"
        "from etude.envserver.tasks import show, verify;"
        "heavy = {'torch', 'vllm', 'ray', 'transformers'} & set(sys.modules);"
        "sys.exit(' '.join(heavy) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
