"""Policy versions as tables and rows."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from etude.cli.weights.survey import StoredObject, VersionSummary
from etude.common.blobs import Store
from etude.common.weights.protocol.reader_leases import observe_leases

if TYPE_CHECKING:
    from etude.cli.weights.differences import Difference

_STYLES = {
    "accepted": "",
    "abandoned": "dim",
    "quarantined": "red",
    "damaged": "bold red",
    "unreadable": "bold red",
}


def version_rows(found: Iterable[VersionSummary]) -> Iterator[dict[str, object]]:
    """One flat object per version, for programs."""
    for each in found:
        row: dict[str, object] = {
            "version": str(each.version),
            "standing": each.standing,
            "keyframe": each.has_keyframe,
            "skipsFrom": [str(base) for base in each.skips_from],
        }
        if each.problem:
            row["problem"] = each.problem
        manifest = each.manifest
        if manifest is None:
            yield row
            continue
        stats = manifest.stats
        yield row | {
            "step": manifest.step,
            "kind": "complete" if manifest.is_complete else "delta",
            "base": None if manifest.base is None else str(manifest.base.version),
            "changed": stats.changed,
            "elements": stats.elements,
            "bytes": manifest.num_bytes,
            "bitsPerChange": _bits(each),
            "codecs": dict(stats.codecs),
            "state": manifest.state,
        }


def chain_table(found: Sequence[VersionSummary]) -> Table:
    """The versions for people, oldest first."""
    table = Table(box=None, pad_edge=False)
    table.add_column("VERSION", no_wrap=True)
    for title in ("STEP", "SIZE", "CHANGED", "BITS/CHANGE"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("STATE", no_wrap=True)
    table.add_column("NOTES")
    for each in found:
        table.add_row(*_cells(each), style=_STYLES[each.standing])
    return table


def _cells(each: VersionSummary) -> list[str]:
    manifest = each.manifest
    if manifest is None:
        return [str(each.version), "", "", "", "", "", ", ".join(_notes(each))]
    stats = manifest.stats
    share = stats.changed / stats.elements if stats.elements else 0.0
    bits = _bits(each)
    return [
        str(each.version),
        str(manifest.step),
        format_size(manifest.num_bytes),
        "all" if manifest.is_complete else f"{share:.3%}",
        "" if bits is None else f"{bits:.1f}",
        manifest.state[:8],
        ", ".join(_notes(each)),
    ]


def _notes(each: VersionSummary) -> Iterator[str]:
    """Notes on a version; none for an accepted delta."""
    if each.standing != "accepted":
        yield each.problem or each.standing
    if each.manifest is not None and each.manifest.is_complete:
        yield "complete"
    if each.has_keyframe:
        yield "keyframe"
    yield from (f"skip from {base}" for base in each.skips_from)


def _bits(each: VersionSummary) -> float | None:
    manifest = each.manifest
    if manifest is None or manifest.is_complete or not manifest.stats.changed:
        return None
    return round(8 * manifest.num_bytes / manifest.stats.changed, 2)


def object_table(found: Sequence[StoredObject]) -> Table:
    """The objects of a version, then their total size."""
    table = Table(box=None, pad_edge=False)
    table.add_column("OBJECT", no_wrap=True)
    table.add_column("SIZE", justify="right", no_wrap=True)
    table.add_column("OF IT INDEX", justify="right", no_wrap=True)
    table.add_column("KEY", overflow="fold")
    for each in found:
        what = "manifest" if each.rank is None else f"rank {each.rank}"
        index = "" if each.index_bytes is None else format_size(each.index_bytes)
        stored = "missing" if each.bytes is None else format_size(each.bytes)
        table.add_row(what, stored, index, each.key)
    total = sum(each.bytes or 0 for each in found)
    table.add_row("in all", format_size(total), "", "", style="bold")
    return table


def reader_lines(store: Store) -> Iterator[str]:
    """A line for each reader that holds versions in the store."""
    for lease in observe_leases(store):
        if lease.is_readable:
            needs = "nothing" if lease.needs is None else f"{lease.needs} and newer"
            yield f"reader {lease.replica} needs {needs}"


def difference_table(found: "Sequence[Difference]") -> Table:
    """The differences between two versions, by tensor, then in total."""
    table = Table(box=None, pad_edge=False)
    table.add_column("TENSOR", overflow="fold")
    for title in ("ELEMENTS", "CHANGED", "SHARE", "ONE ULP", "LARGEST (ULP)"):
        table.add_column(title, justify="right")
    for each in found:
        if each.changed:
            table.add_row(*_difference(each.tensor, each))
    changed = sum(each.changed for each in found)
    elements = sum(each.elements for each in found)
    share = changed / elements if elements else 0.0
    table.add_row("in all", f"{elements:,}", f"{changed:,}", f"{share:.3%}", "", "", style="bold")
    return table


def _difference(name: str, each: "Difference") -> tuple[str, ...]:
    return (
        name,
        f"{each.elements:,}",
        f"{each.changed:,}",
        f"{each.changed / each.elements:.3%}",
        f"{each.one_ulp / each.changed:.1%}",
        f"{each.largest:,}",
    )


def format_size(num_bytes: int) -> str:
    """A size for people, in binary units."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
