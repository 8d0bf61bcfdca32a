"""The kit on the object-store driver over S3's own protocol. A URL also runs the cases that kill a process."""

from pathlib import Path

from taskharbor_testkit.conformance import conformance_tests
from taskharbor_testkit.servers.s3 import fresh_s3_url


def _url(tmp_path: Path) -> str:
    return fresh_s3_url()


# Every look at a store is dozens of requests to a server written in Python.
globals().update(conformance_tests(_url, share=1 / 5))
