"""Client of the models that judge rollouts: votes over HTTP, each question asked once."""

import asyncio
import json
import logging
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import urllib3
from blake3 import blake3

from etude.common.api.run.rewards import JudgeParameters
from etude.rewards.faults import Fault, FaultReason
from etude.rewards.functions import judge
from etude.v1 import rollout_pb2

log = logging.getLogger(__name__)

CACHED_SCORES = 65_536
MAX_CONCURRENT = 16
ATTEMPTS = 3
RETRY_S = 1.0
"""Before the second attempt; the third waits twice as long."""
_LATER = frozenset({408, 429, 500, 502, 503, 504})


class _NoVoteError(Exception):
    """The model gave no answer; `is_temporary` if another attempt may give one."""

    def __init__(self, what: str, *, is_temporary: bool) -> None:
        super().__init__(what)
        self.is_temporary = is_temporary


@dataclass(slots=True)
class JudgeClient:
    """Asks endpoints for votes; scores are cached by the digest of the question."""

    key: str = field(default="", repr=False)
    """Bearer token; empty for none."""
    retry_s: float = RETRY_S
    _scores: OrderedDict[str, float] = field(default_factory=OrderedDict)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT))
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="judge")
    )
    """Of their own: an endpoint that answers slowly holds none that other work waits for."""
    _pool: urllib3.PoolManager = field(
        default_factory=lambda: urllib3.PoolManager(maxsize=MAX_CONCURRENT, retries=False)
    )

    async def judge(
        self, parameters: JudgeParameters, instruction: str, rollout: rollout_pb2.Rollout
    ) -> float | Fault:
        """Score of a rollout from 0 to 1: the median vote, or the fault that masks it.

        A complete answer that is no vote counts as a vote for 0: the transcript can bring a model
        to break the schema, and a mask would free it from the reward.
        """
        body = judge.question(parameters, instruction, rollout)
        asked = [parameters.endpoint, parameters.votes, judge.FUNCTION.version, body]
        digest = blake3(json.dumps(asked).encode()).hexdigest()
        if digest in self._scores:
            self._scores.move_to_end(digest)
            return self._scores[digest]
        votes = await asyncio.gather(
            *(self._vote(parameters, {**body, "seed": seed}) for seed in range(parameters.votes))
        )
        valid = [vote for vote in votes if isinstance(vote, float)]
        score = judge.median_score(valid, asked=parameters.votes)
        if score is None:
            reason = next(vote for vote in votes if isinstance(vote, str))
            what = f"{len(valid)} of {parameters.votes} questions have an answer: {reason}"
            return Fault(FaultReason.JUDGE_FAILED, what)
        self._scores[digest] = score
        if len(self._scores) > CACHED_SCORES:
            self._scores.popitem(last=False)
        return score

    async def _vote(self, parameters: JudgeParameters, body: dict[str, object]) -> float | str:
        """One vote, or the reason that there is none."""
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(self.retry_s * attempt)
            try:
                async with self._slots, asyncio.timeout(2 * parameters.request_seconds):
                    loop = asyncio.get_running_loop()
                    return await loop.run_in_executor(self._threads, self._ask, parameters, body)
            except TimeoutError:
                reason = "no answer: it takes too long"
            except _NoVoteError as error:
                reason = str(error)
                log.warning("judge %s: %s", parameters.model, reason)
                if not error.is_temporary:
                    break
        return reason

    def _ask(self, parameters: JudgeParameters, body: dict[str, object]) -> float:
        deadline_s = time.monotonic() + parameters.request_seconds
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            # A redirect would carry the key and the transcript to another host.
            answer = self._pool.request(
                "POST",
                f"{parameters.endpoint.rstrip('/')}/chat/completions",
                body=json.dumps(body).encode(),
                headers=headers,
                timeout=urllib3.Timeout(total=parameters.request_seconds),
                redirect=False,
                preload_content=False,
            )
            try:
                data = _read(answer, deadline_s)
            finally:
                answer.close()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _NoVoteError(f"no answer: {type(error).__name__}", is_temporary=True) from error
        if answer.status != 200:
            raise _NoVoteError(f"HTTP status {answer.status}", is_temporary=answer.status in _LATER)
        try:
            return judge.parse_vote(data)
        except judge.NoCompletionError as error:
            raise _NoVoteError(f"invalid answer: {error}", is_temporary=False) from error
        except ValueError as error:
            log.warning("judge %s: no vote, so it counts as 0: %s", parameters.model, error)
            return 0.0


def _read(answer: urllib3.BaseHTTPResponse, deadline_s: float) -> bytes:
    """The body, up to one byte more than an answer may have.

    Raises:
        TimeoutError: it is not complete by the deadline. The limit of sockets is for each read,
            and an answer may come byte by byte.
    """
    data = b""
    while len(data) <= judge.MAX_ANSWER_BYTES:
        if time.monotonic() > deadline_s:
            raise TimeoutError
        part = answer.read1(judge.MAX_ANSWER_BYTES + 1 - len(data), decode_content=True)
        if not part:
            break
        data += part
    return data
