"""A bad setting is told by name, before anything heavy is imported."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.common.errors import UserError
from etude.common.role_inputs import ResolvedRun
from etude.inference import serve_command
from etude.inference.settings import EngineOptions, Settings, engine_options, read_folder

MakeRun = Callable[..., ResolvedRun]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "qwen3", "max_position_embeddings": 128, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def make_run(model: Path, tmp_path: Path) -> MakeRun:
    def make(
        inference: dict[str, Any] | None, dtype: str = "Float32", **weights: Any
    ) -> ResolvedRun:
        phase = {
            "name": "sft",
            "type": "SupervisedFineTuning",
            "maxSteps": 1,
            "optimizer": {"learningRate": "1e-3"},
            "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
        }
        spec = {
            "model": {"uri": model.as_uri()},
            "storage": {"uri": (tmp_path / "store").as_uri()},
            "phases": [phase],
            "roles": {} if inference is None else {"inference": inference},
            "weights": {"dtype": dtype, **weights},
        }
        return ResolvedRun.model_validate({"name": "tiny", "uid": "uid-run", "spec": spec})

    return make


def environment(**changes: str) -> dict[str, str]:
    return {"ETUDE_RUN_FILE": "/run.json", "ETUDE_SCRATCH": "/scratch", **changes}


def test_settings_have_the_ports_of_the_role() -> None:
    found = Settings.from_env(environment(OMP_NUM_THREADS="3"))
    assert (found.port, found.http_port, found.probe_port, found.threads) == (7010, 7011, 8080, 3)
    assert found.channel == ""
    assert Settings.from_env(environment(ETUDE_CHANNEL="canary")).channel == "canary"


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"ETUDE_SCRATCH": "/s"}, "ETUDE_RUN_FILE  is not set"),
        ({"ETUDE_RUN_FILE": "/r"}, "ETUDE_SCRATCH  is not set"),
        (environment(ETUDE_PORT="seven"), "ETUDE_PORT  is 'seven'"),
        (environment(ETUDE_PORT="70000"), "ETUDE_PORT  is '70000'"),
        (environment(ETUDE_HTTP_PORT="-1"), "ETUDE_HTTP_PORT  is '-1'"),
        (environment(OMP_NUM_THREADS="0"), "OMP_NUM_THREADS  is '0'"),
        (environment(ETUDE_CHANNEL="../x"), r"ETUDE_CHANNEL  '\.\./x' is no name of a channel"),
    ],
)
def test_a_missing_or_senseless_setting_is_named(env: dict[str, str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Settings.from_env(env)


def test_the_engine_is_built_from_the_run(make_run: MakeRun, model: Path, tmp_path: Path) -> None:
    run = make_run({"maxModelLen": 64, "maxConcurrent": 8, "kvCacheMib": 16}, "BFloat16")
    found = engine_options(run, scratch=tmp_path, threads=2)
    assert (found.model, found.served_name, found.dtype) == (model, "tiny", "bfloat16")
    assert (found.max_model_len, found.max_concurrent) == (64, 8)
    assert (found.kv_cache_bytes, found.gpus, found.follows_store) == (16 << 20, 0, True)
    assert found.environment()["OMP_NUM_THREADS"] == "2"


def test_each_setting_of_weights_reaches_the_engine_as_itself(
    make_run: MakeRun, tmp_path: Path
) -> None:
    def options(**weights: Any) -> EngineOptions:
        return engine_options(make_run({"maxModelLen": 64}, **weights), scratch=tmp_path, threads=1)

    numbers = {"prefixCache": "Sticky", "stickyLag": 5, "undoDepth": 6, "auditEvery": 7}
    found = options(pause="Abort", encoding="Delta", advanced=numbers)
    assert (found.pause, found.may_load) == ("Abort", False)
    assert (found.prefix_cache, found.sticky_lag) == ("Sticky", 5)
    assert (found.undo_depth, found.audit_every) == (6, 7)
    assert options(timeoutSeconds=77).drain_s == 77
    assert not found.recompute_kv
    assert options(advanced={"recomputeKv": True}).recompute_kv
    assert options(encoding="Full").may_load


def test_an_engine_that_is_told_nothing_has_the_defaults_of_the_run(
    make_run: MakeRun, tmp_path: Path
) -> None:
    found = engine_options(make_run({"maxModelLen": 64}), scratch=tmp_path, threads=1)
    names = (
        "pause",
        "drain_s",
        "recompute_kv",
        "prefix_cache",
        "sticky_lag",
        "undo_depth",
        "audit_every",
    )
    alone = {field.name: field.default for field in dataclasses.fields(EngineOptions)}
    assert {name: getattr(found, name) for name in names} == {name: alone[name] for name in names}


def test_a_run_without_an_inference_role_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"roles\.inference  is not set"):
        engine_options(make_run(None), scratch=tmp_path, threads=1)


def test_a_context_longer_than_the_model_has_positions_for_is_refused(
    make_run: MakeRun, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="set it to at most 128"):
        engine_options(make_run({"maxModelLen": 129}), scratch=tmp_path, threads=1)


def test_the_last_extension_of_a_run_bounds_its_engines(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run({"maxModelLen": 512})
    first = run.spec.phases[0].to_json() | {"contextExtension": {"positions": 256}}
    last = first | {"name": "longer", "contextExtension": {"positions": 512}}
    spec = run.spec.to_json() | {"phases": [first, last]}
    longer = ResolvedRun.model_validate({"name": "tiny", "uid": "uid-run", "spec": spec})
    found = engine_options(longer, scratch=tmp_path, threads=1).context_extension
    assert found is not None
    assert found.positions == 512
    shorter = longer.model_copy(
        update={"spec": run.spec.model_validate(spec | {"phases": [last, first]})}
    )
    with pytest.raises(UserError, match="set it to at most 256"):
        engine_options(shorter, scratch=tmp_path, threads=1)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_folder_without_a_part_of_the_model_is_refused_by_its_name(
    model: Path, missing: str
) -> None:
    (model / missing).unlink()
    with pytest.raises(UserError, match=missing):
        read_folder(model)


def test_a_config_that_is_no_json_is_refused(model: Path) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_folder(model)


def test_serving_a_folder_keeps_its_number_format(model: Path) -> None:
    (model / "model.safetensors").touch()
    args = serve_command.parse(["--model", str(model), "--port", "0"])
    found = serve_command.options(args)
    assert (found.dtype, found.served_name, found.follows_store) == ("float32", "model", False)


def test_serving_a_folder_without_weights_is_refused_before_vllm_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", "--model", str(model)])
    monkeypatch.delattr(serve_command, "build_engine")
    with pytest.raises(SystemExit) as ended:
        serve_command.main()
    assert ended.value.code == 4
    said = capsys.readouterr().err
    assert f"{model}  holds no weights" in said
    assert "fix:" in said


@pytest.mark.parametrize("port", ["99999", "-1", "http"])
def test_serving_a_folder_refuses_what_is_no_port(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serve_command.parse(["--model", "folder", f"--port={port}"])
    assert f"'{port}' is not a valid port" in capsys.readouterr().err


def test_the_process_refuses_bad_settings_at_once_and_says_how_to_fix_them() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "etude.inference.main"],
        env={"ETUDE_RUN_FILE": "/nowhere/run.json", "ETUDE_SCRATCH": "/tmp"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 78
    assert "/nowhere/run.json" in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
