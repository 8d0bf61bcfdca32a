"""What goes wrong in handlers: a few families of errors, with the ids, numbers and addresses that real messages carry."""

from __future__ import annotations

import random


def make_error(chance: random.Random, type: str) -> tuple[str, str]:
    number = chance.randrange(10_000, 10_000_000)
    match chance.choices(range(5), (40, 25, 20, 10, 5))[0]:
        case 0:
            host = f"api-{chance.randrange(4)}.example.com"
            return (
                "TimeoutError",
                f"https://{host}/v1/{type}/{number}: no answer within {chance.choice((5, 10, 30))} s",
            )
        case 1:
            address = f"10.0.{chance.randrange(4)}.{chance.randrange(2, 250)}:5432"
            return "ConnectionRefusedError", f"connection to {address} refused"
        case 2:
            return (
                "ServiceUnavailable",
                f"503 for request {number:08x}, retry after {chance.randrange(1, 60)} s",
            )
        case 3:
            return "KeyError", "'customer_id'"
        case _:
            return "ValueError", f"order {number}: amount {chance.random() * 1000:.2f} is not allowed"


LEASE_EXPIRED = ("LeaseExpired", "the lease expired before the job was settled (worker lost or stalled)")
