"""Payload codecs: bytes on the wire, never code.

A record names its codec; an unknown name is an error, not an import. Decoding can validate against types in the
same step, which is how payloads are checked before a handler runs.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from taskharbor.errors import CodecError, PayloadInvalid


class Codec(Protocol):
    name: str

    def encode(self, value: Any) -> bytes: ...

    def decode(self, data: bytes, type: Any = Any) -> Any:
        """Decode and check against `type`; PayloadInvalid where it does not fit."""


def _encode_hook(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # pydantic's, without importing it
    if dump is not None:
        return dump(mode="json")
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


def _decode_hook(wanted: type, value: Any) -> Any:
    validate = getattr(wanted, "model_validate", None)
    if validate is not None:
        return validate(value)
    raise NotImplementedError(f"cannot build {wanted!r} from a payload")


class _MsgspecCodec:
    """What JSON and msgpack share: msgspec's encoders, a decoder per type, and errors of our own."""

    name: str

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
    """The codecs a client or worker knows by name."""

    def __init__(self, *extra: Codec) -> None:
        self._codecs = {codec.name: codec for codec in (JSON, MSGPACK, *extra)}

    def get(self, name: str) -> Codec:
        codec = self._codecs.get(name)
        if codec is None:
            raise CodecError(f"unknown codec {name!r} (known: {', '.join(sorted(self._codecs))})")
        return codec

    def register(self, codec: Codec) -> None:
        self._codecs[codec.name] = codec
