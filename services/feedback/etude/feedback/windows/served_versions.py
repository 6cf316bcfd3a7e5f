"""Versions that the channels of a route serve, and those that they served."""

from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.blobs import Store
from etude.common.release.channels import CHANNELS, ChannelRecord, read_record
from etude.common.weights import VersionId


class RunVersion(NamedTuple):
    """A version of one run: others that share the store have the same numbers."""

    run_uid: str
    version: VersionId


@dataclass(slots=True)
class ServedVersions:
    """A fold over the records of all channels, read once each; blocks."""

    store: Store
    ever: set[RunVersion] = field(default_factory=set)
    """Versions that a channel ever served."""
    _newest: dict[str, ChannelRecord] = field(default_factory=dict)
    """By channel."""

    @property
    def current(self) -> frozenset[RunVersion]:
        """Versions that a channel serves now."""
        served = (record.served for record in self._newest.values())
        return frozenset(
            RunVersion(each.run_uid, each.version) for each in served if each is not None
        )

    def refresh(self) -> None:
        """Read the records that were appended since the last call.

        Raises:
            CorruptError: a record is damaged.
            StoreError: the store did not answer.
        """
        for info in self.store.list(CHANNELS):
            channel, _, name = info.key.removeprefix(CHANNELS).partition("/")
            digits = name.removesuffix(".json")
            if not (len(digits) == 12 and digits.isascii() and digits.isdecimal()):
                continue
            known = self._newest.get(channel)
            if known is not None and int(digits) <= known.number:
                continue
            record = read_record(self.store, channel, int(digits))
            self._newest[channel] = record
            if record.served is not None:
                self.ever.add(RunVersion(record.served.run_uid, record.served.version))
