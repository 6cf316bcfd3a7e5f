"""The demo's tokenizer: byte-level BPE of 1,024 tokens, trained on what the policy will read."""

import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 1024
"""512 makes transcripts a fifth longer, 2,048 no shorter, with a larger output head."""

NUM_TRANSCRIPTS = 1_500
TRANSCRIPT_WEIGHT = 2
SOURCE_BYTES = 300_000

PAD, END = "<|pad|>", "<|end|>"
TOOLS = ("read_file", "search_replace", "list_dir", "grep", "run_terminal")
PARAMETERS = ("path", "old_string", "new_string", "pattern", "command")
SPECIAL_TOKENS = (
    *(PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
    *("<tool_call>", "</tool_call>", "</function>", "</parameter>"),
    *("<tool_response>", "</tool_response>"),
    *(f"<function={name}>" for name in TOOLS),
    *(f"<parameter={name}>" for name in PARAMETERS),
)
"""Each is one id; their ids are their positions here."""

# A newline with its indentation, a word with its blank, a noun with its underscore, a digit.
_SPLIT = r"\n *| ?[A-Za-z]+|_[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+| +"
_TAG = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))

# General Python: the same words whatever the demo's grammar, in a fixed order.
_SOURCES = (
    *("textwrap.py", "heapq.py", "bisect.py", "shlex.py", "cmd.py", "sched.py", "queue.py"),
    *("fnmatch.py", "glob.py", "linecache.py", "string.py", "statistics.py", "fractions.py"),
    *("csv.py", "calendar.py", "difflib.py", "configparser.py", "argparse.py"),
)


def train(transcripts: Iterable[str]) -> Tokenizer:
    """A tokenizer for these transcripts and some of the standard library's source.

    The same transcripts give the same tokenizer on the same minor version of Python, whose
    standard library is part of the corpus.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(transcripts), trainer)
    return tokenizer


def _corpus(transcripts: Iterable[str]) -> Iterator[str]:
    for text in transcripts:
        pieces = [piece for piece in _TAG.split(text) if piece]
        yield from pieces * TRANSCRIPT_WEIGHT
    yield library_source()


def library_source() -> str:
    """The first 300 kB of a fixed list of standard library modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join((folder / name).read_text("utf-8") for name in _SOURCES)
    return text[:SOURCE_BYTES]
