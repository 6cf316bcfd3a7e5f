"""Selection of the template that has the image of a task."""

from collections.abc import Sequence

from etude.common.api.pool import Template
from etude.common.errors import InvalidFieldError
from etude.v1 import environments_pb2


def for_image(
    request: environments_pb2.LaunchBatchRequest, templates: Sequence[Template]
) -> environments_pb2.LaunchBatchRequest:
    """The launch request with the template whose image its task needs; unchanged without an image.

    Raises:
        InvalidFieldError: the pool has no such image.
    """
    if not request.image:
        return request
    fitting = [each.name for each in templates if has_image(each, request.image)]
    if not fitting:
        raise InvalidFieldError("image", _refusal(request, templates))
    if request.template in fitting:
        return request
    found = environments_pb2.LaunchBatchRequest()
    found.CopyFrom(request)
    found.template = fitting[0]
    return found


def has_image(template: Template, image: str) -> bool:
    """True if a template's environments boot this image.

    A task names an image as its recipe did. A template names it the same way, by its folder, or by
    its address in a store, which has no name: then the template's own name is the image's.
    """
    if template.image is None:
        return False
    return image in {template.name, template.image, template.image.rpartition("/")[2]}


def _refusal(request: environments_pb2.LaunchBatchRequest, templates: Sequence[Template]) -> str:
    task = request.workspace.uri.removesuffix("/environment")
    present = ", ".join(f"{each.name} ({each.image or 'no image'})" for each in templates)
    return (
        f"task {task} needs image {request.image!r}, and no template of this pool has it:"
        f" {present}. Build it (etude images build), push it, and add a template"
        f" {{name: {request.image}, image: s3://…}} to spec.templates of the pool"
    )
