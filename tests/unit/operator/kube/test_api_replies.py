"""What an API server means by its answers to a write."""

import pytest

from etude.operator.kube.interface import ApiRejectedError, ClusterError
from etude.operator.kube.rest import ApiReply, parse_write_reply

QUANTITY = (
    "failed to convert new object (lab/demo-trainer; apps/v1, Kind=StatefulSet) to proper version:"
    " unable to convert unstructured object to apps/v1, Kind=StatefulSet: quantities must match the"
    " regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
)
UNKNOWN = (
    "failed to create typed patch object (lab/demo-trainer; apps/v1, Kind=StatefulSet):"
    " .spec.template.spec.nonesuch: field not declared in schema"
)


@pytest.mark.parametrize("message", [QUANTITY, UNKNOWN])
def test_what_is_no_such_object_is_refused_although_the_server_calls_it_its_own_error(
    message: str,
) -> None:
    reply = ApiReply(500, {"reason": "InternalError", "message": message})
    with pytest.raises(ApiRejectedError, match="StatefulSet"):
        parse_write_reply(reply, "StatefulSet lab/demo-trainer")


def test_an_error_of_the_server_itself_may_be_different_next_time() -> None:
    reply = ApiReply(500, {"reason": "InternalError", "message": "etcdserver: request timed out"})
    with pytest.raises(ClusterError) as caught:
        parse_write_reply(reply, "StatefulSet lab/demo-trainer")
    assert not isinstance(caught.value, ApiRejectedError)
