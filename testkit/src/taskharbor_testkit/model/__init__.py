"""The reference model: the driver contract in plain dicts and lists, slow and meant to be read.

It is written from the contract alone and shares no code with any driver, so an agreement between the two means
something. It is also a driver: the kit judges it like any other, planted bugs are subclasses of it, and the
simulation runs on it.

- `records`: rules that concern one record;
- `store`: the store, and the calls of producers and workers, one method per rule;
- `operating`: the calls of operators, of readers and of bulk jobs;
- `driver`: a handle on the store.
"""

from taskharbor_testkit.model.driver import ModelDriver
from taskharbor_testkit.model.operating import Model

__all__ = ["Model", "ModelDriver"]
