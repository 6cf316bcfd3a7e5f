"""A task that names an image is leased on a template that boots it, or refused."""

import asyncio
from collections.abc import Sequence

import pytest
from tests.support.environments.brokers import launched, request
from typing_extensions import override

from etude.common.api.pool.images import TaskImages
from etude.common.api.pool.spec import EnvPoolSpec, Template
from etude.common.errors import InvalidFieldError
from etude.envserver.broker import dispatcher
from etude.envserver.broker.broker import REBUILD_S, Broker
from etude.envserver.broker.host_client import MemoryHostClient
from etude.envserver.broker.launch_admission import has_image, with_image_template
from etude.v1 import environments_pb2

ADDRESS = "ca441c013a87f678296e771e0cde09ea"
TEMPLATES = (
    Template(name="python"),
    Template(name="django-4", image=f"s3://runs/images/{ADDRESS}"),
    Template(name="local", image="sympy-1"),
    Template(name="again", image="sympy-1"),
    Template(name="folder", image="file:///images/flask-2"),
)
SPEC = EnvPoolSpec(templates=TEMPLATES, images=TaskImages(sources=("ghcr.io/acme",)))
DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("image", "template"),
    [
        ("", "python"),
        ("django-4", "django-4"),
        (ADDRESS, "django-4"),
        (f"s3://runs/images/{ADDRESS}", "django-4"),
        ("sympy-1", "local"),
        ("flask-2", "folder"),
    ],
)
def test_an_image_is_known_by_name_by_address_and_by_its_templates_name(
    image: str, template: str
) -> None:
    assert with_image_template(request(image=image), SPEC).template == template


def test_the_template_that_a_run_names_stays_where_it_has_the_image() -> None:
    asked = request(image="sympy-1", template="again")
    assert with_image_template(asked, SPEC) is asked


def test_an_image_by_its_digest_is_left_to_the_hosts() -> None:
    asked = request(image=f"ghcr.io/acme/shop@{DIGEST}", template="local")
    assert with_image_template(asked, SPEC) is asked


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (f"ghcr.io/acmee/shop@{DIGEST}", "takes no images of ghcr.io/acmee/shop"),
        (f"evil.io/ghcr.io/acme@{DIGEST}", "takes no images of evil.io"),
        (f"file:///etc@{DIGEST}", "takes no images of file:///etc"),
        ("ghcr.io/acme/shop@latest", "not an image by its digest"),
        (f"acme/shop@{DIGEST}", "host of a registry"),
    ],
)
def test_an_image_from_elsewhere_or_by_a_tag_is_refused(image: str, why: str) -> None:
    with pytest.raises(InvalidFieldError, match=why):
        with_image_template(request(image=image), SPEC)


def test_a_template_without_an_image_boots_none_whatever_its_name_is() -> None:
    assert not has_image(Template(name="python"), "python")


def test_a_pool_without_the_image_says_which_task_needs_what_and_what_to_do() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        with_image_template(request(image="flask-3"), SPEC)
    words = str(caught.value)
    assert "task file:///tasks/1 needs image 'flask-3'" in words
    assert "django-4 (s3://runs/images/" in words
    assert "add a template {name: flask-3, image: s3://…} to spec.templates" in words


async def test_an_environment_is_opened_from_the_template_with_the_image() -> None:
    nodes = MemoryHostClient()
    broker = Broker(EnvPoolSpec(templates=TEMPLATES), nodes, started_s=-REBUILD_S)
    told = nodes.heartbeat("n1")
    told.levels.add(template="local", paused_clones=1)
    broker.heartbeat(told)

    (outcome,) = await launched(broker, request(image="sympy-1"))
    (again,) = await launched(broker, request(image="sympy-1"))

    assert outcome.lease.lease_id == again.lease.lease_id
    level = next(iter(broker.ledger.hosts)).readiness("local")
    assert level.paused_clones == 0  # it was taken from this template's stock
    with pytest.raises(InvalidFieldError, match="needs image 'nowhere'"):
        await launched(broker, request("other", image="nowhere"))


async def test_a_launch_waits_for_the_host_that_pulls_its_image_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "IMAGE_WAIT_S", 0.01)
    nodes = PullingHosts()
    broker = Broker(SPEC, nodes, started_s=-REBUILD_S)
    for name in ("n1", "n2", "n3", "n4", "n5", "n6"):
        told = nodes.heartbeat(name)
        told.images.extend([DIGEST] if name == "n4" else [])
        broker.heartbeat(told)
    pulled = request(image=f"ghcr.io/acme/shop@{DIGEST}", template="local")
    pulling = asyncio.create_task(launched(broker, pulled))
    other = request(idempotency_key="other", template="local")
    (told_other,) = await launched(broker, other)
    assert told_other.HasField("lease")
    assert not pulling.done()
    nodes.is_pulled = True
    (outcome,) = await pulling
    assert outcome.lease.endpoint == "n4"


class PullingHosts(MemoryHostClient):
    """Hosts that are pulling the images of tasks."""

    is_pulled = False

    @override
    async def open(
        self, endpoint: str, request: environments_pb2.OpenEnvironmentsRequest
    ) -> Sequence[environments_pb2.LaunchBatchResponse]:
        if not request.image or self.is_pulled:
            return await super().open(endpoint, request)
        failure = environments_pb2.LaunchFailure(reason="ImageNotReady")
        return [
            environments_pb2.LaunchBatchResponse(index=held.index, failure=failure)
            for held in request.leases
        ]
