"""A model with further tokens: every file of it is as if it had always had them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.run.spec import ModelSource
from etude.common.api.storage import StoreAccess
from etude.common.blobs import Store, open_store
from etude.common.errors import CorruptError, UserError
from etude.common.model_sources.extended import ModelChanges, extend_model
from etude.common.model_sources.files import RemoteModel
from etude.common.model_sources.run_model import extend_run_model, find_run_model
from etude.common.model_sources.store_model import open_store_model
from etude.common.weights.tensors import safetensors
from etude.common.weights.tensors.safetensors import Tensor

ACCESS = StoreAccess()
KNOWN, ROWS, WIDTH = 5, 7, 4
"""Two rows of the embedding belong to no token."""
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "<tag>": 3}, "merges": []},
    "added_tokens": [{"id": 4, "content": "<s>", "special": True}],
}
NUMPY = {"F32": "<f4", "F16": "<f2"}


def values(dtype: str, shape: tuple[int, ...], seed: int) -> bytes:
    drawn = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    if dtype == "BF16":
        return (drawn.view(np.uint32) >> 16).astype("<u2").tobytes()
    return drawn.astype(NUMPY[dtype]).tobytes()


def floats(tensor: Tensor) -> Any:
    data = bytes(tensor.data)
    if tensor.dtype == "BF16":
        numbers = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = np.frombuffer(data, NUMPY[tensor.dtype]).astype(np.float32)
    return numbers.reshape(tensor.shape)


def write_model(folder: Path, *, rows: int = ROWS, dtype: str = "F32", **files: object) -> str:
    folder.mkdir()
    first = [
        Tensor(name=name, dtype=dtype, shape=shape, data=values(dtype, shape, seed))
        for seed, (name, shape) in enumerate(
            {"model.embed_tokens.weight": (rows, WIDTH), "model.norm.weight": (WIDTH,)}.items()
        )
    ]
    head = Tensor(
        name="lm_head.weight",
        dtype=dtype,
        shape=(rows, WIDTH),
        data=values(dtype, (rows, WIDTH), 7),
    )
    other = Tensor(
        name="model.up.weight", dtype=dtype, shape=(rows, 2), data=values(dtype, (rows, 2), 8)
    )
    (folder / "model-1.safetensors").write_bytes(safetensors.encode(first))
    (folder / "model-2.safetensors").write_bytes(safetensors.encode([other, head]))
    names = {tensor.name: "model-1.safetensors" for tensor in first}
    names |= {each.name: "model-2.safetensors" for each in (head, other)}
    size = sum(tensor.num_bytes for tensor in [*first, head, other])
    index = {"metadata": {"total_size": size}, "weight_map": names}
    content = {
        "config": {"model_type": "llama", "vocab_size": rows},
        "generation_config": {"eos_token_id": 4},
        "tokenizer": TOKENIZER,
        "model.safetensors.index": index,
        **files,
    }
    for name, value in content.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder.as_uri()


def read_all(model: RemoteModel) -> dict[str, bytes]:
    return {file.name: model.read(file, 0, file.size) for file in model.files}


def tensors(files: Mapping[str, bytes]) -> dict[str, Tensor]:
    found = (
        safetensors.decode(data, where=name)
        for name, data in files.items()
        if name.endswith(".safetensors")
    )
    return {tensor.name: tensor for each in found for tensor in each}


def extend(uri: str, *tokens: str, template: str | None = None, end: str = "") -> RemoteModel:
    source = open_store_model(uri, ACCESS, with_digests=True)
    return extend_model(source, ModelChanges(tokens, template, end))


def test_tokens_that_only_the_configuration_lists_keep_their_ids(tmp_path: Path) -> None:
    listed = {"5": {"content": "<x>", "rstrip": True}, "4": {"content": "<s>", "special": True}}
    uri = write_model(tmp_path / "model", tokenizer_config={"added_tokens_decoder": listed})
    files = read_all(extend(uri, "<y>", "<x>"))
    added = json.loads(files["tokenizer.json"])["added_tokens"]
    assert {token["content"]: token["id"] for token in added} == {"<s>": 4, "<x>": 5, "<y>": 6}
    assert [token["rstrip"] for token in added] == [False, True, False]
    after = json.loads(files["tokenizer_config.json"])["added_tokens_decoder"]
    assert {key: token["content"] for key, token in after.items()} == {
        "4": "<s>",
        "5": "<x>",
        "6": "<y>",
    }


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_new_tokens_have_the_mean_of_the_known_ones(tmp_path: Path, dtype: str) -> None:
    uri = write_model(tmp_path / "model", dtype=dtype)
    before = tensors(read_all(open_store_model(uri, ACCESS, with_digests=True)))
    files = read_all(extend(uri, "<a>", "<b>", "<c>"))
    after = tensors(files)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old, new = floats(before[name]), floats(after[name])
        assert new.shape == (KNOWN + 3, WIDTH)
        np.testing.assert_array_equal(new[:KNOWN], old[:KNOWN])
        mean = old[:KNOWN].mean(axis=0, dtype=np.float64)
        tolerance = {"F32": 1e-6, "F16": 1e-3, "BF16": 8e-3}[dtype]
        np.testing.assert_allclose(new[KNOWN:], np.tile(mean, (3, 1)), rtol=tolerance, atol=1e-6)
    for name in ("model.norm.weight", "model.up.weight"):
        assert bytes(after[name].data) == bytes(before[name].data)
    assert json.loads(files["config.json"])["vocab_size"] == KNOWN + 3
    index = json.loads(files["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(tensor.num_bytes for tensor in after.values())
    added = json.loads(files["tokenizer.json"])["added_tokens"]
    assert [(token["id"], token["content"]) for token in added] == [
        (4, "<s>"), (5, "<a>"), (6, "<b>"), (7, "<c>"),
    ]  # fmt: skip
    assert all(token["special"] for token in added)


def test_rows_without_a_token_are_used_before_the_embedding_grows(tmp_path: Path) -> None:
    uri = write_model(tmp_path / "model")
    before = tensors(read_all(open_store_model(uri, ACCESS, with_digests=True)))
    files = read_all(extend(uri, "<a>"))
    old, new = (floats(each["lm_head.weight"]) for each in (before, tensors(files)))
    assert new.shape == old.shape
    np.testing.assert_allclose(new[KNOWN], old[:KNOWN].mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(np.delete(new, KNOWN, axis=0), np.delete(old, KNOWN, axis=0))
    assert json.loads(files["config.json"])["vocab_size"] == ROWS


def test_tokens_that_the_tokenizer_has_keep_their_ids(tmp_path: Path) -> None:
    uri = write_model(tmp_path / "model")
    files = read_all(extend(uri, "<s>", "<tag>", "<a>", "<a>"))
    added = json.loads(files["tokenizer.json"])["added_tokens"]
    assert {token["content"]: token["id"] for token in added} == {"<s>": 4, "<tag>": 3, "<a>": 5}


def test_a_template_comes_with_the_token_that_ends_its_turns(tmp_path: Path) -> None:
    uri = write_model(tmp_path / "model", tokenizer_config={"added_tokens_decoder": {}})
    files = read_all(extend(uri, "<end>", template="{{ x }}", end="<end>"))
    assert files["chat_template.jinja"] == b"{{ x }}"
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [4, 5]
    listed = json.loads(files["tokenizer_config.json"])["added_tokens_decoder"]
    assert listed["5"]["content"] == "<end>"


@given(start=st.integers(0, 500), length=st.integers(1, 500))
def test_any_range_of_a_changed_file_is_that_of_the_whole(
    extended: RemoteModel, start: int, length: int
) -> None:
    for file in extended.files:
        whole = extended.read(file, 0, file.size)
        assert len(whole) == file.size
        first = start % file.size
        last = min(file.size, first + length)
        assert extended.read(file, first, last - first) == whole[first:last]


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> RemoteModel:
    uri = write_model(tmp_path_factory.mktemp("extended") / "model")
    return extend(uri, *(f"<{number}>" for number in range(9)))


def test_weights_that_cannot_grow_are_refused_by_the_field(tmp_path: Path) -> None:
    uri = write_model(tmp_path / "model", config={"vocab_size": 100})
    with pytest.raises(UserError, match=r"no known tensor has 100 rows(.|\n)*fix: "):
        extend(uri, "<a>")
    narrow = write_model(tmp_path / "narrow")
    (tmp_path / "narrow" / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(UserError, match=r"addTokens.*tokenizer.json .*is not a tokenizer"):
        extend(narrow, "<a>")


def test_the_copy_is_written_once_and_found_by_the_runs_engines(tmp_path: Path) -> None:
    uri = write_model(tmp_path / "model")
    store: Store = open_store((tmp_path / "store").as_uri())
    key = ModelSource(uri=uri, add_tokens=("<a>",)).key
    assert find_run_model(key, store) is None

    def write() -> str:
        return extend_run_model(
            key, uri, ModelChanges(("<a>",)), store, scratch=tmp_path / "scratch", access=ACCESS
        )

    folder = write()
    assert find_run_model(key, store) == folder
    assert find_run_model(uri, store) == uri
    found = read_all(open_store_model(folder, ACCESS, with_digests=True))
    assert found == read_all(extend(uri, "<a>"))
    (tmp_path / "model" / "config.json").unlink()
    assert write() == folder, "a copy that is there needs no source"


def test_a_folder_that_changed_since_the_run_began_is_refused(tmp_path: Path) -> None:
    uri = write_model(tmp_path / "model")
    store = open_store((tmp_path / "store").as_uri())
    key = ModelSource(uri=uri, add_tokens=("<a>",)).key
    arguments = (key, uri, ModelChanges(("<a>",)), store)
    folder = extend_run_model(*arguments, scratch=tmp_path, access=ACCESS)
    Path(f"{folder.removeprefix('file://')}.json").unlink()
    (tmp_path / "model" / "model-1.safetensors").write_bytes(
        safetensors.encode(
            [
                Tensor(
                    name="model.embed_tokens.weight",
                    dtype="F32",
                    shape=(ROWS, WIDTH),
                    data=bytes(4 * ROWS * WIDTH),
                )
            ]
        )
    )
    with pytest.raises(CorruptError, match="has changed since the run began"):
        extend_run_model(*arguments, scratch=tmp_path, access=ACCESS)


def test_the_key_of_a_model_tells_its_changes() -> None:
    plain = ModelSource.model_validate({"uri": "s3://b/m", "chat": {"template": "Plain"}})
    added = ModelSource(uri="s3://b/m", add_tokens=("<a>",))
    assert ModelSource(uri="s3://b/m").key == "s3://b/m"
    assert len({plain.key, added.key, "s3://b/m"}) == 3
