"""The kit on a Redis server that refuses functions to its user: the library's text runs by EVAL."""

from pathlib import Path

import pytest

from taskharbor_testkit.conformance import conformance_tests
from taskharbor_testkit.servers import shared_redis, with_fresh_prefix

pytestmark = pytest.mark.slow

_USER = ("on", ">secret", "~*", "&*", "+@all", "-fcall", "-fcall_ro", "-function")


def _url(tmp_path: Path) -> str:
    server = shared_redis()
    server.execute("ACL", "SETUSER", "without_functions", *_USER)
    return with_fresh_prefix(server.url).replace("redis://", "redis://without_functions:secret@")


globals().update(conformance_tests(_url, share=1 / 3))
