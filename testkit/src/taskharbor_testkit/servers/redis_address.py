"""A Redis by its address, whoever runs it: what tests do to a server that is theirs and to one they were given."""

from __future__ import annotations

from typing import Any


class RedisAt:
    """One server, by a `redis://` or `rediss://` URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def version(self) -> str:
        """As in `redis_versions()`."""
        facts = self.info("server")
        name = "valkey-" if "valkey_version" in facts else ""
        return name + str(facts.get("valkey_version") or facts["redis_version"])

    def execute(self, *command: str | bytes | int | float) -> Any:
        """Run one command on a connection of its own. Answers are bytes where Redis sends bytes."""
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        # Tests want to see that a server is gone, not to wait until the client has tried again.
        once = Retry(NoBackoff(), 0)
        with Redis.from_url(self.url, socket_connect_timeout=10, retry=once, protocol=2) as client:
            # Bare: the client would otherwise shape some answers by the command's name.
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def info(self, section: str = "default") -> dict[str, str]:
        lines = self.execute("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)
