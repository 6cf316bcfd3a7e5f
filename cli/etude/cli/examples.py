"""Two examples for each verb, shown at the end of its help."""

EXAMPLES = {
    "demo": ("etude demo", "etude demo --seed 1 --dir runs/second"),
    "run": (
        "etude tasks generate runs/mine/inputs/etude/demo",
        "etude run examples/demo/rlrun.yaml --dir runs/mine",
    ),
    "watch": ("etude watch demo", "etude watch runs/mine --plain"),
    "stop": ("etude stop demo", "etude stop runs/mine --now"),
    "logs": ("etude logs demo", "etude logs demo --role inference --follow"),
    "report": ("etude report demo", "etude report runs/mine --open"),
    "audit": ("etude audit demo", "etude audit runs/mine"),
    "replay": ("etude replay demo --step 12", "etude replay runs/mine --step 3 --json"),
    "eval": ("etude eval examples/evalrun.yaml runs/mine",),
    "compare": (
        "etude compare demo@0 demo",
        "etude compare runs/served runs/next --margin success=0.02 --margin seconds=5",
    ),
    "doctor": ("etude doctor", "etude doctor --dir /big/disk --json"),
    "lint": ("etude lint examples/demo/rlrun.yaml", "etude lint manifests/*.yaml"),
    "rescore": (
        "etude rescore demo --rewards shorter.yaml",
        "etude rescore demo --rewards rlrun.yaml --first-step 20 --limit 50 --json",
    ),
    "plan": (
        "etude plan examples/qwen2.5-7b/rlrun.yaml",
        "etude plan rlrun.yaml --model ./Qwen2.5-7B-Instruct --gpu-gib 141 --json",
    ),
    "serve": ("etude serve runs/demo", "curl -s localhost:8000/v1/models"),
    "promote": (
        "etude promote --reason 'complaints were about the font'",
        "etude promote 4f0c@1.40 --without-gate --key-file admin.key",
    ),
    "rollback": ("etude rollback", "etude rollback 1.41 --reason 'deletes tests'"),
    "freeze": ("etude freeze", "etude freeze --reason 'holidays' --key-file admin.key"),
    "unfreeze": ("etude unfreeze", "etude unfreeze --at feedback.lab:7061"),
    "release propose": ("etude release propose held-out demo --key-file admin.key",),
    "release status": ("etude release status", "etude release status --json"),
    "agent": ("etude agent work . --gateway https://gateway.example.com --model code-7b",),
    "agent work": (
        "etude agent work . --gateway https://gateway.example.com --model code-7b",
        "etude agent work app --model code-7b --yes --commands 'Fix add.'",
        "etude agent work app --model code-7b --pool demo 'Fix add.' 'Test sub.'",
    ),
    "agent patches": ("etude agent patches", "etude agent patches --json"),
    "agent accept": ("etude agent accept 3f2a",),
    "agent reject": ("etude agent reject 3f2a",),
    "agent consent": (
        "etude agent consent",
        "etude agent consent --feedback https://f.lab --tenant t --user u --terms v1",
    ),
    "agent replay": (
        "etude agent replay 3f2a runs/demo --folder app --model m --tenant t --terms v",
    ),
    "agent observe": ("etude agent observe", "etude agent observe --state ~/.agent-state"),
    "generate": (
        "etude tasks generate small --train 32",
        "etude tasks generate suite --suite sessions --held-out 64",
    ),
    "from-sessions": (
        "etude tasks from-sessions --review r.yaml --tenant acme --terms 2026-11",
        "etude tasks from-sessions --review r.yaml --repo shop.bundle --out tasks",
    ),
    "withdrawn": ("etude tasks withdrawn --terms 2026-11",),
    "show": ("etude tasks show runs/inputs/tasks/train/train-0000", "etude tasks show my-task"),
    "init": (
        "etude storage init s3://runs --endpoint http://127.0.0.1:9000",
        "etude storage init s3://my-runs/team --region eu-central-1",
    ),
    "check": (
        "etude storage check s3://runs --endpoint http://127.0.0.1:9000",
        "etude storage check file:///srv/runs",
    ),
    "model import": (
        "etude model import hf://Qwen/Qwen3-8B@main --to s3://runs",
        "etude model import runs/smollm2/inputs/etude/smollm2/model --to s3://runs/team",
    ),
    "model evaluate": (
        "etude model evaluate ./base-7b ./base-14b --text ./repository",
        "etude model evaluate ./base-7b --questions questions.jsonl --json",
    ),
    "model add-head": ("etude model add-head Qwen2.5-0.5B --to Qwen2.5-0.5B-mtp",),
    "model inspect": (
        "etude model inspect runs/smollm2/inputs/etude/smollm2/model",
        "etude model inspect hf://Qwen/Qwen3-8B",
    ),
    "ls": ("etude weights ls demo", "etude weights ls s3://runs/demo --json"),
    "objects": (
        "etude weights objects demo newest",
        "etude weights objects s3://runs/demo 1.37 --json",
    ),
    "diff": ("etude weights diff demo 1.0 newest", "etude weights diff runs/mine 1.3 1.4"),
    "export": (
        "etude weights export demo newest exported",
        "etude weights export s3://runs/demo 1.37 exported --model runs/inputs/model",
    ),
    "weights verify": ("etude weights verify demo", "etude weights verify s3://runs/demo"),
    "images build": (
        "etude images build examples/images/python.yaml",
        "etude images build my-image.yaml --cache /srv/images",
        "etude images build my-task/environment --into s3://runs/layouts",
    ),
    "images pull": (
        "etude images pull ghcr.io/acme/shop:1.4 --machine python",
        "etude images pull ghcr.io/acme/shop:1.4 --machine python --credentials a.json",
    ),
    "images ls": ("etude images ls", "etude images ls --json"),
    "images rm": (
        "etude images rm python --dry-run",
        "etude images rm s3://runs/4d38fd4e901842fb10783039fde92798 --pools pools.yaml",
    ),
    "images prune": (
        "etude images prune --older-than 30",
        "etude images prune s3://runs/images --pools pools.yaml --dry-run",
    ),
    "images push": (
        "etude images push python s3://runs/images --endpoint http://127.0.0.1:9000",
        "etude images push 4d38fd4e901842fb10783039fde92798 s3://my-runs/images",
    ),
    "env create": (
        "etude env create demo",
        "etude env create 127.0.0.1:7020 --template python --workspace ./my-project",
    ),
    "env ls": ("etude env ls", "etude env ls --run demo --json"),
    "env exec": (
        "etude env exec cli-4f python3 -c 'print(6 * 7)'",
        "etude env exec --env COLOUR=blue cli-4f sh -c 'cat > notes.txt' < notes.txt",
    ),
    "env shell": ("etude env shell cli-4f", "etude env shell --cwd src cli-4f"),
    "env snapshot": (
        "etude env snapshot cli-4f before",
        "etude env snapshot cli-4f step-2 --share",
    ),
    "env rollback": ("etude env rollback cli-4f before", "etude env rollback cli-4f step-2"),
    "env restore": (
        "etude env restore cli-7a cli-4f-before@0a1b2c",
        'etude env restore cli-7a "$(etude env snapshot cli-4f step-2 --share)"',
    ),
    "env fork": ("etude env fork cli-4f", "etude env fork cli-4f --count 4"),
    "env rm": ("etude env rm cli-4f", "etude env rm cli-4f cli-7a"),
    "verify": (
        "etude tasks verify examples/tasks",
        "etude tasks verify mine --driver qemu-microvm --image python --json",
    ),
    "mine": (
        "etude tasks mine ~/src/shop --out mined",
        "etude tasks mine ~/src/shop --out mined --with .deps --tasks 100 --jobs 4",
    ),
    "tasks audit": ("etude tasks audit examples/tasks", "etude tasks audit mine --images"),
    "tasks lint": ("etude tasks lint examples/tasks", "etude tasks lint mine --json"),
    "import swebench": (
        "etude tasks import swebench rows.jsonl --repositories mirrors --out mine",
        "etude tasks import swebench x.jsonl --repositories m --out o --image py",
    ),
    "import verifiers": (
        "etude tasks import verifiers rows.jsonl --tests tests --out mine",
        "etude tasks import verifiers traces.jsonl --out mine",
    ),
    "import installed": (
        "etude tasks import installed acme.Katas katas.json --out mine",
        "etude tasks import installed acme.Katas ~/katas --out mine",
    ),
    "traces": ("etude tasks traces demo", "etude tasks traces runs/mine --model runs/model"),
    "experiment simulate": (
        "etude experiment simulate --base 0.6 --effect 0.0137 --users 20000",
        "etude experiment simulate --base 0.02 --effect 0.01 --users 4000 --looks 20",
    ),
    "feedback find-subject": (
        "etude feedback find-subject alice --tenant acme",
        "etude feedback find-subject alice --tenant acme --run-store s3://run",
    ),
    "feedback delete-subject": (
        "etude feedback delete-subject alice --tenant acme --url https://acme.com",
        "etude feedback delete-subject bob --tenant acme --url http://127.0.0.1:70",
    ),
    "feedback sql": (
        "etude feedback sql 'SELECT kind, count(*) FROM events GROUP BY kind' --csv",
        "etude feedback sql 'DESCRIBE outcomes' --store s3://my-route",
    ),
    "import harbor": (
        "etude tasks import harbor downloads/my-dataset --out mine",
        "etude tasks import harbor one --out mine --build s3://runs/layouts",
        "etude tasks import harbor downloads/terminal-bench --out mine --pin",
        "etude tasks import harbor examples/tasks --out mine --files",
    ),
}


def epilog(verb: str) -> str:
    """The examples of a verb as the last paragraph of its help."""
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in EXAMPLES[verb])
