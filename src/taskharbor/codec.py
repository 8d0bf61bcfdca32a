"""Codecs for payloads, and calls of a function as payloads. A payload is data, never code.

A record names its codec. An unknown name is an error, not an import. Decoding checks the payload against types in the same step,
before a handler runs. `Arguments` makes such a type of a function's signature: the call becomes one JSON object, which is checked
on both sides.
"""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Callable
from types import GenericAlias
from typing import Any, Protocol

import msgspec

from taskharbor.errors import CodecError, InvalidRequest, PayloadInvalid

NOT_KEPT = b"\xc1not kept: "
"""The beginning of what is stored for a result that was not kept. The reason follows. Neither JSON nor msgpack has the first of
these bytes."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Codec(Protocol):
    name: str

    def encode(self, value: Any) -> bytes:
        """Encode a value."""
        ...

    def decode(self, data: bytes, type: Any = Any) -> Any:
        """Decode and check against `type`. Raises PayloadInvalid if the data does not fit."""


def _encode_hook(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # pydantic's method, without an import of pydantic
    if dump is not None:
        return dump(mode="json")
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


def _decode_hook(wanted: type, value: Any) -> Any:
    validate = getattr(wanted, "model_validate", None)
    if validate is not None:
        return validate(value)
    raise NotImplementedError(f"cannot build {wanted!r} from a payload")


class _MsgspecCodec:
    """The common part of JSON and msgpack: msgspec's encoders, a decoder per type, and TaskHarbor's errors."""

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self._encode = module.Encoder(enc_hook=_encode_hook).encode
        self._decoder_class = module.Decoder
        self._decoders: dict[Any, Any] = {}

    def encode(self, value: Any) -> bytes:
        try:
            encoded: bytes = self._encode(value)
        except (TypeError, ValueError, OverflowError, NotImplementedError, RecursionError) as cause:
            raise CodecError(f"cannot encode the payload as {self.name}: {cause}") from cause
        return encoded

    def decode(self, data: bytes, type: Any = Any) -> Any:
        decoder = self._decoders.get(type)
        if decoder is None:
            decoder = self._decoders[type] = self._decoder_class(type, dec_hook=_decode_hook)
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError, NotImplementedError) as cause:
            raise PayloadInvalid(f"the payload does not fit: {cause}") from cause


JSON: Codec = _MsgspecCodec("json", msgspec.json)
MSGPACK: Codec = _MsgspecCodec("msgpack", msgspec.msgpack)


class CodecRegistry:
    """The codecs that a client or worker knows, by name."""

    def __init__(self, *extra: Codec) -> None:
        self._codecs = {codec.name: codec for codec in (JSON, MSGPACK, *extra)}

    def get(self, name: str) -> Codec:
        """Return a codec by name.

        Raises:
            CodecError: No codec has this name.
        """
        codec = self._codecs.get(name)
        if codec is None:
            raise CodecError(
                f"unknown codec {name!r} (known: {', '.join(sorted(self._codecs))}): register it before the jobs that use it"
            )
        return codec

    def register(self, codec: Codec) -> None:
        """Add a codec under its name."""
        self._codecs[codec.name] = codec


class NotKept(msgspec.Struct, frozen=True):
    """Stands for a handler's result that cannot be stored."""

    reason: str

    def encode(self) -> bytes:
        return NOT_KEPT + self.reason.encode(errors="replace")


def decode_result(codec: Codec, data: bytes | None, type: Any = Any) -> Any:
    """Decode a stored result. Returns NotKept if there was one that was not stored."""
    if data is None:
        return None
    if data.startswith(NOT_KEPT):
        return NotKept(data[len(NOT_KEPT) :].decode(errors="replace"))
    return codec.decode(data, type)


def encode_checked(codec: Codec, value: Any, type: Any, name: str) -> bytes:
    """Encode a payload and check that its handler can read it: an error here is better than a dead job."""
    try:
        payload = codec.encode(value)
        codec.decode(payload, type)
    except PayloadInvalid as misfit:
        raise InvalidRequest(f"{name}: {misfit}") from misfit
    except CodecError as misfit:
        raise CodecError(f"{name}: {misfit}") from misfit
    return payload


class Arguments:
    """Turns calls of one function into payloads, and payloads into calls.

    `msgspec` builds a struct from the signature once. After that, binding, encoding, decoding and validation are one call into C
    each.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = getattr(function, "__qualname__", repr(function))
        self._signature = inspect.signature(function)
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except NameError as unknown:
            raise InvalidRequest(
                f"{self._name}: cannot read its type hints ({unknown}); "
                "import the types at run time, not only under TYPE_CHECKING"
            ) from unknown
        parameters = list(self._signature.parameters.values())
        self._has_variadic = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        positional = [_field(p, hints) for p in parameters if p.kind in _POSITIONAL]
        self._by_name = [p for p in parameters if p.kind not in _POSITIONAL]
        by_name = [_field(p, hints) for p in self._by_name]
        # A default is not stored: a worker whose function does not have that parameter yet can run the job.
        base = msgspec.defstruct(
            f"{self._name}_positional", positional, forbid_unknown_fields=True, omit_defaults=True
        )
        self.type: type[msgspec.Struct] = msgspec.defstruct(
            self._name.replace("<locals>", "local"),
            by_name,
            bases=(base,),
            kw_only=True,
            forbid_unknown_fields=True,
            omit_defaults=True,
        )
        self._positional_count = len(positional)
        self._keyword_names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the call as a value of `type`. Raises the TypeError that Python itself would raise."""
        if not self._has_variadic:
            try:
                return self.type(*args, **kwargs)
            except TypeError:
                pass  # `Signature.bind` has the better message.
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as misfit:
            # Python names what is missing before what is unknown.
            unknown = [name for name in kwargs if name not in self.type.__struct_fields__]
            also = f"; it has no {', '.join(unknown)}" if unknown and "missing" in str(misfit) else ""
            raise TypeError(f"{self._name}{self._signature}: {misfit}{also}") from None
        bound.apply_defaults()
        values = dict(bound.arguments)
        first = [values.pop(name) for name in list(values)[: self._positional_count]]
        return self.type(*first, **values)

    def encode(self, codec: Codec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Bind and encode a call, and check that the handler can read it."""
        return encode_checked(codec, self.bind(args, kwargs), self.type, f"{self._name}()")

    def decode(self, codec: Codec, payload: bytes) -> Any:
        return codec.decode(payload, self.type)

    def caller(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        """Make a callable that takes a value of `type` and calls `function` with its fields."""
        astuple, count, names = msgspec.structs.astuple, self._positional_count, self._keyword_names
        if self._has_variadic:
            return lambda value: self._call_variadic(function, astuple(value))
        if not names:
            return lambda value: function(*astuple(value))

        def call(value: Any) -> Any:
            values = astuple(value)
            return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

        return call

    def _call_variadic(self, function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        count = self._positional_count
        rest: tuple[Any, ...] = ()
        named: dict[str, Any] = {}
        for parameter, item in zip(self._by_name, values[count:], strict=True):
            if parameter.kind is parameter.VAR_POSITIONAL:
                rest = tuple(item)
            elif parameter.kind is parameter.VAR_KEYWORD:
                named.update(item)
            else:
                named[parameter.name] = item
        return function(*values[:count], *rest, **named)


def _field(parameter: inspect.Parameter, hints: dict[str, Any]) -> tuple[str, Any] | tuple[str, Any, Any]:
    hint = hints.get(parameter.name, Any)
    if parameter.kind is parameter.VAR_POSITIONAL:
        return (parameter.name, GenericAlias(list, (hint,)), msgspec.field(default_factory=list))
    if parameter.kind is parameter.VAR_KEYWORD:
        return (parameter.name, GenericAlias(dict, (str, hint)), msgspec.field(default_factory=dict))
    if parameter.default is parameter.empty:
        return (parameter.name, hint)
    default = parameter.default
    if isinstance(default, (list, dict, set, bytearray)):
        return (parameter.name, hint, msgspec.field(default_factory=lambda: copy.copy(default)))
    return (parameter.name, hint, msgspec.field(default=default))
