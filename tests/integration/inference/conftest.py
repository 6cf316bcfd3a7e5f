"""A tiny policy, and the inference role as a process that serves it."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.free_ports import reserve_ports
from tests.support.weights.publishing import TrainedPolicy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from etude.agent.chat import CHAT_TEMPLATE
from etude.common import weights
from etude.common.blobs import MemoryStore, Store, open_store
from etude.common.weights import VersionId

START_LIMIT_S = 600
"""Twenty seconds on an idle core; a busy machine gets patience."""

SPECIALS = (
    *("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
    *("<tool_call>", "</tool_call>", "</function>", "</parameter>"),
    *("<tool_response>", "</tool_response>", "<function=read_file>", "<parameter=path>"),
)
VOCABULARY = 320
HIDDEN = 64
CONTEXT = 256
RUN_UID = "uid-tiny"


class Answer(NamedTuple):
    """What an HTTP port said; status 0 if nobody listens."""

    status: int
    text: str


def write_model(folder: Path, *, dtype: str = "float32", **sizes: int) -> Path:
    """A Qwen3 configuration with tied embeddings and a byte-level tokenizer; no weights."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.1,
        "eos_token_id": SPECIALS.index("<|end|>"),
        "dtype": dtype,
        **sizes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "chat_template": CHAT_TEMPLATE}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def resolved_run(
    model: Path,
    store: Path,
    *,
    weights: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Mapping[str, Any]:
    """The file that the operator mounts into the role."""
    phase = {
        "name": "sft",
        "type": "SupervisedFineTuning",
        "maxSteps": 1,
        "optimizer": {"learningRate": "1e-3"},
        "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
    }
    role = {"maxModelLen": CONTEXT, "maxConcurrent": 32, "kvCacheMib": 64, **(sizes or {})}
    spec = {
        "model": {"uri": model.as_uri()},
        "storage": {"uri": store.as_uri()},
        "phases": [phase],
        "roles": {"inference": role},
        "weights": {"dtype": "Float32"} if weights is None else weights,
    }
    return {"name": "tiny", "uid": RUN_UID, "spec": spec}


def ask(port: int, path: str) -> Answer:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
            return Answer(reply.status, reply.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode())
    except OSError as error:
        return Answer(0, str(error))


@dataclass
class RoleProcess:
    """`etude-inference` on free ports, over a folder as its store."""

    folder: Path
    model: Path
    grpc_port: int = 0
    http_port: int = 0
    probe_port: int = 0
    process: "subprocess.Popen[bytes] | None" = None
    published: int = -1
    pod: str = "tiny-inference-0"
    shared: Path | None = None
    """Store in which somebody else publishes; a folder of its own unless set."""
    weights: Mapping[str, Any] | None = None
    """spec.weights of the run."""
    channel: str = ""
    """Channel that it follows."""
    lending: Mapping[str, str] = field(default_factory=dict)
    """Variables of an engine that is lent."""
    sizes: Mapping[str, int] | None = None
    """Of spec.roles.inference, where they are not those of the tiny policy."""
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        place = self.shared or self.folder / "store"
        place.mkdir(exist_ok=True)
        self.store = open_store(place.as_uri())
        if self.shared is None:
            weights.claim_epoch(self.store, holder="test", parent=None, reason="start")
        run = resolved_run(self.model, place, weights=self.weights, sizes=self.sizes)
        (self.folder / "run.json").write_text(json.dumps(run))

    def start(self) -> None:
        self.grpc_port, self.http_port, self.probe_port = reserve_ports(3)
        variables = {
            "ETUDE_RUN_FILE": str(self.folder / "run.json"),
            "ETUDE_SCRATCH": str(self.folder / "scratch"),
            "ETUDE_PORT": str(self.grpc_port),
            "ETUDE_HTTP_PORT": str(self.http_port),
            "ETUDE_PROBE_PORT": str(self.probe_port),
            "ETUDE_POD": self.pod,
            "ETUDE_CHANNEL": self.channel,
            **self.lending,
            "ETUDE_TRACES_FILE": str(self.folder / "traces.jsonl"),
            "OMP_NUM_THREADS": "1",
            # An image for CPU engines has no compiler, and none may be needed.
            "CXX": "no-compiler-here",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled"),
        }
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "etude.inference.main"],
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
            )

    def publish(self, policy: TrainedPolicy, *, complete: bool = False) -> VersionId:
        self.published += 1
        store, number = self.store, self.published
        return policy.publish(store, number, complete=complete, run=RUN_UID).version

    def publish_spoilt(
        self,
        policy: TrainedPolicy,
        spoil: Callable[[bytes], bytes | None],
        *,
        state: str | None = None,
    ) -> VersionId:
        """A delta whose payload is spoilt, or gone (None), before anybody can see its manifest.

        The next version builds on what this one builds on.
        """
        beside = MemoryStore(objects={o.key: self.store.get(o.key) for o in self.store.list("")})
        self.published += 1
        sound = policy.base
        manifest = policy.publish(beside, self.published, run=RUN_UID, state=state)
        policy.base = sound
        for item in manifest.objects:
            data = spoil(beside.get(item.key))
            if data is not None:
                self.store.put(item.key, data)
        self.store.create(manifest.version.manifest_key, manifest.to_bytes())
        return manifest.version

    def await_answer(self, port: int, path: str, status: int) -> Answer:
        """What the path answers, once it answers with this status.

        Raises:
            TimeoutError: it never did.
        """
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "log").read_text()
            answer = ask(port, path)
            if answer.status == status:
                return answer
            time.sleep(0.2)
        raise TimeoutError(f"{path} never answered {status}: {(self.folder / 'log').read_text()}")

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_LIMIT_S)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    return write_model


def start_roles() -> Iterator[Callable[..., RoleProcess]]:
    """Any number of roles, started."""
    made: list[RoleProcess] = []

    def started(folder: Path, model: Path, **fields: Any) -> RoleProcess:
        process = RoleProcess(folder, model, **fields)
        process.start()
        made.append(process)
        return process

    yield started
    for process in made:
        process.kill()


make_role = pytest.fixture(start_roles)
"""They end with the test."""
make_module_role = pytest.fixture(start_roles, scope="module")
"""They end with the tests of a module."""


@pytest.fixture(scope="module")
def role(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleProcess]:
    """The role, started; nothing is published yet."""
    folder = tmp_path_factory.mktemp("role")
    process = RoleProcess(folder / "work", write_model(folder / "model"))
    process.start()
    yield process
    process.kill()
