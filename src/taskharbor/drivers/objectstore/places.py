"""What an object-store URL says: which store, where in it, and how to reach it. Parsing does no I/O.

Credentials are best left to the environment (the variables, roles and service accounts that each cloud's own tools read). Where
they are in the URL, they never come out of here again: `place` has none, and no message quotes a URL or a value of them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.drivers.urls import Reader, seconds, some_text, switch
from taskharbor.errors import InvalidRequest

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
        from taskharbor.drivers.objectstore.obstore_blobs import ObstoreBlobs

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
