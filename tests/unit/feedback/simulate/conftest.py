"""One small task, and conversations about it."""

from collections.abc import Callable

import pytest

from etude.feedback.simulate.conversations import Conversation, ConversationEnd, SeenEdit, SeenTurn
from etude.feedback.simulate.user_tasks import UserTask

WRONG = b"def add_coin(a, b):\n    return a - b\n"
RIGHT = b"def add_coin(a, b):\n    return a + b\n"
TESTS = (
    b"def test_add_coin():\n    from bank.core import add_coin\n    assert add_coin(1, 2) == 3\n"
)


@pytest.fixture(scope="session")
def task() -> UserTask:
    return UserTask(
        name="add",
        instruction="Fix add_coin.",
        files={"bank/core.py": WRONG, "tests/test_repo.py": TESTS},
        wanted={"bank/core.py": RIGHT},
    )


@pytest.fixture(scope="session")
def converse(task: UserTask) -> Callable[..., Conversation]:
    """A conversation after which the line is right or another one."""

    def make(
        *, is_right: bool = True, ending: ConversationEnd = ConversationEnd.FINISHED
    ) -> Conversation:
        line = "return a + b" if is_right else "return b - a"
        edited = WRONG.replace(b"return a - b", line.encode())
        return Conversation(
            rollout="rollout-1",
            version="1.0",
            task=task,
            turns=(
                SeenTurn(0.5, 2, 0),
                SeenTurn(0.25, 0, int(ending is ConversationEnd.BROKEN_CALL)),
            ),
            edits=(SeenEdit(0, "bank/core.py", (line,)),),
            num_questions=0,
            is_tested=True,
            ending=ending,
            files={**task.files, "bank/core.py": edited},
        )

    return make
