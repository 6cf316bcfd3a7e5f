"""The operator's process, told to go before it could begin."""

import os
import subprocess
import sys
from pathlib import Path

from etude.operator.settings import PARTS

NOBODY = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {token: t}}]
"""


def test_an_operator_whose_api_server_is_away_ends_when_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(NOBODY)
    settings = {
        **{f"ETUDE_IMAGE_{part.upper()}": "etude:1" for part in PARTS},
        "ETUDE_POD": "operator-0",
        "ETUDE_NAMESPACE": "lab",
        "ETUDE_PROBE_PORT": "0",
        "ETUDE_TLS_MODE": "Plaintext",
        "KUBECONFIG": str(tmp_path / "config"),
    }
    with subprocess.Popen(
        [sys.executable, "-c", "from etude.operator.main import main; main()"],
        env={**os.environ, **settings},
        stderr=subprocess.PIPE,
        text=True,
    ) as operator:
        assert operator.stderr is not None
        # It asks for what there is, and nobody answers.
        assert any("retries in" in line for line in operator.stderr)
        operator.terminate()
        assert operator.wait(timeout=60) == 0
        assert "stopped" in operator.stderr.read()
