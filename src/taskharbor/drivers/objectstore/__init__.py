"""The object-store driver: `s3://`, `gs://`, `az://`, `file://`, `mem://`. Needs the extra `taskharbor[objectstore]`.

The state of a queue is a database image in one object. It is written only if nobody else has written since it was read.

    options       URLs: the address of a store, and the driver's options
    driver        the handle: contract calls
    queue         the queues of an open store and their shards: runs steps on images, and acts on each new image
    catalog       the root object: queues, names of objects, the leader
    image         the image: a database in memory on which the engine's rules run, with the list of its segments
    cas           one compare-and-swap object with many callers: group commit, conflicts, writes without an answer
    blobs         the calls to a store, and the probe
    local_files   stores in folders
    cloud         S3, Google Cloud Storage, Azure and memory
    compaction    makes and merges segments, when an image has landed
    archive       segments: immutable objects for ended jobs and rows of the log, and removal from them
    inspect       reads jobs, queues and the log, from images and segments
    leadership    the election of a broker as leader
"""

from taskharbor.drivers.objectstore.driver import ObjectStoreDriver

__all__ = ["ObjectStoreDriver"]
