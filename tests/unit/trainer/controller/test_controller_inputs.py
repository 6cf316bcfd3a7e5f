"""What a run names is found and checked before anything is started."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.hub_server import Hub, serve_hub
from tests.support.stores.store_faults import Fault, FaultyStore, Schedule
from tokenizers import AddedToken, Tokenizer, models

from etude.agent.chat import CHAT_TEMPLATE, LAYOUT_TOKENS
from etude.common.api.run.spec import Evaluation, RLRunSpec
from etude.common.blobs import MemoryStore, open_store
from etude.common.errors import UserError
from etude.common.role_inputs import ResolvedRun
from etude.common.weights import claim_epoch
from etude.trainer.controller import inputs
from etude.trainer.controller.inputs import find_inputs
from etude.trainer.controller.phases.evaluation import due_pass
from etude.trainer.main import main
from etude.trainer.settings import Settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in LAYOUT_TOKENS])
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (tmp_path / "model" / "config.json").write_text("{}")
    for number in range(6):
        (tmp_path / "tasks" / f"t{number}").mkdir(parents=True)
        (tmp_path / "tasks" / f"t{number}" / "task.toml").write_text("")
        (tmp_path / "tasks" / f"t{number}" / "instruction.md").write_text("Fix add.")
    return tmp_path


def spec(folder: Path, **changed: Any) -> dict[str, Any]:
    task_set = {"name": "train", "uri": f"file://{folder}/tasks", "environment": "repos"}
    pool = {"templates": [{"name": "python", "trust": "Trusted"}]}
    phase = {
        "name": "rl",
        "type": "ReinforcementLearning",
        "maxSteps": 3,
        "optimizer": {"learningRate": "1e-3"},
        "tasks": [task_set],
        "algorithm": {"promptsPerStep": 2, "groupSize": 2},
        **changed,
    }
    return {
        "model": {"uri": f"file://{folder}/model"},
        "storage": {"uri": f"file://{folder}/run"},
        "phases": [phase],
        "roles": {
            "inference": {},
            "environments": [{"name": "repos", "template": "python", "poolTemplate": pool}],
            "rewards": {"functions": [{"name": "success", "function": "Verifier"}]},
        },
    }


def environment(folder: Path) -> dict[str, str]:
    return {
        "ETUDE_RUN_FILE": str(folder / "run.json"),
        "ETUDE_SCRATCH": str(folder / "scratch"),
        "ETUDE_INFERENCE_TARGETS": "a:1, b:2",
        "ETUDE_REWARDS_TARGET": "r:1",
        "ETUDE_BROKERS": json.dumps({"repos": "b:1"}),
    }


def find(folder: Path, given: dict[str, Any]) -> Any:
    resolved = ResolvedRun.model_validate({"name": "r", "uid": "u", "spec": given})
    return find_inputs(resolved, Settings.from_env(environment(folder)))


def test_everything_that_is_there_is_found(folder: Path) -> None:
    found = find(folder, spec(folder))
    assert len(found.task_sets.orders["rl"]) == 6
    assert found.model_folder == folder / "model"


def test_a_phase_that_would_run_out_of_tasks_is_refused_before_it_starts(folder: Path) -> None:
    with pytest.raises(UserError, match=r"phase rl.*needs 8 tasks.*there are 6"):
        find(folder, spec(folder, maxSteps=4))


def test_phases_that_share_their_tasks_must_have_enough_for_all(folder: Path) -> None:
    given = spec(folder, maxSteps=2)
    given["phases"].append({**given["phases"][0], "name": "more"})
    with pytest.raises(UserError, match=r"phase more.*needs 4 tasks.*there are 2"):
        find(folder, given)
    given["phases"][1]["maxSteps"] = 1
    assert len(find(folder, given).task_sets.orders["more"]) == 6


def test_positions_that_the_model_cannot_have_are_refused_before_it_starts(folder: Path) -> None:
    given = spec(folder)
    sft = {
        "name": "sft",
        "type": "SupervisedFineTuning",
        "maxSteps": 1,
        "optimizer": {"learningRate": "1e-3"},
        "data": [{"name": "traces", "uri": f"file://{folder}/traces.jsonl"}],
    }
    given["phases"] = [sft, sft | {"name": "longer", "contextExtension": {"positions": 256}}]
    file = folder / "model" / "config.json"
    for config, reason in (
        ({}, "lacks max_position_embeddings"),
        ([], "lacks max_position_embeddings"),
        ({"max_position_embeddings": 512}, "has 512 positions already"),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3"}}, "type llama3"),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "yarn"}}, "lacks original_max"),
    ):
        file.write_text(json.dumps(config))
        with pytest.raises(UserError, match=rf"phases\[1\]\.contextExtension.*{reason}"):
            find(folder, given)
    file.write_text(json.dumps({"max_position_embeddings": 64, "rope_theta": 10_000.0}))
    assert find(folder, given).model_folder == folder / "model"


def test_new_tokens_beside_adapters_are_refused_before_a_run_starts(folder: Path) -> None:
    given = spec(folder)
    given["model"]["addTokens"] = ["<|call|>"]
    given["roles"]["trainer"] = {**given["roles"].get("trainer", {}), "lora": {}}
    with pytest.raises(UserError, match=r"roles\.trainer\.lora.*model\.addTokens"):
        find(folder, given)


def test_a_mistake_in_an_evaluation_refuses_a_run_that_has_not_begun(folder: Path) -> None:
    given = spec(folder)
    task_set = {**given["phases"][0]["tasks"][0], "uri": f"file://{folder}/typo"}
    given["evaluation"] = [{"name": "late", "tasks": task_set, "phase": "rl"}]
    with pytest.raises(UserError, match="typo"):
        find(folder, given)
    store = open_store(given["storage"]["uri"])
    claim_epoch(store, holder="t", parent=None, reason="start")
    assert find(folder, given).task_sets.evaluations == {}
    assert not (folder / "typo").exists()


def test_storage_that_cannot_be_made_ends_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = spec(folder) | {"storage": {"uri": f"file://{folder}/model/config.json/run"}}
    (folder / "run.json").write_text(json.dumps({"name": "r", "uid": "u", "spec": given}))
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 78
    assert "storage.uri" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (Fault.UNAVAILABLE, 75, "StoreError: memory://: create: "),
        (Fault.DENIED, 1, "StoreRefusedError: memory://: create: "),
    ],
)
def test_a_store_that_does_not_answer_has_an_exit_code_that_one_that_says_no_has_not(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: Fault,
    code: int,
    words: str,
) -> None:
    (folder / "run.json").write_text(json.dumps({"name": "r", "uid": "u", "spec": spec(folder)}))
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    store = FaultyStore(MemoryStore(), Schedule(rates={fault: 1}))
    monkeypatch.setattr(inputs, "open_run_store", lambda *_: store)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert words in capsys.readouterr().err


def test_a_missing_model_is_named(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()
    with pytest.raises(UserError, match=r"model.uri.*config.json"):
        find(folder, spec(folder))


def test_a_wrong_tokenizer_is_named(folder: Path) -> None:
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "model/tokenizer.json"))
    with pytest.raises(UserError, match="lacks the tokens of the Plain template"):
        find(folder, spec(folder))


def test_settings_are_read_and_checked_against_the_run(folder: Path) -> None:
    settings = Settings.from_env(environment(folder))
    assert settings.inference_targets == ("a:1", "b:2")
    assert settings.ray_address is None
    joined = Settings.from_env({**environment(folder), "RAY_ADDRESS": "head:6379"})
    assert joined.ray_address == "head:6379"
    run = RLRunSpec.model_validate(spec(folder))
    settings.check(run)
    for name in ("ETUDE_INFERENCE_TARGETS", "ETUDE_REWARDS_TARGET", "ETUDE_BROKERS"):
        changed = {k: v for k, v in environment(folder).items() if k != name}
        with pytest.raises(ValueError, match=name):
            Settings.from_env(changed).check(run)


@pytest.mark.parametrize(
    ("name", "value"), [("ETUDE_PORT", "-1"), ("ETUDE_PORT", "70000"), ("ETUDE_BROKERS", "[1]")]
)
def test_a_setting_that_cannot_be_read_is_named(folder: Path, name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        Settings.from_env(environment(folder) | {name: value})


def test_a_missing_setting_is_named(folder: Path) -> None:
    with pytest.raises(KeyError, match="ETUDE_RUN_FILE"):
        Settings.from_env({})


def evaluation(**changed: Any) -> Evaluation:
    task_set = {"name": "t", "uri": "file:///t", "environment": "e"}
    fields = {"name": "held-out", "tasks": task_set, "phase": "rl", "everySteps": 10, "limit": 2}
    return Evaluation.model_validate({**fields, **changed})


def test_the_first_and_the_last_evaluation_take_all_tasks_and_a_greedy_pass() -> None:
    for step in (0, 25):
        assert due_pass(evaluation(), step=step, last_step=25) == (None, True)


def test_evaluations_between_are_limited_and_sampled_only() -> None:
    assert due_pass(evaluation(), step=10, last_step=25) == (2, False)
    assert due_pass(evaluation(), step=11, last_step=25) is None


@pytest.mark.parametrize(("greedy", "expected"), [("Always", True), ("Never", False)])
def test_the_greedy_pass_follows_its_setting(greedy: str, *, expected: bool) -> None:
    found = due_pass(evaluation(greedy=greedy), step=10, last_step=25)
    assert found is not None
    assert found.is_greedy is expected


def test_a_model_on_a_hub_is_read_from_its_copy_in_the_runs_store(folder: Path) -> None:
    files = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    with serve_hub(Hub("org/tiny", files)) as hub:
        given = {**spec(folder), "model": {"uri": "hf://org/tiny@v1/0"}}
        resolved = ResolvedRun.model_validate({"name": "r", "uid": "u", "spec": given})
        env = {**environment(folder), "HF_ENDPOINT": hub.endpoint}
        found = find_inputs(resolved, Settings.from_env(env))
        assert found.model_folder.parent == folder / "run" / "models"
        assert (found.model_folder / "config.json").read_text() == "{}"
        asked = len(hub.requests)
        again = find_inputs(resolved, Settings.from_env(environment(folder)))
        assert again.model_folder == found.model_folder
        assert len(hub.requests) == asked


def test_the_models_own_tool_format_is_refused_by_the_field_if_it_has_none(folder: Path) -> None:
    given = spec(folder, rollout={"toolFormat": "Native"})
    with pytest.raises(UserError, match=r"rollout.toolFormat(.|\n)*fix: set .*toolFormat: Xml"):
        find(folder, given)


def test_a_base_model_gets_a_template_and_its_tokens_when_asked(folder: Path) -> None:
    model = folder / "model"
    (model / "chat_template.jinja").unlink()
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(model / "tokenizer.json"))
    (model / "config.json").write_text('{"vocab_size": 1, "eos_token_id": 0}')
    given = spec(folder)
    with pytest.raises(UserError, match=r"fix: .*model.chat.template: Plain"):
        find(folder, given)
    given["model"]["chat"] = {"template": "Plain"}
    with pytest.raises(UserError, match=r"fix: set model.addTokens: \['<\|system\|>', "):
        find(folder, given)
    given["model"]["addTokens"] = list(LAYOUT_TOKENS)
    found = find(folder, given)
    assert found.chat.vocab_size == 1 + len(LAYOUT_TOKENS)
    assert found.chat.end_ids == {0, found.chat.vocabulary.token_id("<|end|>")}
    assert found.model_folder.parent == folder / "run" / "models"
    assert not (model / "chat_template.jinja").exists()
