"""`taskharbor broker`: a store behind HTTP, for clients in any language and for workers that cannot reach the store itself."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from taskharbor.cli import options as opt
from taskharbor.cli.errors import BadInput, CommandFailed
from taskharbor.cli.options import Invocation, flag, option
from taskharbor.cli.output import banner
from taskharbor.drivers.registry import connect
from taskharbor.drivers.urls import shown_url
from taskharbor.errors import InvalidRequest, MissingExtra
from taskharbor.jobs import to_micros

if TYPE_CHECKING:
    from taskharbor.broker.server import BrokerServer
    from taskharbor.broker.tokens import Token

log = logging.getLogger("taskharbor.broker")

_MAKE_TOKENS = (
    "make a file with lines like `worker-1:work:SECRET` (scopes: produce, bulk, work, admin; `openssl rand -hex 24` makes a "
    "secret) and give it as --token-file"
)


@opt.command(
    epilog="Without tokens a broker listens on this host only. Tokens come from --token-file, or from "
    "$TASKHARBOR_BROKER_TOKENS (separated by spaces). SIGTERM or Ctrl-C: running calls are finished; a second one: at once."
)
@option("--store", "URL", "The store to serve; the same as --url.")
@option("--bind", "[HOST:]PORT", "Where to listen.", "127.0.0.1:7433")
@option("--token-file", opt.FILE, "Who may call: lines like name:scope[,scope][:queues]:secret.")
@option(
    "--host-name host_names", "NAME", "A name under which clients know this broker; repeat.", multiple=True
)
@option("--advertise", "URL", "Where clients reach this broker.  [default: the bind address]")
@option("--term", opt.duration, "How long a leader may be silent (object stores).", "15s")
@option("--tls-cert", opt.FILE, "Certificate chain (PEM): serve https.")
@option("--tls-key", opt.FILE, "Its key, where it is in another file.")
@option("--rate", click.FloatRange(min=0.1), "Requests per second and token.  [default: any]")
@option("--burst", click.FloatRange(min=1), "Requests at once.  [default: twice the rate]")
@option("--max-body", click.FloatRange(min=0.001, max=1024), "Largest request, in MiB.", 32.0)
@option("--max-batch", opt.COUNT, "Most jobs in one request.", 10_000)
@option("--max-waiting", opt.COUNT, "Most long polls at once.", 1000)
@option("--max-connections", opt.COUNT, "Most connections at once.", 4096)
@option("--max-per-address", opt.COUNT, "Most of them from one address.", 512)
@option("--max-skew", opt.duration, "How wrong a worker's clock may be.", "60s")
@flag("--trust-client-time", "Take clients' time as it is (tests, simulations).", hidden=True)
@option("--grace", opt.duration, "How long a stop waits for calls.", "10s")
@flag("--access-log", "Log every request (no payloads, no values of queries).")
@opt.log_options
def broker(settings: Invocation, /, **options: Any) -> None:
    """Serve a store over HTTP: a JSON API, and http:// for workers."""
    from taskharbor.worker.health import is_loopback, split_address
    from taskharbor.worker.process_setup import tuned_interpreter

    try:
        from taskharbor.broker import server
        from taskharbor.broker.app import make_app
        from taskharbor.broker.config import MIB, BrokerConfig
        from taskharbor.broker.runtime import candidacy_for
    except ImportError as missing:
        raise MissingExtra(
            f"the broker needs packages that are not installed ({missing}): pip install 'taskharbor[broker]'"
        ) from missing
    opt.set_up_logs(settings, options)
    # The broker says itself when it starts and ends.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    settings.given_url = options["store"] or settings.given_url
    url = settings.url
    host, port = split_address(options["bind"], "bind address", "127.0.0.1:7433, [::1]:7433 or 7433")
    tokens = _tokens(options["token_file"])
    with _hint(f"bind to 127.0.0.1, or {_MAKE_TOKENS}"):
        server.check_exposure(host, has_tokens=bool(tokens))
    certificate, key = options["tls_cert"], options["tls_key"]
    tls = None if certificate is None else server.TLS(certificate, key)
    if tls is not None:
        tls.check()
    elif key is not None:
        hint = "give both, or a certificate file with the key in it"
        raise BadInput("--tls-key is given without --tls-cert", hint=hint)
    if tls is None and tokens and not is_loopback(host):
        log.warning("tokens and payloads travel unencrypted: use --tls-cert, or a proxy with TLS in front")
    driver = connect(url)
    with closing(_listen(host, port)) as listener:
        bound = server.url_of(listener, tls=tls is not None)
        address = options["advertise"] or bound
        candidacy = candidacy_for(driver, url=address, term=options["term"].total_seconds())
        is_unknown = listener.getsockname()[0] in ("0.0.0.0", "::") and not options["advertise"]
        if candidacy is not None and is_unknown:
            said = "standbys and clients must be told where this broker is, and its bind address does not say"
            raise BadInput(said, hint="give --advertise, like --advertise http://queue-1.internal:7433")
        same = "rate burst max_batch max_waiting max_connections max_per_address trust_client_time access_log"
        config = BrokerConfig(
            tokens=tokens,
            host_names=(*options["host_names"], host),
            advertise=address,
            max_body_bytes=round(options["max_body"] * MIB),
            max_skew_us=to_micros(options["max_skew"]),
            **{name: options[name] for name in same.split()},
        )

        def when_ready(server: BrokerServer) -> None:
            def stop(number: int) -> None:
                log.info("%s: finishing running calls; once more: at once", signal.Signals(number).name)
                server.stop()

            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                # On a platform without them, or on a thread of somebody's, a stop comes another way.
                with suppress(NotImplementedError, RuntimeError, ValueError):
                    loop.add_signal_handler(number, stop, number)
            # Without options, which may hold keys.
            log.info("serving %s at %s", shown_url(url).partition("?")[0], bound)
            parts = [f"broker at {address}", *(["one of several leads"] if candidacy is not None else [])]
            banner(options["log_format"], parts, f"{address}/openapi.json says what it takes; ")

        async def live() -> None:
            app, grace = make_app(driver, config, candidacy), options["grace"].total_seconds()
            await server.serve(app, listener, tls=tls, grace=grace, when_ready=when_ready)

        # As for a worker: what is computed beside the requests must not hold them up.
        with tuned_interpreter():
            asyncio.run(live())
    log.info("stopped")


@contextmanager
def _hint(hint: str) -> Iterator[None]:
    """Bad input of the broker's own options, with what to do about it."""
    try:
        yield
    except InvalidRequest as error:
        raise BadInput(str(error), hint=hint) from error


def _tokens(file: Path | None) -> tuple[Token, ...]:
    from taskharbor.broker.tokens import others_can_read, read_token_file, tokens_from_environment

    with _hint(_MAKE_TOKENS):
        tokens = tokens_from_environment(os.environ) if file is None else read_token_file(file)
    if file is not None and others_can_read(file):
        log.warning("everybody on this machine can read %s: chmod 600 it", file)
    return tokens


def _listen(host: str, port: int) -> socket.socket:
    from taskharbor.broker.server import listen

    try:
        return listen(host, port)
    except OSError as error:
        hints = {
            errno.EADDRINUSE: "another program listens there, perhaps a broker: stop it, or choose another port with --bind",
            errno.EACCES: "ports below 1024 need more rights: choose one above",
            errno.EADDRNOTAVAIL: "the bind address must be one of this machine's",
        }
        hint = hints.get(error.errno or 0, "choose another address with --bind, like 127.0.0.1:7433")
        said = f"cannot listen at {host}:{port}: {error.strerror or error}"
        raise CommandFailed(said, hint=hint) from error
