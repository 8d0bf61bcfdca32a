"""The object-store driver: `s3://`, `gs://`, `az://`, `file://`, `mem://`. Needs the extra `taskharbor[objectstore]`."""

from taskharbor.drivers.objectstore.driver import ObjectStoreDriver

__all__ = ["ObjectStoreDriver"]
