"""What a cluster is asked to do: each goes to the node that holds its slot, and is sent on from there until it is done."""

from __future__ import annotations

import binascii
from collections.abc import Callable, Sequence
from typing import Any

import hiredis

from taskharbor.drivers.redis.node import Node
from taskharbor.drivers.redis.options import Options
from taskharbor.drivers.redis.packing import (
    WAIT_REPLIES,
    Call,
    Word,
    has_waited,
    not_kept,
    pack,
    pack_call,
    pack_wait,
)
from taskharbor.errors import TaskHarborError

SLOTS = 16384
_SENT_ON = 5
"""How often an errand may be sent on before it is given up: a slot that has moved costs one."""
_ASKING = pack(("ASKING",))


def slot_of(key: str | bytes) -> int:
    """By what is between the first braces, if there is anything, else by the whole key."""
    raw = key.encode() if isinstance(key, str) else key
    start = raw.find(b"{")
    if start >= 0:
        end = raw.find(b"}", start + 1)
        if end > start + 1:
            raw = raw[start + 1 : end]
    return binascii.crc_hqx(raw, 0) % SLOTS


class Errand:
    def __init__(self, slot: int | None) -> None:
        self.slot = slot
        self.answer: Any = None
        self.is_answered = False
        self.failure: TaskHarborError | None = None
        self.sent_on_to: Node | None = None
        self.asking = False
        """Its slot is on the way to that node, which answers only those who were told to ask there."""
        self.is_lost_way = False
        """Who holds what is to be asked anew before the next try."""
        self._body = b""
        self._own_replies = 1
        self._journeys = 0
        self._losses = 0

    @property
    def is_done(self) -> bool:
        return self.is_answered or self.failure is not None

    @property
    def replies(self) -> int:
        return self._own_replies + self.asking

    def packed(self) -> bytes:
        self.is_lost_way = False
        return _ASKING + self._body if self.asking else self._body

    def take(self, replies: list[Any]) -> hiredis.ReplyError | None:
        """The replies of a visit; what the server said instead of an answer, if it did."""
        reply: Any = replies[int(self.asking)]
        self.asking = False
        if isinstance(reply, hiredis.ReplyError):
            return reply
        self.answer = reply
        self.is_answered = True
        return None

    def may_go_on(self) -> bool:
        self._journeys += 1
        return self._journeys <= _SENT_ON

    def with_text(self) -> bool:
        """Whether the next try can bring the script's text along."""
        return False

    def was_not_received(self, error: TaskHarborError) -> None:
        """No connection: perhaps another node has taken over."""
        self._losses += 1
        self.asking = False
        self.is_lost_way = True
        if self._losses > 1:
            self.failure = error

    def lost_answer(self, error: TaskHarborError) -> None:
        """It may have been done or not. The next try says so, where that makes a difference."""
        self.was_not_received(error)


def _second_word(parts: tuple[Word, ...]) -> str | bytes | None:
    if len(parts) < 2:
        return None
    word = parts[1]
    return str(word) if isinstance(word, int) else word


class CommandErrand(Errand):
    """A plain command, which may be repeated as it is."""

    def __init__(self, parts: tuple[Word, ...], key: str | None) -> None:
        where = key if key is not None else _second_word(parts)
        super().__init__(None if where is None else slot_of(where))
        self._body = pack(parts)


class CallErrand(Errand):
    """A script, whose repetition says that it is one."""

    def __init__(
        self, call: Call, place: int, repetition: Callable[[], Sequence[Call]], options: Options
    ) -> None:
        super().__init__(slot_of(call.keys[0]))
        self._call = call
        self._place = place
        self._repetition = repetition
        self._options = options
        self._has_text = False
        self._pack()

    def _pack(self) -> None:
        wait = pack_wait(self._options, [self._call])
        self._body = pack_call(self._call, in_full=self._has_text) + wait
        self._own_replies = 1 + (WAIT_REPLIES if wait else 0)

    def take(self, replies: list[Any]) -> hiredis.ReplyError | None:
        trouble = super().take(replies)
        if trouble is None and self._own_replies > 1 and not has_waited(self._options, replies):
            self.failure = not_kept(self._options)
        return trouble

    def with_text(self) -> bool:
        is_first = not self._has_text
        self._has_text = True
        self._pack()
        return is_first

    def lost_answer(self, error: TaskHarborError) -> None:
        super().lost_answer(error)
        self._call = self._repetition()[self._place]
        self._pack()
