"""What objects are called. Names go into keys of S3, blobs of Azure and paths of files, so they use what all of them allow.

Capitals are escaped as well: there are file systems on which `Mail` and `mail` are one file.
"""

from __future__ import annotations

import hashlib
import re

CATALOG = "catalog"

_PLAIN = re.compile(rb"[a-z0-9_-]")
_ESCAPE = re.compile(r"=([0-9a-f]{2})")
_LONGEST = 120
"""Characters of an escaped name; file systems allow 255, and other parts of a key need room too."""
_DIGEST = 32


def escaped(queue: str) -> str:
    """A queue's name as a folder's. Two queues never share one."""
    folder = "".join(chr(byte) if _PLAIN.match(bytes((byte,))) else f"={byte:02x}" for byte in queue.encode())
    if len(folder) <= _LONGEST:
        return folder
    # Too long to be spelled out, so this one cannot be read back; the catalog knows who it is.
    digest = hashlib.blake2b(queue.encode(), digest_size=_DIGEST // 2).hexdigest()
    return f"{folder[: _LONGEST - _DIGEST - 2].rstrip('=')}=.{digest}"


def unescaped(folder: str) -> str | None:
    """The queue of a folder; None where its name was too long to be spelled out."""
    if "=." in folder:
        return None
    return b"".join(
        bytes((int(part, 16),)) if index % 2 else part.encode()
        for index, part in enumerate(_ESCAPE.split(folder))
    ).decode()


def shard_folder(queue: str, shard: int) -> str:
    return f"queues/{escaped(queue)}/{shard}"


def state_name(queue: str, shard: int) -> str:
    """The object with a shard's state."""
    return f"{shard_folder(queue, shard)}/state"


def log_folder(queue: str, shard: int) -> str:
    """Where a shard's log segments are."""
    return f"{shard_folder(queue, shard)}/log"
