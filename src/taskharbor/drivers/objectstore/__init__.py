"""The object-store driver: `s3://`, `gs://`, `az://`, `file://`, `mem://`. Needs the extra `taskharbor[objectstore]`.

The state of a queue is a database image in one object, written only where nobody else has written since it was read.

    driver        the handle: contract calls
    enqueue, leases, retention, inspect: the calls themselves
    store         what an open handle has: the catalog, the shards, where jobs were seen
    shard         one shard of a queue: its image and its segments, and what follows from each image
    image         the image: a database in memory on which the engine's rules run
    segments      immutable objects for ended jobs and rows of the log
    compaction    how segments are made and merged
    cas           one compare-and-swap object with many callers: group commit, conflicts, writes without an answer
    contents      reading and writing that object, and the envelope around its body
    catalog       which queues there are, what objects are called, and who leads
    leadership    how a broker becomes the leader
    blobs         what is asked of a store; local_files, cloud: those there are; places: how one is found and tried
"""

from taskharbor.drivers.objectstore.driver import ObjectStoreDriver

__all__ = ["ObjectStoreDriver"]
