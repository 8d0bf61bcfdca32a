"""Options in the URLs of stores, which every driver reads in the same way. No I/O, so a wrong option is found before any work."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias
from urllib.parse import parse_qsl, unquote

from taskharbor.errors import InvalidRequest

Reader: TypeAlias = Callable[[str, str], object]
"""A function of the name and text of an option that returns its value. Raises InvalidRequest, without quoting a secret."""

_HARMLESS = re.compile(
    "allow_http|application_name|base_url|(busy_|connect_|pool_|wait_)?timeout|ca|db(name)?|durability|endpoint|eviction|host|"
    "merge|migrate|notify|poll|pool_size|port|prefix|prepare|region|schema|segment_(bytes|rows)|shards|skip_signature|sslmode|"
    "sslrootcert|sync|target_session_attrs|tls_(ca|cert|verify)|use_(azure_cli|emulator)|virtual_hosted_style_request|"
    "wait_(aof|replicas)"
)
_SCHEME = re.compile(r"[A-Za-z][\w+.-]*(?=:|/|$)")
_URL = re.compile(r"[A-Za-z][\w+.-]*://\S+")


def shown_url(url: str) -> str:
    """Return the URL without secrets, for messages: nothing of what is before an @, and of the options only the values of those
    that are known to be harmless. Of a text that is no URL only what looks like a scheme is left."""
    scheme = match[0] if (match := _SCHEME.match(url)) else ""
    rest = url[len(scheme) :]
    if not scheme or not rest.startswith("://"):
        return f"{scheme}***" if rest else scheme
    place, question, query = rest[3:].partition("?")
    # A password may hold a / or ? that should have been written as %xx, so it can be in any place before an @.
    if "@" in query:
        return f"{scheme}://***"
    if not place.startswith("/") and "@" in place:
        place = f"***@{place.rpartition('@')[2]}"
    return f"{scheme}://{place}{question}{'&'.join(map(_shown_option, query.split('&')))}"


def shown_text(text: str) -> str:
    """Return a text of another program, with the URLs in it shown without secrets."""
    return _URL.sub(lambda found: shown_url(found[0]), text)


def _shown_option(option: str) -> str:
    name, equals, value = option.partition("=")
    if _HARMLESS.fullmatch(name) and not {"@", "?"} & {*unquote(value)}:
        return option
    return f"{name}=***" if equals and name.isidentifier() else "***" if option else ""


def read_options(query: str, readers: Mapping[str, Reader], kind: str) -> dict[str, object]:
    """Return the options of a URL. If an option is given twice, the last counts. `kind` names the URL in errors."""
    found: dict[str, object] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        read = readers.get(name)
        if read is None:
            # If a ? in a password was not escaped, the name is a part of it.
            shown, known = name if name.isidentifier() else "***", ", ".join(readers)
            raise InvalidRequest(f"unknown option {shown!r} in the {kind} URL: there are {known}")
        found[name] = read(name, text)
    return found


def seconds(name: str, text: str, *, least: float = 0.001, most: int = 3600) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not least <= found <= most:
        raise InvalidRequest(f"{name}={text!r}: give seconds between {least:g} and {most}")
    return found


def whole(least: int, most: int) -> Reader:
    def read(name: str, text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
            raise InvalidRequest(f"{name}={text!r}: give a whole number between {least} and {most}")
        return int(text)

    return read


def choice(*choices: str) -> Reader:
    def read(name: str, text: str) -> str:
        if text not in choices:
            raise InvalidRequest(f"{name}={text!r}: choose {' or '.join(choices)}")
        return text

    return read


def switch(name: str, text: str) -> bool:
    return choice("on", "off")(name, text) == "on"


def some_text(name: str, text: str) -> str:
    if not text:
        raise InvalidRequest(f"{name}=: give a value, or leave the option out")
    return text
