"""What the pages say to type for a cluster is typed on a real API server, page by page."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support import pki
from tests.support.kube import testbeds

from etude.common.tls.identity import Identity

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
DOCS = ROOT / "docs"
FIRST = "how-to/run-on-a-cluster"
PAGES = (
    *(FIRST, "how-to/build-container-images", "how-to/upgrade", "how-to/encrypt-the-wire"),
    *("how-to/train-your-own-model", "how-to/serve-a-policy"),
    *sorted(f"runbooks/{page.stem}" for page in (DOCS / "runbooks").glob("*.md")),
)
"""In the order in which a platform goes through them: the first installs what others look at."""
NEEDS = {
    "a node, on which tests/harness/e2e_cluster and test_kubectl_plugin.py do the like": re.compile(
        r"^helm test |^kubectl .*\b(logs|exec|proxy)\b|^kubectl .* get pod NAME-|^kubectl etude "
    ),
    "an operator that leads, as in test_operator.py": re.compile(r"get lease "),
    "certificates that an issuer has signed, as in test_cert_manager.py": re.compile(
        r"get secret NAME-trainer-tls"
    ),
    "no cluster: tests/contract/test_docs.py knows these": re.compile(
        r"^(etude|etude-gateway|etude-feedback|python|buildah|make|openssl) |^[A-Z_]+="
    ),
}
"""Commands that are left out, by what they need."""
LIMIT_S = 120
Shell = Callable[[str], str]


def blocks(page: str) -> Iterator[str]:
    """Every command of a page; a block of bash is one."""
    text = (DOCS / f"{page}.md").read_text()
    for kind, block in re.findall(r"```(sh|bash)\n(.*?)```", text, re.DOTALL):
        if kind == "bash":
            yield f"set -e\n{block}"
            continue
        for line in block.replace("\\\n", " ").splitlines():
            yield line.split("  #")[0].strip()


def commands(page: str) -> list[str]:
    """What of a page can be typed here, with names in place of what stands for a name."""
    shown = [each for each in blocks(page) if each]
    able = [each for each in shown if not any(need.search(each) for need in NEEDS.values())]
    return [each.replace("NAME", "demo") for each in able]


@pytest.fixture(scope="module")
def shell(plane: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A shell in a folder that is a checkout to look at, and has what a reader would have made."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("helm", "examples"):
        (folder / name).symlink_to(ROOT / name)
    good = yaml.safe_load((HERE / "bad_manifests.yaml").read_text())["good"]
    (folder / "rlrun.yaml").write_text(good["RLRun"])
    for name in ("keys", "feedback-keys", "secret"):
        (folder / name).write_text("made by a command that needs no cluster")
    pki.write(folder, pki.Authority().issue(Identity(domain="coder", namespace="lab")))
    paths = os.pathsep.join((plane["binaries"], os.environ["PATH"]))
    environment = {**os.environ, "KUBECONFIG": plane["kubeconfig"], "PATH": paths}

    def run(command: str) -> str:
        done = subprocess.run(
            ("bash", "-o", "pipefail", "-c", command),
            check=False,
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.fixture(scope="module")
def typed(shell: Shell, plane: Mapping[str, Any]) -> dict[str, str]:
    """What each command of the first page, an installation and a run, answered."""
    kubectl = testbeds.program(plane, "kubectl")
    kubectl("apply", "-f", str(HERE / "cert_manager_crd.yaml"))
    answers = {}
    for command in commands(FIRST):
        answers[command] = shell(command)
        if command.startswith("helm install"):
            kubectl("wait", "--for=condition=Established", "crd", "--all")
            testbeds.wait_until_listed(kubectl, "rlruns", "envpools", "checkpoints", "policyroutes")
    good = yaml.safe_load((HERE / "bad_manifests.yaml").read_text())["good"]
    for kind in ("EnvPool", "Checkpoint", "PolicyRoute"):
        kubectl("-n", "lab", "apply", "-f", "-", text=renamed(good[kind]))
    return answers


def renamed(manifest: str) -> str:
    """A manifest under the name that NAME on the pages stands for."""
    content = yaml.safe_load(manifest)
    content["metadata"]["name"] = "demo"
    return yaml.safe_dump(content)


def test_the_first_page_leads_to_an_installation_and_a_run(typed: dict[str, str]) -> None:
    answers = {command.split(" --")[0]: said for command, said in typed.items()}
    assert "STATUS: deployed" in answers["helm install etude helm/etude"]
    assert "demo created" in answers["kubectl -n lab apply -f rlrun.yaml"]
    assert any("describe rlr" in command for command in answers)


@pytest.mark.usefixtures("typed")
@pytest.mark.parametrize("page", PAGES[1:])
def test_every_command_of_the_page_works_as_it_stands(shell: Shell, page: str) -> None:
    for command in commands(page):
        shell(command)


def test_no_command_is_left_out_but_for_what_it_needs() -> None:
    """Every page with commands for a cluster is among those above."""
    about = {
        str(page.relative_to(DOCS).with_suffix(""))
        for page in DOCS.rglob("*.md")
        if re.search(r"```sh\n(?:[^`]*\n)?(helm|kubectl) (?!etude|plugin)", page.read_text())
    }
    assert about <= set(PAGES)
