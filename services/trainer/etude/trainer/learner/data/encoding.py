"""Encoding of rows of a dataset: transcripts and texts become token sequences."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from etude.agent.chat import ChatFormat, DataFormat
from etude.agent.tool_calls import read_json
from etude.common.api.meta import number
from etude.common.api.run.phases import HeldOutDataset
from etude.common.errors import InvalidFieldError, Problem, UserError
from etude.trainer.learner.batches import SupervisedSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEncoder:
    """Turns rows of one dataset into sequences."""

    dataset: HeldOutDataset
    chat: ChatFormat | DataFormat
    max_tokens: int
    """Longest sequence: longer texts are cut, longer transcripts are refused."""

    def encode(self, row: object, where: str) -> Iterator[SupervisedSequence]:
        """Encode one row, which is named by `where` in errors.

        Raises:
            UserError: the row is neither a transcript nor a text, or a transcript is too long.
        """
        try:
            match row:
                case {"messages": [_, *_] as messages, **rest}:
                    yield self._encode_transcript(
                        messages, _tools_of(rest.get("tools"), where), where
                    )
                case {"text": str(body)} if body:
                    yield from self._encode_text(body)
                case _:
                    refuse_row(where, 'has neither "messages" nor "text"')
        except (TypeError, UnicodeError) as cause:  # tokenizers refuses lone surrogates so
            refuse_row(where, f"has text that is not Unicode: {cause}")

    def _encode_transcript(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        where: str,
    ) -> SupervisedSequence:
        try:
            ids, written = self.chat.encode_messages(messages, tools or None)
        except InvalidFieldError as cause:
            refuse_row(where, str(cause))
        if len(ids) > self.max_tokens:
            refuse_row(where, f"has {len(ids)} tokens, and a sequence takes {self.max_tokens}")
        weight = number(self.dataset.context_weight)
        return SupervisedSequence(
            token_ids=np.asarray(ids, dtype=np.int32),
            weights=np.where(np.asarray(written), 1.0, weight).astype(np.float32),
        )

    def _encode_text(self, body: str) -> Iterator[SupervisedSequence]:
        ids = np.asarray(self.chat.encode_document(body), dtype=np.int32)
        for start in range(0, len(ids), self.max_tokens):
            piece = ids[start : start + self.max_tokens]
            yield SupervisedSequence(token_ids=piece, weights=np.ones(len(piece), np.float32))


def _tools_of(given: object, where: str) -> Sequence[Mapping[str, object]]:
    """Tools of a transcript, for the template: JSON schemas, as objects or as one JSON text.

    Raises:
        UserError: they are something else.
    """
    tools = given or ()
    if isinstance(tools, str):
        try:
            tools = read_json(tools)
        except ValueError as cause:
            refuse_row(where, f"has tools that are {cause}")
    if not isinstance(tools, list | tuple) or not all(isinstance(each, dict) for each in tools):
        refuse_row(where, "has tools that are no list of objects")
    return tools


def refuse_row(where: str, what: str) -> NoReturn:
    """Refuse data that cannot be learned from.

    Raises:
        UserError: always.
    """
    raise UserError(
        Problem(
            reason="InvalidData",
            what=what,
            where=where,
            fix='one JSON object per line: {"messages": […]} or {"text": "…"}; Parquet columns'
            " of these names",
        )
    )
