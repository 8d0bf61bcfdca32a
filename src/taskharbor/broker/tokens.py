"""Tokens: the callers of a broker, and their scopes.

A token is `name:scope[,scope]:secret`, or `name:scope[,scope]:queue[,queue]:secret` if it is limited to some queues. Only a
digest of the secret is kept. A presented secret is compared with every digest in constant time, so neither the duration nor a
memory dump tells how close a guess was.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast, get_args

import msgspec

from taskharbor.drivers.operations import Scope
from taskharbor.errors import InvalidRequest

SCOPES: tuple[Scope, ...] = get_args(Scope)
ENVIRONMENT = "TASKHARBOR_BROKER_TOKENS"
SHORTEST_SECRET = 16

_FORM = "name:scope[,scope]:secret or name:scope[,scope]:queue[,queue]:secret"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SECRET = re.compile(r"[A-Za-z0-9._~+/=-]+")


class Caller(msgspec.Struct, frozen=True):
    """A caller. `name` is for logs, limits and repeated tries; it is no secret.

    Attributes:
        scopes: The scopes, with all that they imply.
        queues: Patterns of the queues that the caller reaches, with commas between them. `*` stands for any text. None: all
            queues.
    """

    name: str
    scopes: frozenset[Scope]
    queues: str | None = None

    def reaches(self, queue: str | None) -> bool:
        """Return True if the caller may use a queue. None stands for all queues."""
        if self.queues is None:
            return True
        return queue is not None and _matcher(self.queues).fullmatch(queue) is not None


@functools.lru_cache(1024)
def _matcher(queues: str) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(one).replace(r"\*", ".*") for one in queues.split(",")), re.DOTALL)


class Token(msgspec.Struct, frozen=True):
    """A caller, and the digest of the secret that proves it."""

    caller: Caller
    digest: bytes


# The caller of a broker without tokens.
EVERYBODY = Caller("everybody", frozenset(SCOPES))


def find_caller(tokens: Sequence[Token], authorization: bytes | None) -> Caller | None:
    """Return the caller of an `Authorization` header; None if it is missing or wrong."""
    if not tokens:
        return EVERYBODY
    if authorization is None or authorization[:7].lower() != b"bearer ":
        return None
    digest = hashlib.sha256(authorization[7:].strip()).digest()
    # All tokens are compared, even after a match.
    found = [token.caller for token in tokens if hmac.compare_digest(token.digest, digest)]
    return found[-1] if found else None


def parse_token(text: str, *, where: str = "the token") -> Token:
    """Read a token. Errors name the place and never repeat the text: it may be a secret with a typing error in front."""
    name, first, rest = text.strip().partition(":")
    listed, second, rest = rest.partition(":")
    limit, third, secret = rest.rpartition(":")
    if not first or not second:
        raise InvalidRequest(f"{where} is not of the form {_FORM}")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{where} has a name other than letters, digits, '.', '_' and '-' (at most 64)")
    wanted = [scope.strip() for scope in listed.split(",")]
    if not all(scope in SCOPES for scope in wanted):
        raise InvalidRequest(f"{where} ({name}) has an unknown scope: there are {', '.join(SCOPES)}")
    if len(secret) < SHORTEST_SECRET or not _SECRET.fullmatch(secret):
        raise InvalidRequest(
            f"the secret of {where} ({name}) must have at least {SHORTEST_SECRET} characters, of letters, digits and ._~+/=-; "
            "make one with: openssl rand -hex 24"
        )
    queues = [queue.strip() for queue in limit.split(",")] if third else []
    if not all(queues):
        raise InvalidRequest(f"{where} ({name}) has an empty queue: write {_FORM}")
    if queues and "bulk" in wanted:
        raise InvalidRequest(
            f"{where} ({name}) has the scope bulk and is limited to queues: staged jobs may be of any queue"
        )
    # admin implies all, and every scope implies read.
    scopes: Sequence[Scope] = SCOPES if "admin" in wanted else ("read", *cast("list[Scope]", wanted))
    return Token(
        Caller(name, frozenset(scopes), ",".join(queues) or None), hashlib.sha256(secret.encode()).digest()
    )


def parse_tokens(lines: Iterable[str], *, where: str) -> tuple[Token, ...]:
    """Read tokens, one per line. Empty lines and lines that begin with # are skipped."""
    tokens: dict[str, Token] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        token = parse_token(text, where=f"line {number} of {where}")
        if token.caller.name in tokens:
            raise InvalidRequest(f"{where} has two tokens named {token.caller.name}")
        tokens[token.caller.name] = token
    if not tokens:
        raise InvalidRequest(f"{where} has no token in it: write lines like {_FORM}")
    return tuple(tokens.values())


def read_token_file(path: Path) -> tuple[Token, ...]:
    """Read the tokens of a file. Raises InvalidRequest if it cannot be read or has another form."""
    try:
        text = path.read_text()
    except OSError as error:
        raise InvalidRequest(f"cannot read the token file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the token file {path} is not text: write lines like {_FORM}") from error
    return parse_tokens(text.splitlines(), where=str(path))


def others_can_read(path: Path) -> bool:
    """True if every user of this machine can read the file. (On Windows the mode does not tell.)"""
    return os.name == "posix" and bool(path.stat().st_mode & 0o004)


def tokens_from_environment(environment: dict[str, str] | os._Environ[str]) -> tuple[Token, ...]:
    """Return the tokens of the environment; empty if it has none."""
    text = environment.get(ENVIRONMENT, "")
    return parse_tokens(text.split(), where=f"${ENVIRONMENT}") if text.strip() else ()
