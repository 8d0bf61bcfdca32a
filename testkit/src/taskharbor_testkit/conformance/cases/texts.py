"""Hostile values in every field that holds text or bytes: kept exactly, and none taken for another.

`NAMES` come in groups that a store confuses if it folds case, trims, normalizes, cuts, escapes or reads them as numbers. Each
value goes through every field. The comparison with the model after each call says whether it came back.
"""

from __future__ import annotations

from typing import Any

from taskharbor.bulk.stage import pack
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import (
    Ack,
    Enqueued,
    Extension,
    Fail,
    JobFilter,
    QueueSettings,
    RetryAt,
    Settlement,
)
from taskharbor.errors import LeaseMismatch
from taskharbor.jobs import MAX_HEADERS_BYTES, MAX_NAME_LENGTH, SECOND, Failure, JobRecord, JobState, Lease
from taskharbor_testkit.conformance.twin import QUEUE, Twin, ack, beat, fail
from taskharbor_testkit.model.records import longest

_LONG = MAX_NAME_LENGTH - 1
NAMES = (
    *("name", "NAME", "Name", " name", "name ", "name\t", "\nname", "name\n", "name\r\n", "na me", "na  me"),
    *(
        "n\u00e4me",
        "na\u0308me",
        "\uff4eame",
        "stra\u00dfe",
        "STRASSE",
        "\u0130",
        "i",
        "I",
        "\u0131",
        "i\u0307",
    ),
    *(
        "\ufb01",
        "fi",
        "\u03c3",
        "\u03c2",
        "\u200bname",
        "na\u200bme",
        "\ufeffname",
        "\u00a0name",
        "name\u2028",
    ),
    *(
        "\u202ename",
        "\ufffd",
        "\ufffe",
        "\U0001f6a2",
        "\U0001f6a2\ufe0f",
        "\U0001f1e9\U0001f1ea",
        "\u65e5\u672c",
    ),
    *(
        "\x01",
        "\x1b[0m",
        "\x7f",
        "\x80",
        "%",
        "_",
        "*",
        "?",
        "[a]",
        "n%me",
        "n_me",
        "{name}",
        "'",
        '"',
        "\\",
        "\\\\",
    ),
    *(
        "\\0",
        "\\n",
        "\\u0041",
        "%00",
        "%20",
        "+",
        "&amp;",
        "a:b",
        "a/b",
        "a|b",
        "a,b",
        "a;b",
        "a#b",
        "/",
        ".",
    ),
    *("..", "../name", "-", "--", "$1", "%s", ":name", "0", "00", "+0", "-0", "0.0", "1e3", "1000", "0x10"),
    *("null", "None", "NULL", "nil", "true", "True", "nan", "inf", "[]", "{}", '""', "q", "default"),
    *(long + end for long in ("x" * _LONG, "\u00e9" * _LONG, "\U0001f6a2" * _LONG) for end in "ab"),
    *(end + "x" * _LONG for end in "ab"),
)
DATA = (
    *(
        b"",
        b" ",
        b"\0",
        b"a\0",
        b"\0a",
        b" a ",
        b"a\n",
        b"a\r\nb\r\n",
        b"null",
        b"None",
        b"0",
        b"false",
        b'""',
    ),
    *(b"{}", b"\xff\xfe", b"\xef\xbb\xbfa", b"\x80abc", "h\u00e4".encode(), "h\u00e4".encode("latin-1")),
    *(b"YQ==", b"\\x61", b"\\", b"'", bytes(range(256)), b"\x1f\x8b\x08", b"a" * 70_000 + b" "),
)
TEXTS = (*NAMES, "first\nsecond\n", "a\r\nb", " ", "\t")
"""Texts that need not be names."""


def _each(name: str) -> dict[str, Any]:
    return dict.fromkeys(("id", "type", "codec", "key", "idempotency_key"), name)


async def every_name_is_kept_and_is_no_other(t: Twin) -> None:
    """As id, type, codec, key, idempotency key, header and payload, and where jobs are looked for by them."""
    jobs = [
        t.job(**_each(name), headers={name: f" {name}\r\n", f"{name}2": name}, payload=name.encode())
        for name in NAMES
    ]
    await t.stores(*jobs)
    found = await t.observer.get(NAMES, now=t.now)
    assert [job and (job.id, job.type, job.codec) for job in found] == [(name,) * 3 for name in NAMES]
    known = [Enqueued(name, existed=True) for name in NAMES]
    assert await t.enqueue(*[t.job(idempotency_key=name) for name in NAMES]) == known
    assert await t.enqueue(*[t.job(key=name, type=name, payload=b"new") for name in NAMES]) == known
    for name in NAMES:
        for selection in (JobFilter(key=name), JobFilter(types=frozenset({name}))):
            page = await t.observer.list_jobs(selection, now=t.now)
            assert [job.id for job in page.jobs] == [name], f"{selection} finds other jobs"
    assert await t.cancel_keys(*NAMES) == [1] * len(NAMES)
    assert await t.call(op.Remove(list(NAMES))) == [JobState.CANCELLED] * len(NAMES)


async def every_type_worker_and_error_is_kept_and_is_no_other(t: Twin) -> None:
    """A claim takes the type that it names. The log and the job tell the worker and the error."""
    await t.enqueue(*[t.job(id=name, type=name, max_attempts=9) for name in NAMES])
    held: list[JobRecord] = []
    claims = [op.Reserve(QUEUE, 9, 30 * SECOND, t.now, name, [name]) for name in NAMES]
    for claim, answer in zip(claims, await t.in_turn(*claims), strict=True):
        assert [(job.type, job.worker) for job in answer] == [(claim.worker, claim.worker)]
        held += answer
    for name in NAMES:
        page = await t.observer.list_jobs(JobFilter(worker=name), now=t.now)
        assert [job.worker for job in page.jobs] == [name]
    for n, texts in enumerate((NAMES, TEXTS[-len(NAMES) :])):
        errors = [Failure(text, f"{text}\n{text} ", f" {text}\n") for text in texts]
        ends = [
            RetryAt(job.id, job.token or "", t.now, n + 1, error)
            for job, error in zip(held, errors, strict=True)
        ]
        assert await t.settle(*ends) == [None] * len(held)
        for job, error in zip(held, errors, strict=True):
            await t.shows(job, last_error=error.text)
        held = await t.reserve(len(NAMES))
    errors = [Failure(text, "") for text in NAMES]
    fails = [Fail(job.id, job.token or "", 3, error) for job, error in zip(held, errors, strict=True)]
    assert await t.settle(*fails) == [None] * len(held)


async def every_name_of_a_queue_is_kept_and_is_no_other(t: Twin) -> None:
    """As the queue of a job, as a failure queue and in a declaration."""
    names = NAMES[::-1]
    following = dict(zip(names, names[1:] + names[:1], strict=True))
    given = [QueueSettings(failure_queue=following[name], declaration=f" {name} ") for name in names]
    await t.in_turn(
        *(
            op.Configure(name, one, t.now, ["failure_queue"], True)
            for name, one in zip(names, given, strict=True)
        )
    )
    for name, settings in zip(names, given, strict=True):
        assert await t.observer.settings(name) == settings
    await t.enqueue(*[t.job(id=name, queue=name) for name in names])
    claims = [op.Reserve(name, 9, 30 * SECOND, t.now, "w") for name in names]
    held = [job for answer in await t.in_turn(*claims) for job in answer]
    assert [job.id for job in held] == list(names)
    boom = Failure("E", "")
    assert await t.settle(*[Fail(job.id, job.token or "", 1, boom) for job in held]) == [None] * len(held)


async def all_bytes_are_kept(t: Twin) -> None:
    """As payload, progress and result, in an update and for a failure queue, of jobs with a key and without."""
    shifted = DATA[1:] + DATA[:1]
    await t.change(failure_queue="failed")
    for keys in ([None] * len(DATA), [f"k{n}" for n in range(len(DATA))]):
        await t.enqueue(*[t.job(key=key, payload=data) for key, data in zip(keys, DATA, strict=True)])
        await t.enqueue(
            *[
                t.job(key=key, payload=data)
                for key, data in zip(keys, shifted, strict=True)
                if key is not None
            ]
        )
        held = await t.reserve(len(DATA))
        for values in (DATA, shifted):
            # Each value is replaced by the next one: an empty one, too.
            for job, data, lease in zip(held, values, await t.extend(*map(beat, held, values)), strict=True):
                assert isinstance(lease, Lease), f"progress {data[:9]!r} is refused"
                job.token = lease.token
        ends = [ack(job, data) for job, data in zip(held, DATA, strict=True)]
        assert await t.settle(*ends) == [None] * len(DATA)
    await t.enqueue(*[t.job(payload=data) for data in DATA])
    assert await t.settle(*map(fail, await t.reserve(len(DATA)))) == [None] * len(DATA)


async def the_longest_values_are_kept_to_their_ends(t: Twin) -> None:
    """As long as the contract allows, each with an end of its own; a payload and a blob of three mebibytes."""
    text = "\u00e9\U0001f6a2" * (longest(Failure, "message") // 2 - 1) + " \n"
    error = Failure(text[: longest(Failure, "type")], text, text[: longest(Failure, "detail")])
    room = MAX_HEADERS_BYTES - 8
    payload = b"\0\xff " * 2**20
    await t.enqueue(
        t.job(id="1", payload=payload),
        t.job(id="2", headers={"h": "x" * room + " end"}),
        t.job(id="3", headers={"h" * room: " "}),
    )
    one, two, three = await t.reserve(3)
    large = longest(Ack, "result")
    beats = [Extension(one.id, one.token or "", b"p" * (longest(Extension, "progress") - 1) + b"\0")]
    (lease,) = await t.extend(*beats)
    assert isinstance(lease, Lease)
    ends: list[Settlement] = [
        Ack(one.id, lease.token, b"r" * (large - 1) + b" "),
        RetryAt(two.id, two.token or "", t.now, 1, error),
        Fail(three.id, three.token or "", 1, error),
    ]
    assert await t.settle(*ends) == [None] * 3
    declaration = "d" * (longest(QueueSettings, "declaration") - 1) + "\n"
    await t.change(declares=declaration)
    assert (await t.observer.settings(QUEUE)).declaration == declaration
    blobs = {"staging/a": payload, "staging/b": pack([t.job(payload=payload)])}
    for name, data in blobs.items():
        await t.driver.put_blob(name, data)
    assert await t.observer.read_blobs(list(blobs)) == list(blobs.values())


async def no_token_but_the_whole_one_proves_a_lease(t: Twin) -> None:
    """Not in another case, a part, with blanks, none, or that of the other job of the claim."""
    one, other = await t.hold(2)
    token = one.token or ""
    others = [token.swapcase(), token.upper(), token[:-1], token[: len(token) // 2], token[1:], f"{token} "]
    others += [f" {token}", f"{token}\n", token * 2, "", "%", "*", "null", other.token or "", "x" * 65_536]
    wrong = [Ack(one.id, text) for text in others if text != token]
    await t.refuses(LeaseMismatch, *wrong)
    async with t.unchanged():
        answers = await t.extend(*[Extension(one.id, ack.token, b"p") for ack in wrong])
    assert [type(answer) for answer in answers] == [LeaseMismatch] * len(wrong)
