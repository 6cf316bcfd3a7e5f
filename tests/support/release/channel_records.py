"""Records of channels, as the feedback service appends them."""

from dataclasses import dataclass

from etude.common.blobs import Store
from etude.common.release.channels import (
    ChannelExperiment,
    ChannelRecord,
    ServedVersion,
    append_record,
)


@dataclass
class ChannelWriter:
    """Appends the decisions about one channel."""

    store: Store
    channel: str
    run_uid: str = "uid-run"
    number: int = 0
    """Of the newest record."""

    def serve(
        self, number: int | None, *, epoch: int = 1, experiment: ChannelExperiment | None = None
    ) -> ChannelRecord:
        """Serve a version from now on, or nothing."""
        served = None
        if number is not None:
            served = ServedVersion(run_uid=self.run_uid, epoch=epoch, number=number)
        self.number += 1
        record = ChannelRecord(
            channel=self.channel,
            number=self.number,
            served=served,
            experiment=experiment,
            action="Promote",
            sentence="decided by a test",
            decided_ms=self.number,
        )
        return append_record(self.store, record)
