"""The kit on the object-store driver over a folder. A URL also runs the cases that kill a process."""

from pathlib import Path

from taskharbor_testkit.conformance import conformance_tests


def _url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


globals().update(conformance_tests(_url, share=1 / 3))
