"""Models that say what their fields are, and cost next to nothing until they are used."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from etude.common.api.field_docs import DocumentedModel


class Engine(DocumentedModel):
    """What turns."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True)

    num_rotors: Annotated[int, Field(ge=1)] = 1
    """How many turn
    at once."""
    name: str


class Turbine(Engine):
    """What turns in a stream."""

    name: str
    """As on its plate."""
    num_rotors: int = 2


def test_the_sentence_under_a_field_describes_it_in_the_schema() -> None:
    rotors = Engine.model_json_schema()["properties"]["numRotors"]
    assert rotors["description"] == "How many turn\nat once."
    assert "description" not in Engine.model_json_schema()["properties"]["name"]


def test_a_field_that_is_said_again_has_the_sentence_of_the_last_word() -> None:
    properties = Turbine.model_json_schema(by_alias=False)["properties"]
    assert properties["name"]["description"] == "As on its plate."
    assert "description" not in properties["num_rotors"]


def test_a_model_within_a_function_is_described_too() -> None:
    class Inner(DocumentedModel):
        size: int
        """In metres."""

    assert Inner.model_json_schema()["properties"]["size"]["description"] == "In metres."


def test_a_model_whose_checks_are_made_at_the_first_value_is_made_once_for_many_threads() -> None:
    class Late(DocumentedModel):
        number: int

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: Late.model_validate({"number": str(n)}), range(64)))
    assert [late.number for late in found] == list(range(64))


def test_importing_the_api_builds_no_check_of_a_run() -> None:
    program = (
        "from etude.common.api.kinds import RLRun, EnvPool\n"
        "assert not RLRun.__pydantic_complete__ and not EnvPool.__pydantic_complete__\n"
    )
    done = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, check=False, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
