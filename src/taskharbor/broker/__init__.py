"""The broker: a store behind HTTP, for clients in any language and for workers that cannot reach the store itself.

`make_app` is an ASGI application over any driver; `taskharbor broker` serves it. The modules, as a request meets them:

serving          the server: bounded headers and connections, TLS, a graceful stop
app              makes the application: every path with its handler
config, tokens   limits, and who may call
gate             the application: checks of a request (host, origin, token, scope, rate, leadership), and the handler of its path
exchange         the body as it is read, and clients that leave
operations       the JSON API's table of operations, and how one is carried out
calls            the driver protocol
request_models   bodies and queries of the JSON API
job_routes       submit, claim, heartbeat, settle
operator_routes  health, inspection, cancel, requeue, purge, settings
response_models  answers of the JSON API
replays          answers that are given again to a repeated request
long_poll        clients that wait for jobs
service          the open driver, its clock, leadership, sweeps
problems         errors as answers
openapi          the description of the JSON API
"""
