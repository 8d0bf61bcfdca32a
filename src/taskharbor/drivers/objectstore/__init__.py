"""The object-store driver: `s3://`, `gs://`, `az://`, `file://`, `mem://`. Needs the extra `taskharbor[objectstore]`.

A queue's state is one object, written only where nobody else has written since it was read.

    driver        the handle: contract calls
    store         what an open handle has; enqueue, leased, operate, inspect, log: the calls themselves
    queue_cell    one queue's object (or one shard's), and what follows from each of its states
    state         what is in it: the memory driver's rules over what is kept; recalling, clearing, archived: with its segments
    encoding      the state as bytes; stored_jobs, rows, tail: what it is made of
    segments      the log's immutable objects; entries, building, retention: what is known of them, how they are made and thinned
    folding       what ended leaves the state for segments, and small segments become large ones
    catalog       which queues there are, and who leads; leading: how a broker becomes that
    cell          one object with many callers: group commit, conflicts, writes without an answer
    blobs         what is asked of a store; local_files, obstore_blobs: those there are; places, probe: how one is found and tried
"""

from taskharbor.drivers.objectstore.driver import ObjectStoreDriver

__all__ = ["ObjectStoreDriver"]
