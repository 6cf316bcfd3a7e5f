"""Models of a hub: pinned, copied once, verified, and never with code."""

import fcntl
import json
import logging
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.hub_server import COMMIT, Fault, Hub, serve_hub

from etude.common.api.storage import StoreAccess
from etude.common.blobs import Store, open_store
from etude.common.errors import CorruptError, UserError
from etude.common.hub_uri import parse_hub_uri
from etude.common.model_sources import parts
from etude.common.model_sources.hub import HubError, HubModel, open_hub_model
from etude.common.model_sources.hub_access import HubAccess, Patience
from etude.common.model_sources.mirror import (
    copy_model,
    create_pin,
    mirror_prefix,
    read_manifest,
)
from etude.common.model_sources.run_model import (
    await_run_model,
    find_run_model,
    mirror_run_model,
    with_model_folder,
)
from etude.common.model_sources.store_model import open_store_model
from etude.common.role_inputs import ResolvedRun

URI = "hf://org/tiny@main"
WEIGHTS = bytes(range(256)) * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "modeling_tiny.py": b"import os",
    "onnx/model.safetensors": b"other",
    "README.md": b"# tiny",
}
QUICK = Patience(attempts=3, first_pause_s=0.01, longest_pause_s=1.5, request_s=5)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub(Hub("org/tiny", dict(FILES), frozenset({"model.safetensors"}))) as served:
        yield served


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def open_it(hub: Hub, *, token: str | None = None, uri: str = URI) -> HubModel:
    quick = HubAccess(endpoint=hub.endpoint, token=token, patience=QUICK)
    return open_hub_model(parse_hub_uri(uri), quick)


def access(hub: Hub) -> HubAccess:
    return HubAccess.from_env({"HF_ENDPOINT": hub.endpoint})


def refusal(hub: Hub, tmp_path: Path, *, token: str | None = None, uri: str = URI) -> str:
    with pytest.raises(UserError) as caught:
        copy_model(
            open_it(hub, token=token, uri=uri),
            open_store((tmp_path / "refused").as_uri()),
            scratch=tmp_path,
        )
    return str(caught.value)


def test_a_copy_has_weights_tokenizer_and_configuration_and_nothing_else(
    hub: Hub, store: Store, tmp_path: Path
) -> None:
    folder = Path(
        mirror_run_model(URI, store, scratch=tmp_path, access=access(hub)).removeprefix("file://")
    )
    names = {"config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    assert {name: (folder / name).read_bytes() for name in names} == {
        name: FILES[name] for name in names
    }
    manifest = read_manifest(store, f"models/{folder.name}")
    assert manifest is not None
    assert manifest.source == f"hf://org/tiny@{COMMIT}"


def test_a_branch_that_moves_is_still_the_commit_that_the_run_began_with(
    hub: Hub, store: Store, tmp_path: Path
) -> None:
    hub.faults["model.safetensors"] = [Fault(status=403)]
    with pytest.raises(UserError):
        mirror_run_model(URI, store, scratch=tmp_path, access=access(hub))
    assert find_run_model(URI, store) is None
    asked = len(hub.requests)
    folder = mirror_run_model(URI, store, scratch=tmp_path, access=access(hub))
    assert hub.requests[asked].path == f"/api/models/org/tiny/revision/{COMMIT}"
    hub.commit = "b" * 40
    asked = len(hub.requests)
    assert mirror_run_model(URI, store, scratch=tmp_path, access=HubAccess()) == folder
    assert await_run_model(URI, store, limit_s=0) == folder
    assert len(hub.requests) == asked, "a sealed copy asks the hub for nothing"


@pytest.mark.parametrize("change", ["digests", "files"])
def test_the_copy_is_where_the_pin_says_whatever_the_hub_says_later(
    hub: Hub, store: Store, tmp_path: Path, change: str
) -> None:
    hub.faults["model.safetensors"] = [Fault(status=403)]
    with pytest.raises(UserError):
        mirror_run_model(URI, store, scratch=tmp_path, access=access(hub))
    if change == "digests":  # the hub moved a file to its large-file store
        hub.lfs = hub.lfs | {"tokenizer.json"}
    else:  # as if another release used other files
        hub.files["LICENSE"] = b"MIT"
    folder = mirror_run_model(URI, store, scratch=tmp_path, access=access(hub))
    assert await_run_model(URI, store, limit_s=0) == folder
    assert (Path(folder.removeprefix("file://")) / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize("prefix", ["journal", "models/../x", f"models/..-{'0' * 32}", ""])
def test_a_pin_that_leads_elsewhere_is_damaged(hub: Hub, store: Store, prefix: str) -> None:
    create_pin(store, URI, open_it(hub))
    (pin,) = store.list("models/pins/")
    value = json.loads(store.get(pin.key)) | {"prefix": prefix}
    store.put(pin.key, json.dumps(value).encode())
    with pytest.raises(CorruptError, match="is no Pin"):
        find_run_model(URI, store)


def test_leftovers_of_killed_downloads_are_removed_at_the_next_start(
    hub: Hub, store: Store, tmp_path: Path
) -> None:
    def leave_parts(folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"old.safetensors.{end}" for end in ("part", "parts")]
        for path in paths:
            path.write_bytes(b"x")
        return paths

    other = leave_parts(tmp_path / "models" / "other")
    in_use = leave_parts(tmp_path / "models" / "in-use")
    # The model's own: killed between the upload of a file and the end of its download.
    own = leave_parts(tmp_path / mirror_prefix(open_it(hub)))
    with (in_use[0].parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mirror_run_model(URI, store, scratch=tmp_path, access=access(hub))
        assert not any(path.exists() for path in (*other, *own))
        assert all(path.exists() for path in in_use)
    mirror_run_model(URI, store, scratch=tmp_path, access=access(hub))
    assert not list(tmp_path.rglob("*.part*"))


def test_an_engine_that_waits_too_long_names_the_trainer(store: Store) -> None:
    with pytest.raises(UserError, match="trainer's log"):
        await_run_model(URI, store, limit_s=-1)


def test_the_token_goes_to_the_endpoint_and_to_no_other_host_and_into_no_log(
    hub: Hub, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.token = "hf_sesame"
    hub.faults["model.safetensors"] = [Fault(), Fault(status=500)]
    model = open_it(hub, token="hf_sesame")
    copy_model(model, store, scratch=tmp_path)
    sent = {(request.server, request.token) for request in hub.requests}
    assert sent == {("hub", "Bearer hf_sesame"), ("content", None)}
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("etude")]
    assert ours
    assert not any("sesame" in text or "signed-secret" in text for text in ours)
    assert "sesame" not in repr(model)


@pytest.mark.parametrize(
    ("uri", "token", "words"),
    [
        ("hf://org/tiny@absent", "t", ["NotFound", "RevisionNotFound"]),
        ("hf://org/other@main", "t", ["NotFound", "HF_ENDPOINT"]),
        (URI, None, ["Forbidden", "HF_TOKEN is not set"]),
        (URI, "wrong", ["gated", "accept the model's terms"]),
    ],
)
def test_a_hub_that_refuses_is_quoted_with_a_fix(
    hub: Hub, tmp_path: Path, uri: str, token: str | None, words: list[str]
) -> None:
    hub.token = "t"
    text = refusal(hub, tmp_path, token=token, uri=uri)
    assert all(word in text for word in words), text


def test_a_busy_hub_is_asked_again_when_it_says(hub: Hub, store: Store, tmp_path: Path) -> None:
    hub.faults["/api/"] = [Fault(status=429, headers=(("Retry-After", "1"),))]
    hub.faults["tokenizer.json"] = [Fault(status=503), Fault(status=500)]
    start_s = time.monotonic()
    copy_model(open_it(hub), store, scratch=tmp_path)
    assert time.monotonic() - start_s >= 1


def test_a_hub_that_stays_away_is_an_error_that_a_restart_may_end(hub: Hub) -> None:
    hub.faults["/api/"] = [Fault()] * 3
    with pytest.raises(HubError, match="answered 503, 3 times in a row"):
        open_it(hub)


def test_a_body_that_breaks_off_is_asked_for_again(hub: Hub, store: Store, tmp_path: Path) -> None:
    hub.faults["signed-secret"] = [Fault(sent_bytes=100)]
    copy_model(open_it(hub), store, scratch=tmp_path)
    assert len(hub.ranges("model.safetensors")) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_content_with_another_digest_is_refused_and_deleted(
    hub: Hub, store: Store, tmp_path: Path, name: str
) -> None:
    hub.wrong_digests = frozenset({name})
    with pytest.raises(CorruptError, match="was promised"):
        copy_model(open_it(hub), store, scratch=tmp_path)
    assert not list((tmp_path / "models").rglob(f"{name}.part*"))
    assert not any(info.key.endswith(name) for info in store.list("models/"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.safetensors": None}, ["pytorch_model.bin", "may run code"]),
        (
            {"model.safetensors": None, "tiny.Q4_1.gguf": b"GGUF"},
            ["GGUF", "examples/smollm2/convert.py"],
        ),
        ({"config.json": None}, ["no config.json"]),
        ({"config.json": b"[]"}, ["no JSON object"]),
        (
            {"config.json": b'{"auto_map": {"AutoModelForCausalLM": "modeling_tiny.Tiny"}}'},
            ["auto_map AutoModelForCausalLM: modeling_tiny.Tiny", "no trust_remote_code"],
        ),
        (
            {"tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["t.T", null]}}'},
            ["tokenizer_config.json", "auto_map"],
        ),
        (
            {"model.safetensors.index.json": json.dumps({"weight_map": {"a": "x.st"}}).encode()},
            ["1 files that are absent", "x.st"],
        ),
    ],
)
def test_a_model_with_code_pickles_or_missing_shards_is_refused_by_name(
    hub: Hub, tmp_path: Path, changes: dict[str, bytes | None], words: list[str]
) -> None:
    for name, data in changes.items():
        if data is None:
            del hub.files[name]
        else:
            hub.files[name] = data
    text = refusal(hub, tmp_path)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "uri",
    ["hf://org", "hf://org/a/b", "hf://org/a@", "hf://org/..@main", "hf://o/a@../x", "hf://o/a b"],
)
def test_a_uri_of_another_form_is_refused(uri: str) -> None:
    with pytest.raises(UserError, match="hf://organisation/name@revision"):
        parse_hub_uri(uri)


KILLED = """
    import sys
    from pathlib import Path
    from etude.common.blobs import open_store
    from etude.common.model_sources import parts
    from etude.common.model_sources.hub import open_hub_model
    from etude.common.model_sources.hub_access import HubAccess
    from etude.common.hub_uri import parse_hub_uri
    from etude.common.model_sources.mirror import copy_model
    parts.PARTS_AT_ONCE = 1
    endpoint, store, scratch = sys.argv[1:]
    model = open_hub_model(parse_hub_uri("hf://org/tiny@main"), HubAccess(endpoint=endpoint))
    copy_model(model, open_store(store), scratch=Path(scratch), part_bytes=1000)
"""


def kill_before_part(number: int, arguments: list[str], hub: Hub) -> list[str | None]:
    """Start a copy, kill it while it asks for a part; ranges that it was sent."""
    process = subprocess.Popen(arguments)
    deadline_s = time.monotonic() + 60
    while len(hub.ranges("model.safetensors")) <= number:
        assert time.monotonic() < deadline_s
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return hub.ranges("model.safetensors")[:number]


def test_after_kill_9_the_parts_that_are_there_are_not_fetched_again(
    hub: Hub, store: Store, tmp_path: Path
) -> None:
    arguments = [sys.executable, "-c", textwrap.dedent(KILLED)]
    arguments += [hub.endpoint, store.url, str(tmp_path)]
    # The seventh part never comes: the process is killed while it waits.
    late = Fault(headers=(("Retry-After", "60"),))
    hub.faults["signed-secret/model.safetensors bytes=6000-"] = [late]
    before = kill_before_part(6, arguments, hub)
    assert not [info.key for info in store.list("") if info.key.endswith(".safetensors")]
    (journal,) = (tmp_path / "models").rglob("model.safetensors.parts")
    with journal.open("a") as lines:
        lines.write('[9, "torn')
    with journal.with_suffix(".part").open("r+b") as partial:  # a part that missed the disk
        partial.seek(2000)
        partial.write(bytes(1000))
    asked = len(hub.requests)

    subprocess.run(arguments, check=True, timeout=60)

    resumed = [r for r in hub.requests[asked:] if r.server == "content"]
    assert set(before) & {r.range for r in resumed} == {"bytes=2000-2999"}
    (key,) = [info.key for info in store.list("models/") if info.key.endswith(".safetensors")]
    assert store.get(key) == WEIGHTS


def test_a_folder_is_copied_by_its_content(hub: Hub, store: Store, tmp_path: Path) -> None:
    source = tmp_path / "tiny"
    source.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (source / name).write_bytes(FILES[name])
    (source / "notes.txt").write_text("not copied")
    model = open_store_model(source.as_uri(), StoreAccess(), with_digests=True)
    seen: list[tuple[int, int]] = []
    prefix = copy_model(model, store, scratch=tmp_path, progress=lambda *n: seen.append(n))
    total = sum(file.size for file in model.files)
    assert seen[-1] == (total, total)
    assert {info.key for info in store.list(f"{prefix}/")} == {
        f"{prefix}/{file.name}" for file in model.files
    }
    again = open_store_model(source.as_uri(), StoreAccess(), with_digests=True)
    assert copy_model(again, store, scratch=tmp_path) == prefix
    (source / "config.json").write_bytes(b'{"model_type": "qwen2"}')
    changed = open_store_model(source.as_uri(), StoreAccess(), with_digests=True)
    assert copy_model(changed, store, scratch=tmp_path) != prefix


def test_parts_cover_files_of_every_size(hub: Hub, tmp_path: Path) -> None:
    for size in (0, 1, 99, 100, 101, 250):
        hub.files["tokenizer.json"] = bytes(range(size))
        model = open_it(hub)
        file = next(f for f in model.files if f.name == "tokenizer.json")
        partial = parts.PartialFile(
            model=model, file=file, folder=tmp_path / str(size), part_bytes=100
        )
        partial.download(lambda _: None)
        assert partial.path.read_bytes() == bytes(range(size))


def test_an_engine_reads_the_copy_as_soon_as_the_trainer_has_made_it(
    hub: Hub, store: Store, tmp_path: Path
) -> None:
    spec = {
        "model": {"uri": URI, "secretRef": {"name": "hub"}, "seed": 3},
        "storage": {"uri": store.url},
        "phases": [
            {
                "name": "sft",
                "type": "SupervisedFineTuning",
                "maxSteps": 1,
                "optimizer": {"learningRate": "1e-3"},
                "data": [{"name": "traces", "uri": "s3://inputs/traces.jsonl"}],
            }
        ],
        "roles": {"trainer": {}},
    }
    run = ResolvedRun.model_validate({"name": "r", "uid": "u", "spec": spec})
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(with_model_folder, run, limit_s=60)
        folder = mirror_run_model(URI, store, scratch=tmp_path, access=access(hub))
        resolved = engine.result(60)
    assert resolved.spec.model.folder == folder
    assert resolved.spec.model.seed == 3
    assert resolved.spec.model.secret_ref is None
