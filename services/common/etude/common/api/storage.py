"""Object store of a run or a pool: where it is, and the Secret that opens it."""

from typing import Annotated

from pydantic import Field

from etude.common.api.meta import Model, NameRef, Uri
from etude.common.store_urls import ENDPOINT, REGION


class StoreAccess(Model):
    """Access of pods to an object store."""

    endpoint: Annotated[str, Field(max_length=512, pattern=ENDPOINT)] | None = None
    """S3 endpoint, for stores other than AWS."""
    region: Annotated[str, Field(max_length=64, pattern=REGION)] | None = None
    """S3 region."""
    secret_ref: NameRef | None = None
    """Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, mounted into the pods."""


class Storage(StoreAccess):
    """Location of everything durable of a run."""

    uri: Uri
    """Prefix of the run: s3://bucket/prefix, or file:///folder mounted by every role."""
