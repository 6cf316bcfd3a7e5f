"""Every kind of vectors keeps the same promises, and is had by its name or not at all."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from etude.agent.search.embedders.hashed import HashedEmbedder
from etude.agent.search.embedders.interface import Embedder, cosines
from etude.agent.search.embedders.minilm import PACKAGE, MiniLmEmbedder
from etude.agent.search.embedders.registry import SearchBackendError, table_path
from etude.agent.search.embedders.registry import load_embedder as backend
from etude.agent.search.embedders.trained import TrainedEmbedder
from etude.agent.search.index import build_base_index
from etude.agent.search.tokens import count_words
from etude.common.api.pool.spec import SearchSettings
from etude.common.api.storage import StoreAccess
from etude.common.errors import CorruptError, UserError
from etude.envserver.host.workspace_sources import load_embedder

WORDS = ["open", "close", "file", "door", "parse", "header", "http", "return", "def"]
TEXTS = ["def open_file(): return file", "close the door", "parse an HTTP header", "zzz", ""]
HAS_MINILM = importlib.util.find_spec(PACKAGE) is not None


def table() -> TrainedEmbedder:
    chance = np.random.default_rng(4)
    return TrainedEmbedder.quantise_rows(
        WORDS, chance.normal(size=(len(WORDS), 32)).astype(np.float32)
    )


@pytest.fixture(
    scope="module",
    params=[
        "hashed",
        "trained",
        pytest.param(
            "minilm",
            marks=pytest.mark.skipif(
                not HAS_MINILM, reason="the extra search-minilm is not installed"
            ),
        ),
    ],
)
def made(request: pytest.FixtureRequest) -> Embedder:
    match request.param:
        case "hashed":
            return HashedEmbedder()
        case "trained":
            return table()
        case _:
            return MiniLmEmbedder.load()


def test_a_vector_is_the_same_alone_and_among_others(made: Embedder) -> None:
    texts = [count_words(text) for text in TEXTS]
    together = made.embed(texts)
    assert together.dtype == np.int8
    assert together.shape == (len(TEXTS), made.num_components)
    for text, row in zip(texts, together, strict=True):
        alone = made.embed([text])[0]
        # Floating-point sums of the sentence model depend on what else is computed with them.
        assert np.abs(alone.astype(int) - row).max() <= (0 if made.id != "minilm-l6-v2" else 1)
    assert made.embed([]).shape == (0, made.num_components)


def test_a_text_is_nearest_to_itself(made: Embedder) -> None:
    rows = made.embed([count_words(text) for text in TEXTS[:3]])
    for index, text in enumerate(TEXTS[:3]):
        found = cosines(rows, made.embed_query(count_words(text)))
        assert found.argmax() == index
        assert found[index] > 0.99


def test_a_text_without_a_known_word_is_near_nothing(made: Embedder) -> None:
    if made.id == "minilm-l6-v2":
        pytest.skip("it knows parts of every word")
    (row,) = made.embed([count_words("")])
    assert not row.any()
    assert cosines(np.array([row]), made.embed_query(count_words(TEXTS[0]))).tolist() == [0.0]


def test_the_hashed_directions_are_these_for_ever() -> None:
    # Indices and policies rely on them: another value here is another backend, with another id.
    row = HashedEmbedder().embed_query(count_words("open the file"))
    assert row[:8].tolist() == [92, 35, -41, -5, -30, -65, 10, -21]


@pytest.mark.parametrize("threads", ["1", "4"])
def test_threads_change_no_bit(threads: str) -> None:
    code = (
        "import hashlib; from etude.agent.search.embedders.hashed import HashedEmbedder\n"
        "from etude.agent.search.tokens import count_words\n"
        "from etude.agent.search.embedders.interface import cosines\n"
        "texts = [count_words(f'open door {n} file{n % 9}') for n in range(3000)]\n"
        "rows = HashedEmbedder().embed(texts)\n"
        "found = cosines(rows, rows[7])\n"
        "print(hashlib.sha256(rows.tobytes() + found.tobytes()).hexdigest())"
    )
    env = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OPENBLAS_CORETYPE": "Nehalem"}
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    mine = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert other.stdout == mine.stdout


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    first = table()
    path = table_path(first.id, tmp_path)
    first.save(path)
    data = path.read_bytes()
    again = backend(first.id, tmp_path)
    texts = [count_words(text) for text in TEXTS]
    assert again.embed(texts).tobytes() == first.embed(texts).tobytes()
    TrainedEmbedder.load(path).save(path)
    assert path.read_bytes() == data


def test_a_table_under_another_name_is_refused(tmp_path: Path) -> None:
    other = "trained-" + "0" * 16
    table().save(table_path(other, tmp_path))
    with pytest.raises(SearchBackendError, match=f"holds {table().id}"):
        backend(other, tmp_path)


@pytest.mark.parametrize("name", ["trained-" + "0" * 16, "hashed-2", "../x", "trained-x", ""])
def test_a_backend_that_is_not_here_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SearchBackendError, match="fix:"):
        backend(name, tmp_path)


@pytest.mark.parametrize("spoil", ["cut", "noise", "pickle", "parts", "empty"])
def test_a_spoilt_table_is_refused(spoil: str, tmp_path: Path) -> None:
    path = tmp_path / "table.npz"
    table().save(path)
    match spoil:
        case "cut":
            path.write_bytes(path.read_bytes()[:-200])
        case "noise":
            path.write_bytes(os.urandom(500))
        case "pickle":
            np.savez(path, words=np.array([{}]), rows=np.array([{}]), scales=np.array([{}]))
        case "parts":
            rows, scales = np.zeros((3, 4), np.int8), np.zeros(2, np.uint16)
            np.savez(path, words=np.frombuffer(b"a\nb", np.uint8), rows=rows, scales=scales)
        case _:
            path.write_bytes(b"")
    with pytest.raises(CorruptError, match="not a table of words"):
        TrainedEmbedder.load(path)


def test_a_host_without_the_pools_table_does_not_start(tmp_path: Path) -> None:
    settings = SearchSettings(backend="trained-" + "0" * 16, models=tmp_path.as_uri())
    with pytest.raises(UserError, match="make search-model"):
        load_embedder(settings, tmp_path, StoreAccess())
    table().save(table_path(table().id, tmp_path))
    settings = SearchSettings(backend=table().id, models=tmp_path.as_uri())
    found = load_embedder(settings, tmp_path, StoreAccess())
    assert found is not None
    assert found.id == table().id
    assert load_embedder(SearchSettings(), tmp_path, StoreAccess()) is None
    assert build_base_index({}, None).embedder.id == SearchSettings().backend


@pytest.mark.skipif(HAS_MINILM, reason="the extra search-minilm is installed")
def test_the_sentence_model_says_how_to_get_it() -> None:
    with pytest.raises(UserError, match=r"pip install 'etude\[search-minilm\]'"):
        MiniLmEmbedder.load()


@pytest.mark.skipif(not HAS_MINILM, reason="the extra search-minilm is not installed")
def test_the_sentence_model_is_what_torch_makes_of_the_same_files() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None
    assert found.submodule_search_locations
    folder = str(Path(found.submodule_search_locations[0]) / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    ours = MiniLmEmbedder.load()
    for text in [*TEXTS[:3], "def f(x):\n    return x + 1\n" * 60]:
        asked = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.no_grad():
            theirs = model(**asked).last_hidden_state.mean(dim=1)[0].numpy()
        row = ours.embed_query(count_words(text)).astype(float)
        likeness = row @ theirs / np.linalg.norm(row) / np.linalg.norm(theirs)
        assert likeness > 0.9995, text
