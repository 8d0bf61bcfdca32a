"""Object-store URLs: the address of a store, and the driver's options. Parsing does no I/O: wrong options are found at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import msgspec

from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.catalog import MAX_SHARDS
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.drivers.urls import Reader, read_options, seconds, some_text, switch, whole
from taskharbor.errors import InvalidRequest

if TYPE_CHECKING:
    from obstore.store import ClientConfig, MemoryStore

_HOW = {
    "s3": "s3://bucket/prefix?region=eu-central-1",
    "gs": "gs://bucket/prefix",
    "az": "az://container/prefix?account_name=...",
    "file": "file:///var/lib/taskharbor",
    "mem": "mem://name",
}


class ObjectStoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    shards: int | None = None
    """Objects per queue; None: the number that the store was made with."""
    poll: float | None = 1.0
    """Seconds between looks at a queue during a wait, to see the changes of other processes. None: no other process writes."""
    segment_rows: int = 1000
    """The number of ended jobs or log rows in a queue's state from which they go to a segment."""
    segment_bytes: int = 256 * 1024
    """The size in bytes of ended jobs and log rows from which they go to a segment."""
    merge: int = 16
    """The number of segments of one size that become one of the next."""
    levels: int = 2
    """The most merges of a segment."""
    grace: float = 3600.0
    """Seconds that a replaced segment stays, for readers that are reading it."""


_POLL = {"file": 0.05, "mem": None}
_OWN: Mapping[str, Reader] = {
    "shards": whole(1, MAX_SHARDS),
    "poll": seconds,
    "segment_rows": whole(1, 100_000),
    "segment_bytes": whole(1, 16 * 1024 * 1024),
    "merge": whole(2, 1000),
}

_TIMEOUT = partial(seconds, most=600)
_NETWORK: Mapping[str, Reader] = {"timeout": _TIMEOUT, "connect_timeout": _TIMEOUT, "allow_http": switch}
_TEXTS = {
    "s3": (
        *("endpoint", "region", "access_key_id", "secret_access_key", "session_token"),
        *("server_side_encryption", "sse_kms_key_id"),
    ),
    "gs": ("base_url", "service_account", "application_credentials"),
    "az": ("endpoint", "account_name", "account_key", "sas_key", "client_id", "client_secret", "tenant_id"),
}
_SWITCHES = {
    "s3": ("virtual_hosted_style_request", "skip_signature"),
    "gs": ("skip_signature",),
    "az": ("use_emulator", "use_azure_cli"),
    "file": ("sync",),
}

_named: dict[str, MemoryStore] = {}
_private_stores = itertools.count()


class StoreURL:
    """A parsed URL. Handles that share it share the store, a private one in memory too."""

    def __init__(self, scheme: str, host: str, path: str, values: Mapping[str, Any]) -> None:
        own = {name: value for name, value in values.items() if name in _OWN}
        self.options = msgspec.convert({"poll": _POLL.get(scheme, 1.0), **own}, ObjectStoreOptions)
        self.is_in_memory = scheme == "mem"
        self._scheme = scheme
        self._host = host
        self._path = path
        self._store_options = {name: value for name, value in values.items() if name not in _OWN}
        # Private stores in memory have no name to tell them apart.
        self._number = f"#{next(_private_stores)}" if self.is_in_memory and not host else ""

    def __str__(self) -> str:
        """Return the URL for messages: no secret, and of the options only the server."""
        if self._scheme == "file":
            return f"file://{self._path}"
        server = self._store_options.get("endpoint") or self._store_options.get("base_url")
        # What is before an @ could be a password.
        return f"{self.address} at {urlsplit(server).netloc.rpartition('@')[2]}" if server else self.address

    @property
    def address(self) -> str:
        """The URL without options; of a store in files, its folder."""
        place = "/".join(filter(None, (self._host, self._path)))
        return place if self._scheme == "file" else f"{self._scheme}://{place}"

    @property
    def storage_options(self) -> dict[str, str]:
        """The options that reach the store, secrets included, as texts for libraries that share obstore's names."""

        def text(value: object) -> str:
            return f"{value * 1000:.0f}ms" if isinstance(value, float) else str(value)

        return {
            name: text(value).lower() if isinstance(value, bool) else text(value)
            for name, value in self._store_options.items()
        }

    def open(self) -> Blobs:
        """Return a new handle. Nothing is sent yet."""
        if self._scheme == "file":
            return LocalFiles(self._path, sync=self._store_options.get("sync", True))
        # Imported here: a store in files needs no extra.
        from taskharbor.drivers.objectstore.cloud import ObstoreBlobs

        if self.is_in_memory:
            return ObstoreBlobs(self._memory, f"{self}{self._number}", is_remote=False)
        return ObstoreBlobs(self._remote(), str(self))

    @cached_property
    def _memory(self) -> MemoryStore:
        from obstore.store import MemoryStore

        return _named.setdefault(self._host, MemoryStore()) if self._host else MemoryStore()

    def _remote(self) -> Any:
        from obstore.store import AzureStore, GCSStore, S3Store

        options = dict(self._store_options)
        client: ClientConfig = {
            "timeout": timedelta(seconds=options.pop("timeout", 15.0)),
            "connect_timeout": timedelta(seconds=options.pop("connect_timeout", 5.0)),
            "allow_http": options.pop("allow_http", False),
        }
        kinds: Mapping[str, Callable[..., Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
        try:
            return kinds[self._scheme](
                self._host,
                prefix=self._path or None,
                client_options=client,
                # A repeated write could be refused because of its first try. The driver decides itself what to do then.
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=0)},
                **options,
            )
        except Exception as error:
            # Its words may quote a key that it could not read.
            raise InvalidRequest(
                f"{self}: the options do not fit together ({type(error).__name__}): check region, endpoint and credentials"
            ) from None


def parse_url(url: str) -> StoreURL:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _HOW:
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
    is_wrong = {"file": bool(host) or not path, "mem": bool(path)}.get(scheme, not host)
    if is_wrong or (path and any(part in ("", ".", "..") for part in path.split("/"))):
        raise InvalidRequest(f"the object-store URL cannot be understood: write it like {_HOW[scheme]}")
    readers: dict[str, Reader] = {**_OWN, **dict.fromkeys(_SWITCHES.get(scheme, ()), switch)}
    if scheme in _TEXTS:
        readers |= {**_NETWORK, **dict.fromkeys(_TEXTS[scheme], some_text)}
    values = read_options(query, readers, f"{scheme}://")
    return StoreURL(scheme, host, f"/{path}" if scheme == "file" else path, values)
