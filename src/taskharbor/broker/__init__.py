"""The broker: a store behind HTTP, for clients in any language and for workers that cannot reach the store itself.

`make_app` is an ASGI application over any driver; `taskharbor broker` serves it. The modules, in the order in which a request
passes through them:

    server            accepted connections, bounded headers, TLS, a graceful stop
    app               makes the application: every path with its handler, and the OpenAPI document
    config, tokens    limits, the counters that hold callers to them, and the tokens of callers
    admission         checks of a request: host, origin, token, scope, rate, leadership. Then the handler of its path
    request_response  the body and the answer of a request, their bounds, and clients that leave
    routes            the JSON API's table of routes, and the handling of one
    models            bodies, queries and answers of the JSON API, derived from the records; the command line's JSON as well
    job_routes        submit, claim, heartbeat, settle
    operator_routes   health, inspection, cancel, requeue, purge, settings
    driver_routes     the driver protocol
    calls             every call of both APIs: queues that a token reaches, answers of bounded size
    idempotency       answers that are given again to a repeated request
    runtime           the open driver, its clock, leadership, sweeps, long polls
    error_responses   errors as answers
"""
