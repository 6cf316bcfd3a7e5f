"""Parts of a table in a store: one Parquet object, or a few, for each day.

A part is replaced as a whole, by a longer one or by one without the rows of users who left. Rows
are appended in the order of one column, so that the stored rows themselves say what comes next.
"""

import io
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etude.common.blobs import Store
from etude.common.errors import CorruptError
from etude.common.feedback.tables import PREFIX, PartPlace
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.tables.schema import Row

PART_ROWS = 1 << 16
"""A part of as many rows is not extended."""


@dataclass(slots=True)
class TableParts:
    """Parts of one table; the methods block, and belong to one thread."""

    store: Store
    name: str
    schema: pa.Schema
    """The first field is the order of rows, the second one their time."""
    position: int = field(default=-1, init=False)
    """Largest value of the first field that is stored."""
    _newest: PartPlace | None = field(default=None, init=False)
    """Part that is extended."""

    def __post_init__(self) -> None:
        places = list_parts(self.store, self.name)
        self._newest = places[-1] if places else None
        for place in reversed(places):
            column = self._read(place)[0]
            if len(column):
                self.position = pc.max(column).as_py()
                return

    def append(self, rows: Sequence[Row]) -> None:
        """Append rows, but those that are stored; rows of one position belong into one call.

        Raises:
            CorruptError: the newest part is damaged.
            StoreError: the store did not answer; the call may be repeated.
        """
        order, time = self.schema.names[:2]
        new = [row for row in rows if row[order] > self.position]
        # Days never go back, whatever the clock does: the newest part has the largest position.
        first = self._newest.day if self._newest else ""
        days = itertools.accumulate((day_of(row[time]) for row in new), max, initial=first)
        dated = zip(itertools.islice(days, 1, None), new, strict=True)
        for day, group in itertools.groupby(dated, key=itemgetter(0)):
            self._extend(day, [row for _, row in group])

    def drop_users(self, users: Collection[UserId], *, days: Collection[str] | None = None) -> None:
        """Remove all rows of users.

        Args:
            users: whose rows go.
            days: whose parts are looked at; all by default.

        Raises:
            CorruptError: a part is damaged.
            StoreError: the store did not answer; the call may be repeated.
        """
        pseudonyms = pa.array([user.digest for user in users], pa.string())
        for place in list_parts(self.store, self.name):
            if days is not None and place.day not in days:
                continue
            table = self._read(place)
            kept = table.filter(pc.invert(pc.is_in(table["user"], value_set=pseudonyms)))
            if kept.num_rows < table.num_rows:
                self.store.put(place.key, _encode(kept))

    def _extend(self, day: str, rows: Sequence[Row]) -> None:
        table, place = pa.Table.from_pylist(list(rows), self.schema), self._newest
        if place is None or place.day != day:
            place = PartPlace(self.name, day)
        else:
            stored = self._read(place)
            if stored.num_rows < PART_ROWS:
                table = pa.concat_tables([stored, table])
            else:
                place = place._replace(number=place.number + 1)
        self.store.put(place.key, _encode(table))
        self._newest, self.position = place, rows[-1][self.schema.names[0]]

    def _read(self, place: PartPlace) -> pa.Table:
        where = f"{self.store.url}/{place.key}"
        try:
            table = pq.read_table(io.BytesIO(self.store.get(place.key)))
            return table.select(self.schema.names).cast(self.schema)
        except (pa.ArrowException, KeyError) as error:
            raise CorruptError(f"{where}: damaged; delete {PREFIX}, it is written again") from error


def list_parts(store: Store, name: str) -> list[PartPlace]:
    """Places of all parts of a table, in order.

    Raises:
        StoreError: the store did not answer.
    """
    places = (PartPlace.parse(info.key) for info in store.list(f"{PREFIX}{name}/"))
    return [place for place in places if place is not None]


def encode_rows(rows: Sequence[Row], schema: pa.Schema) -> bytes:
    """Encode rows as one part."""
    return _encode(pa.Table.from_pylist(list(rows), schema))


def day_of(time_us: int) -> str:
    """Day of a time in microseconds since the epoch, in UTC."""
    return datetime.fromtimestamp(time_us // 1_000_000, UTC).date().isoformat()


def _encode(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.getvalue()
