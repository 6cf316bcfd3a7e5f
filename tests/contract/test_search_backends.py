"""Every kind of vectors keeps the same promises, and is had by its name or not at all."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from etude.agent.search.codebase import Codebase, SearchedFiles
from etude.agent.search.contents import content_digest
from etude.agent.search.embedders.hashed import HashedEmbedder
from etude.agent.search.embedders.interface import Embedder, cosines
from etude.agent.search.embedders.minilm import PACKAGE, MiniLmEmbedder
from etude.agent.search.embedders.registry import SearchBackendError, encoder_path
from etude.agent.search.embedders.registry import load_embedder as backend
from etude.agent.search.embedders.trained import TrainedEmbedder
from etude.agent.search.embedders.weights import EncoderWeights, Layer, Linear, quantise_rows
from etude.agent.search.embedders.word_rows import MAX_WORDS, WordRows
from etude.agent.search.index import build_base_index, index_chunks
from etude.agent.search.shared_index import SharedIndex
from etude.agent.search.tokens import count_words
from etude.cli.agent.conversation import open_codebase
from etude.common.api.pool.spec import SearchSettings
from etude.common.errors import CorruptError, UserError
from etude.envserver.host.workspace_sources import load_embedder
from etude.envserver.storage.store_reads import DirectReads

WORDS = ["open", "close", "file", "door", "parse", "header", "http", "return", "def"]
TEXTS = ["def open_file(): return file", "close the door", "parse an HTTP header", "zzz", ""]
HAS_MINILM = importlib.util.find_spec(PACKAGE) is not None


def encoder(seed: int = 4) -> TrainedEmbedder:
    chance = np.random.default_rng(seed)

    def draw(*shape: int) -> NDArray[np.float32]:
        return chance.normal(size=shape).astype(np.float32)

    def linear(outputs: int, inputs: int) -> Linear:
        return Linear.quantise(draw(outputs, inputs), draw(outputs))

    rows, scales, unit = quantise_rows(draw(len(WORDS), 32))
    layer = Layer(linear(96, 32), linear(32, 32), linear(64, 32), linear(32, 64))
    return TrainedEmbedder.of(
        EncoderWeights(
            words=WORDS,
            rows=rows,
            scales=scales,
            unit=unit,
            places=draw(MAX_WORDS, 32),
            kinds=np.zeros((2, 32), np.float32),
            gate=linear(1, 32),
            layers=[layer, layer],
        )
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
            return encoder()
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
@pytest.mark.parametrize("name", ["hashed", "trained"])
def test_neither_threads_nor_processors_change_a_bit(
    name: str, threads: str, tmp_path: Path
) -> None:
    made = HashedEmbedder() if name == "hashed" else encoder()
    if isinstance(made, TrainedEmbedder):
        made.save(encoder_path(made.id, tmp_path))
    code = (
        "import hashlib, sys; from pathlib import Path\n"
        "from etude.agent.search.embedders.registry import load_embedder\n"
        "from etude.agent.search.tokens import count_words\n"
        "from etude.agent.search.embedders.interface import cosines\n"
        "embedder = load_embedder(sys.argv[1], Path(sys.argv[2]))\n"
        "texts = [count_words(f'open door {n} file parse header'[n % 9:]) for n in range(900)]\n"
        "rows = embedder.embed(texts)\n"
        "found = cosines(rows, embedder.embed_query(texts[7]))\n"
        "print(hashlib.sha256(rows.tobytes() + found.tobytes()).hexdigest())"
    )
    command = [sys.executable, "-c", code, made.id, str(tmp_path)]
    # numpy without its vector instructions, and another kernel for matrices.
    env = {
        **os.environ,
        "OPENBLAS_NUM_THREADS": threads,
        "OPENBLAS_CORETYPE": "Nehalem",
        "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX",
    }
    other = subprocess.run(command, env=env, capture_output=True, check=True)
    mine = subprocess.run(command, capture_output=True, check=True)
    assert other.stdout == mine.stdout


def test_the_same_words_in_another_order_have_another_vector() -> None:
    # A sum of words, as the former table was, cannot tell them apart.
    made = encoder()
    rows = made.embed([count_words("parse the http header"), count_words("header the parse http")])
    assert (rows[0] != rows[1]).any()


def test_an_unknown_word_is_read_by_its_parts() -> None:
    made = encoder()
    rows = made.embed([count_words("xopenfile"), count_words("open file"), count_words("zzz")])
    assert rows[0].tolist() == rows[1].tolist()
    assert not rows[2].any()


def test_a_text_of_any_length_costs_no_more_than_its_first_words() -> None:
    made = encoder()
    words = WordRows(rows={f"w{n}": n for n in range(9_000)})
    counts = dict.fromkeys((f"w{n}" for n in range(9_000)), 1)
    assert list(words.read(counts)) == list(range(MAX_WORDS))
    assert made.embed([count_words("open " * 100_000)]).shape == (1, 32)


def test_chunks_above_the_limit_of_an_encoder_are_searched_by_words_alone() -> None:
    made = replace(encoder(), max_texts=3)
    files = {f"{n}.txt": b"open the door\n" for n in range(5)}
    vectors = [entry.vector.any() for entry in index_chunks(files, made)]
    assert vectors == [True, True, True, False, False]


def test_an_encoder_survives_its_file(tmp_path: Path) -> None:
    first = encoder()
    path = encoder_path(first.id, tmp_path)
    first.save(path)
    data = path.read_bytes()
    again = backend(first.id, tmp_path)
    texts = [count_words(text) for text in TEXTS]
    assert again.embed(texts).tobytes() == first.embed(texts).tobytes()
    TrainedEmbedder.load(path).save(path)
    assert path.read_bytes() == data
    assert encoder(5).id != first.id


def test_an_encoder_under_another_name_is_refused(tmp_path: Path) -> None:
    other = "trained-" + "0" * 16
    encoder().save(encoder_path(other, tmp_path))
    with pytest.raises(SearchBackendError, match=f"holds {encoder().id}"):
        backend(other, tmp_path)


@pytest.mark.parametrize("name", ["trained-" + "0" * 16, "hashed-2", "../x", "trained-x", ""])
def test_a_backend_that_is_not_here_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SearchBackendError, match="fix:"):
        backend(name, tmp_path)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" + bytes(500), None])
def test_a_spoilt_file_is_refused(data: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "encoder.npz"
    encoder().save(path)
    path.write_bytes(path.read_bytes()[:-200] if data is None else data)
    with pytest.raises(CorruptError, match="not an encoder"):
        TrainedEmbedder.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": np.array([{}])},
        {"rows": np.zeros((len(WORDS), 32), np.int16)},
        {"rows": np.zeros((len(WORDS), 2000), np.int8)},
        {"0.inner.bias": np.zeros(63, np.float32)},
        {"gate.scales": np.array([np.nan], np.float32)},
        {f"{n}.inner.bias": np.zeros(64, np.float32) for n in range(9)},
        {"words": np.frombuffer(b"a", np.uint8)},
        {"unit": np.zeros((1, 1), np.float32)},
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    changes: dict[str, NDArray[np.generic]], tmp_path: Path
) -> None:
    path = tmp_path / "encoder.npz"
    arrays = encoder().transformer.weights.arrays() | changes
    np.savez(path, **arrays)  # type: ignore[arg-type] # no name is allow_pickle
    with pytest.raises(CorruptError, match="not an encoder"):
        TrainedEmbedder.load(path)


def test_a_table_of_former_releases_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "encoder.npz"
    arrays = encoder().transformer.weights.arrays()
    np.savez(path, words=arrays["words"], rows=arrays["rows"], scales=arrays["scales"])
    with pytest.raises(CorruptError, match="not an encoder"):
        TrainedEmbedder.load(path)


def test_a_host_without_the_pools_encoder_does_not_start(tmp_path: Path) -> None:
    settings = SearchSettings(backend="trained-" + "0" * 16, models=tmp_path.as_uri())
    with pytest.raises(UserError, match="make search-model"):
        load_embedder(settings, tmp_path, DirectReads())
    encoder().save(encoder_path(encoder().id, tmp_path))
    settings = SearchSettings(backend=encoder().id, models=tmp_path.as_uri())
    found = load_embedder(settings, tmp_path, DirectReads())
    assert found is not None
    assert found.id == encoder().id
    assert load_embedder(SearchSettings(), tmp_path, DirectReads()) is None
    assert build_base_index({}, None).embedder.id == SearchSettings().backend


async def test_a_users_folder_is_searched_with_the_encoder_of_the_training(tmp_path: Path) -> None:
    path = encoder_path(encoder().id, tmp_path)
    encoder().save(path)
    files = {f"{n}.txt": text.encode() for n, text in enumerate(TEXTS)}
    digests = {name: content_digest(data) for name, data in files.items()}

    async def read(name: str) -> bytes | None:
        return files[name]

    searched = SearchedFiles(digests, read)
    pool = Codebase(SharedIndex(files, encoder()))
    found = await open_codebase(str(path)).search(searched, "close a door", [], 10)
    assert found.backend == encoder().id
    assert found == await pool.search(searched, "close a door", [], 10)
    with pytest.raises(UserError, match="make search-model"):
        open_codebase(str(tmp_path / ("trained-" + "0" * 16 + ".npz")))


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
