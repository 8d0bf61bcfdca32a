"""The schema of a SQL store, in numbered steps that only add.

A process of an older version works beside a newer one. It ignores steps that it does not know, unless one of them says `--
breaks: older versions` in its first line. Then the older version refuses to open the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

import msgspec

from taskharbor.errors import SchemaMismatch

BREAKS = "-- breaks: older versions"


class Migration(msgspec.Struct, frozen=True):
    name: str
    sql: str

    @property
    def breaks(self) -> bool:
        return self.sql.startswith(BREAKS)


@cache
def known_migrations(package: str, folder: str = "migrations") -> tuple[Migration, ...]:
    """Return the steps in a folder of a package, in order."""
    entries = (files(package) / folder).iterdir()
    found = [(entry.name, entry.read_text("utf-8")) for entry in entries if entry.name.endswith(".sql")]
    return tuple(Migration(name.removesuffix(".sql"), sql) for name, sql in sorted(found))


def pending_of(known: Sequence[Migration], applied: Mapping[str, bool], place: str) -> list[Migration]:
    """Return the steps that `applied` (name to `breaks`) lacks, in order. Raises SchemaMismatch if a newer version took a step
    that breaks this one."""
    foreign = sorted(set(applied) - {migration.name for migration in known})
    if breaking := [name for name in foreign if applied[name]]:
        raise SchemaMismatch(
            f"{place} was changed by a newer TaskHarbor in a way this version cannot work with "
            f"({', '.join(breaking)}): upgrade this process"
        )
    return [migration for migration in known if migration.name not in applied]
