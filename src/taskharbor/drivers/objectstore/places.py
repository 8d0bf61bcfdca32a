"""Where a store is: URLs and their options; and whether a store keeps its word before the first job is entrusted to it."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from taskharbor.drivers.objectstore.blobs import UNCHANGED, Blobs, Conflict, Unclear, Version, pause, pauses
from taskharbor.drivers.objectstore.catalog import MAX_SHARDS
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.drivers.urls import Reader, seconds, some_text, switch, whole
from taskharbor.errors import BackendUnavailable, InvalidRequest

if TYPE_CHECKING:
    from obstore.store import ClientConfig, MemoryStore

SCHEMES: Final = ("s3", "gs", "az", "file", "mem")

_HOW = {
    "s3": "s3://bucket/prefix?region=eu-central-1",
    "gs": "gs://bucket/prefix",
    "az": "az://container/prefix?account_name=...",
    "file": "file:///var/lib/taskharbor",
    "mem": "mem://name",
}


_TIMEOUT = partial(seconds, most=600)
_NETWORK: dict[str, Reader] = {
    "timeout": _TIMEOUT,
    "connect_timeout": _TIMEOUT,
    "allow_http": switch,
}
_OPTIONS: Mapping[str, Mapping[str, Reader]] = {
    "s3": {
        **_NETWORK,
        "endpoint": some_text,
        "region": some_text,
        "virtual_hosted_style_request": switch,
        "access_key_id": some_text,
        "secret_access_key": some_text,
        "session_token": some_text,
        "skip_signature": switch,
        "server_side_encryption": some_text,
        "sse_kms_key_id": some_text,
    },
    "gs": {
        **_NETWORK,
        "base_url": some_text,
        "service_account": some_text,
        "application_credentials": some_text,
        "skip_signature": switch,
    },
    "az": {
        **_NETWORK,
        "endpoint": some_text,
        "account_name": some_text,
        "account_key": some_text,
        "sas_key": some_text,
        "client_id": some_text,
        "client_secret": some_text,
        "tenant_id": some_text,
        "use_emulator": switch,
        "use_azure_cli": switch,
    },
    "file": {"sync": switch},
    "mem": {},
}

_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()
_private_stores = itertools.count()


class Place:
    """A store's address. Handles that share a place share the store, a private one in memory too."""

    def __init__(
        self, scheme: str, host: str, path: str, options: Mapping[str, Any], rest: Mapping[str, str]
    ) -> None:
        self.scheme = scheme
        self.rest = dict(rest)
        """Options that are not about the place; whoever asked must know them."""
        self._host = host
        self._path = path
        self._options = dict(options)
        # Private stores in memory have no name to tell them apart.
        is_private = scheme == "mem" and not host
        self._identity = f"mem://#{next(_private_stores)}" if is_private else str(self)

    def __repr__(self) -> str:
        return f"Place({str(self)!r})"

    def __str__(self) -> str:
        """For messages: no secret, and of the options only which server it is."""
        if self.scheme == "file":
            return f"file://{self._path}"
        address = f"{self.scheme}://{'/'.join(part for part in (self._host, self._path) if part)}"
        server = self._options.get("endpoint") or self._options.get("base_url")
        # What is before an @ could be a password.
        return f"{address} at {urlsplit(server).netloc.rpartition('@')[2]}" if server else address

    def open(self) -> Blobs:
        """A handle of one's own. Nothing is sent yet."""
        if self.scheme == "file":
            return LocalFiles(self._path, sync=self._options.get("sync", True))
        # Only here: whoever keeps jobs in files needs no extra.
        from taskharbor.drivers.objectstore.cloud import ObstoreBlobs

        if self.scheme == "mem":
            return ObstoreBlobs(self._memory, str(self), identity=self._identity, is_remote=False)
        return ObstoreBlobs(self._remote(), str(self))

    @cached_property
    def _memory(self) -> MemoryStore:
        from obstore.store import MemoryStore

        if not self._host:
            return MemoryStore()
        with _named_lock:
            return _named.setdefault(self._host, MemoryStore())

    def _remote(self) -> Any:
        from obstore.store import AzureStore, GCSStore, S3Store

        options = dict(self._options)
        client: ClientConfig = {
            "timeout": timedelta(seconds=options.pop("timeout", 15.0)),
            "connect_timeout": timedelta(seconds=options.pop("connect_timeout", 5.0)),
            "allow_http": options.pop("allow_http", False),
        }
        kinds: Mapping[str, Callable[..., Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
        try:
            return kinds[self.scheme](
                self._host,
                prefix=self._path or None,
                client_options=client,
                # A repeated write could be refused by what its first try did; we know better what to do then.
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=0)},
                **options,
            )
        except Exception as error:
            # Its words may quote a key that it could not read.
            raise InvalidRequest(
                f"{self}: the options do not fit together ({type(error).__name__}): check region, endpoint and credentials"
            ) from None


def forget_memory(name: str) -> bool:
    """Drop the store of that name: the next `mem://name` is empty. Handles on the old one keep it."""
    with _named_lock:
        return _named.pop(name, None) is not None


def parse_place(url: str) -> Place:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise InvalidRequest(f"that is not an object-store URL: write it like {_HOW['s3']} or {_HOW['file']}")
    if "#" in rest:
        raise InvalidRequest("an object-store URL has no part after #: write a # as %23")
    address, _, query = rest.partition("?")
    host, _, path = address.partition("/")
    if "@" in host:
        raise InvalidRequest(
            f"an object-store URL has no user and password: write it like {_HOW[scheme]}, with credentials in the "
            "environment or in options"
        )
    host, path = unquote(host), unquote(path).strip("/")
    _check_address(scheme, host, path)
    options, unknown = _options_of(scheme, query)
    if scheme == "file":
        return Place(scheme, "", f"/{path}", options, unknown)
    return Place(scheme, host, path, options, unknown)


def _check_address(scheme: str, host: str, path: str) -> None:
    parts = path.split("/") if path else []
    is_wrong = {
        "file": bool(host) or not path,
        "mem": bool(path),
    }.get(scheme, not host) or any(part in ("", ".", "..") for part in parts)
    if is_wrong:
        raise InvalidRequest(f"the object-store URL cannot be understood: write it like {_HOW[scheme]}")


def _options_of(scheme: str, query: str) -> tuple[dict[str, object], dict[str, str]]:
    known = _OPTIONS[scheme]
    options: dict[str, object] = {}
    rest: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        read = known.get(name)
        if read is None:
            rest[name] = value
        else:
            options[name] = read(name, value)
    return options, rest


def place_options(scheme: str) -> list[str]:
    """Names of the options that are about the place, for the message of whoever refuses another."""
    return list(_OPTIONS[scheme])


class Options(msgspec.Struct, frozen=True, kw_only=True):
    shards: int | None = None
    """Objects per queue; None: as many as the store was made with."""
    poll: float | None = 1.0
    """Seconds between looks at a queue that one waits for, to see what other processes did. None: there are none."""
    segment_rows: int = 1000
    """So many ended jobs or rows of the log stay in a queue's state before they go to a segment,"""
    segment_bytes: int = 256 * 1024
    """or so many bytes of them."""
    merge: int = 16
    """So many segments of one size become one of the next."""
    levels: int = 2
    """How often a segment is merged at most."""
    grace: float = 3600.0
    """Seconds for which a segment that was replaced stays, for those who are reading it."""


POLL = {"file": 0.05, "mem": None}
_OWN: dict[str, Reader] = {
    "shards": whole(1, MAX_SHARDS),
    "poll": seconds,
    "segment_rows": whole(1, 100_000),
    "segment_bytes": whole(1, 16 * 1024 * 1024),
    "merge": whole(2, 1000),
}


def options_of(place: Place) -> Options:
    values = dict(place.rest)
    found = {name: read(name, values.pop(name)) for name, read in _OWN.items() if name in values}
    if values:
        known = ", ".join(sorted([*_OWN, *place_options(place.scheme)]))
        raise InvalidRequest(
            f"{', '.join(sorted(values))}: no such option for {place.scheme}:// URLs; there are {known}"
        )
    return msgspec.convert({"poll": POLL.get(place.scheme, 1.0), **found}, Options)


_TRIES = 4

_trusted: set[str] = set()


async def probe(blobs: Blobs) -> None:
    """Raises InvalidRequest where the store lies. What was found good is not asked again.

    Bad luck can look like a lie (a request sent twice on its way, an answer lost); but a liar lies every time.
    """
    if blobs.identity in _trusted:
        return
    waits = pauses(tries=_TRIES)
    while True:
        # A name of its own each time: what became of one try must not spoil the next.
        name = f"probe/{secrets.token_hex(12)}"
        try:
            await _examine(blobs, name)
        except InvalidRequest:
            wait = next(waits, None)
            if wait is None:
                raise
        except Unclear as error:
            wait = next(waits, None)
            if wait is None:
                raise BackendUnavailable(
                    f"{blobs.place} gave no certain answer to a first write: {error}"
                ) from error
        else:
            _trusted.add(blobs.identity)
            return
        finally:
            await blobs.delete([name])
        await pause(wait)


async def _examine(blobs: Blobs, name: str) -> None:
    try:
        first = await blobs.create(name, b"first")
    except Conflict:
        raise _refusal(blobs, "refused to create an object that did not exist") from None
    await _must_refuse(
        blobs,
        lambda: blobs.create(name, b"again"),
        "created an object that was there already (If-None-Match: *)",
    )
    if await blobs.read_if_changed(name, first) is not UNCHANGED:
        raise _refusal(blobs, "showed another version of an object than the one it had just confirmed")
    try:
        second = await blobs.replace(name, b"second", first)
    except Conflict:
        raise _refusal(
            blobs, "refused to replace the very version it had just confirmed (If-Match)"
        ) from None
    if second == first:
        raise _refusal(blobs, "gave two contents the same version")
    await _must_refuse(
        blobs,
        lambda: blobs.replace(name, b"stale", first),
        "replaced a version that was not there any more (If-Match)",
    )
    blob = await blobs.read(name)
    if blob is None or blob.data != b"second" or blob.version != second:
        raise _refusal(blobs, "did not show what it had last confirmed")


async def _must_refuse(blobs: Blobs, write: Callable[[], Awaitable[Version]], what: str) -> None:
    try:
        await write()
    except Conflict:
        return
    raise _refusal(blobs, what)


def _refusal(blobs: Blobs, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"{blobs.place} {what}: on such a store two writers can overwrite each other, and jobs would be lost. Use a store "
        "with conditional writes (Amazon S3, Google Cloud Storage, Azure, a current MinIO, Ceph or R2), or a newer version "
        "of this one"
    )
