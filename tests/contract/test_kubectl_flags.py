"""The plugin takes every flag that kubectl itself takes with any command."""

import re
import subprocess

from tests.support import needs
from tests.support.chart import helm

from etude.cli.kubectl.flags import SWITCHES, VALUED

OPTION = re.compile(r"^    (?:(-\w), )?(--[\w-]+)=(.*):$", re.MULTILINE)
LEFT_OUT = {"--version"}
"""It would have kubectl print its version in place of an answer."""


def options() -> str:
    """What `kubectl options` of the testbed's kubectl prints."""
    program = helm.tool("kubectl")
    if not program.exists():
        needs.skip("the testbed is not built: make testbed", "cluster")
    words = (str(program), "options")
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout


def test_the_flags_of_kubectl_are_those_that_its_options_name() -> None:
    found = OPTION.findall(options())
    switches = {long for _, long, value in found if value == "false"}
    valued = {flag for *flags, value in found if value != "false" for flag in flags if flag}
    assert switches - LEFT_OUT == SWITCHES
    assert valued == VALUED
