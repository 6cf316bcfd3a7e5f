"""A chat template that hangs, or does not work, is refused by a process of its own."""

import json
from pathlib import Path

import pytest

from etude.agent.chat import CHAT_TEMPLATE
from etude.agent.chat.trial import check_chat_format
from etude.common.errors import UserError

MODEL = Path(__file__).parent / "model"
NUMBERS = "range(99999)"
ENDLESS = f"{{% for a in {NUMBERS} %}}{{% for b in {NUMBERS} %}}{{% endfor %}}{{% endfor %}}"


def copy_model(folder: Path, template: str) -> Path:
    (folder / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_template_that_works_is_accepted() -> None:
    check_chat_format(MODEL)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (ENDLESS, "took more than 1 s of CPU"),
        (f"{{% if tools %}}{ENDLESS}{{% endif %}}{CHAT_TEMPLATE}", "took more than 1 s of CPU"),
        (
            CHAT_TEMPLATE.replace(
                "{%- for call in",
                f"{{% if message.tool_calls %}}{ENDLESS}{{% endif %}}{{%- for call in",
            ),
            "took more than 1 s of CPU",
        ),
        (f"{{{{ ('x' * {1 << 31}) ~ ('y' * {1 << 31}) }}}}", "GiB of memory|MemoryError"),
        (
            "{% for m in messages %}<|user|>{{ m.content | upper }}<|end|>{% endfor %}",
            "not the text",
        ),
        ("{% for m in messages %}{{ m.no.such }}{% endfor %}", "UndefinedError"),
    ],
    ids=["endless", "endless with tools", "endless with calls", "large", "changes texts", "raises"],
)
def test_a_template_that_does_not_work_is_refused_with_its_file(
    tmp_path: Path, template: str, what: str
) -> None:
    with pytest.raises(UserError, match=rf"chat_template.jinja(.|\n)*({what})(.|\n)*fix:"):
        check_chat_format(copy_model(tmp_path, template), cpu_s=1)


def test_a_folder_without_a_tokenizer_is_refused_by_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer.json .*missing"):
        check_chat_format(tmp_path)
