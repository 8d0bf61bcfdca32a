"""The broker: a store behind HTTP, for clients in any language and for workers that cannot reach the store itself.

`make_app` is an ASGI application over any driver; `taskharbor broker` serves it.
"""
