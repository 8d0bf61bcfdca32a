"""A function's signature as a payload type: the call becomes one JSON object, checked at both ends.

`msgspec` builds a struct from the signature once; after that binding, encoding, decoding and validation each are
one call into C.
"""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Callable
from types import GenericAlias
from typing import Any

import msgspec

from taskharbor.codec import Codec
from taskharbor.errors import InvalidRequest, PayloadInvalid

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Arguments:
    """Turns calls of one function into payloads and payloads into calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = getattr(function, "__qualname__", repr(function))
        self._signature = inspect.signature(function)
        hints = _type_hints(function)
        parameters = list(self._signature.parameters.values())
        self._has_variadic = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        positional = [_field(p, hints) for p in parameters if p.kind in _POSITIONAL]
        by_name = [_field(p, hints) for p in parameters if p.kind not in _POSITIONAL]
        base = msgspec.defstruct(f"{self._name}_positional", positional, forbid_unknown_fields=True)
        self.type: type[msgspec.Struct] = msgspec.defstruct(
            self._name.replace("<locals>", "local"),
            by_name,
            bases=(base,),
            kw_only=True,
            forbid_unknown_fields=True,
        )
        self._positional_count = len(positional)
        self._keyword_names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as a value of `type`; TypeError as Python itself would raise it."""
        if not self._has_variadic:
            try:
                return self.type(*args, **kwargs)
            except TypeError:
                pass  # The signature words it better.
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        first = [values.pop(name) for name in list(values)[: self._positional_count]]
        return self.type(*first, **values)

    def encode(self, codec: Codec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Bind, encode, and check that the handler will be able to read it: better an error here than a dead job."""
        payload = codec.encode(self.bind(args, kwargs))
        try:
            codec.decode(payload, self.type)
        except PayloadInvalid as misfit:
            raise InvalidRequest(f"{self._name}(): {misfit}") from misfit
        return payload

    def decode(self, codec: Codec, payload: bytes) -> Any:
        return codec.decode(payload, self.type)

    def call(self, function: Callable[..., Any], value: Any) -> Any:
        values = msgspec.structs.astuple(value)
        count = self._positional_count
        if not self._has_variadic:
            if len(values) == count:
                return function(*values)
            return function(*values[:count], **dict(zip(self._keyword_names, values[count:], strict=True)))
        rest: tuple[Any, ...] = ()
        named: dict[str, Any] = {}
        for parameter, item in zip(self._by_name_parameters(), values[count:], strict=True):
            if parameter.kind is parameter.VAR_POSITIONAL:
                rest = tuple(item)
            elif parameter.kind is parameter.VAR_KEYWORD:
                named.update(item)
            else:
                named[parameter.name] = item
        return function(*values[:count], *rest, **named)

    def _by_name_parameters(self) -> list[inspect.Parameter]:
        return [p for p in self._signature.parameters.values() if p.kind not in _POSITIONAL]


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as unknown:
        raise InvalidRequest(
            f"{getattr(function, '__qualname__', function)}: cannot read its type hints ({unknown}); "
            "import the types at run time, not only under TYPE_CHECKING"
        ) from unknown


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
