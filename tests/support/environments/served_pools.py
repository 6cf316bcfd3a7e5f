"""A broker and a node as processes, served for the time of a test."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from tests.support.environments.pool_client import Pool
from tests.support.environments.pool_processes import Processes

from etude.common.rpc import channels
from etude.envserver.images.built_image import BuiltImage
from etude.v1 import environments_pb2_grpc

ROLES = ("broker", "node")


@contextlib.contextmanager
def of_machines(folder: Path, image: BuiltImage) -> Iterator[Processes]:
    """Processes whose environments are machines of an image, and end with them."""
    made = Processes(folder)
    made.write_pool("Process", "Trusted", driver="QemuMicroVM", image=image.folder.as_uri())
    yield made
    for role in made.running:
        made.stop(role)
    made.end_machines()


@contextlib.asynccontextmanager
async def serving(processes: Processes, source: Path) -> AsyncIterator[Pool]:
    """The pool's client, once both answer; what is not running yet is started.

    Args:
        processes: whose; who made them ends them.
        source: the folder whose files each environment begins with.
    """
    for role in ROLES:
        if role not in processes.running:
            processes.start(role)
    for role in ROLES:
        await processes.ready(role)
    async with channels.dial(f"127.0.0.1:{processes.ports['broker']}") as channel:
        broker = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        yield Pool(broker, environments_pb2_grpc.PoolServiceStub(channel), source.as_uri())


def greeting(folder: Path) -> Path:
    """The files of a task whose one script greets wrongly."""
    source = folder / "task" / "environment"
    source.mkdir(parents=True)
    (source / "greet.sh").write_text("echo helo\n")
    return source
