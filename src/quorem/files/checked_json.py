"""A dataclass from parsed JSON: types are checked by the fields' annotations, and an error names the field.

A dataclass checks in ``__post_init__`` what types do not say: ranges, and how its fields fit together.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Converters = Mapping[Any, Callable[[Any], Any]]
NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
NAMES |= {list: "a list", tuple: "a list", dict: "an object", Mapping: "an object"}


def build(cls: type[T], values: Any, *, converters: Converters | None = None) -> T:
    """An object of the dataclass ``cls`` from parsed JSON.

    Annotations may be ``int``, ``float``, ``str``, ``bool``, ``None``, ``Any``, ``Literal``, dataclasses, the types of
    ``converters``, and unions, ``list``, ``tuple`` and ``dict`` of these. An integer must be in
    [-2**63, 2**64). For types that JSON does not have, ``converters`` has a function from the JSON value to the object.
    A field that is missing, unknown or of the wrong type, or that the dataclass refuses, is a ValueError.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Size:
    ...     name: str
    ...     shape: tuple[int, ...] = ()
    >>> build(Size, {"name": "user", "shape": [3, 4]})
    Size(name='user', shape=(3, 4))
    >>> build(Size, {"name": "user", "shape": [3, "4"]})
    Traceback (most recent call last):
    ValueError: shape[1] ('4') must be an integer
    """
    result: T = _checked(cls, values, "", converters or {})
    return result


def _checked(kind: Any, value: Any, where: str, converters: Converters) -> Any:
    """``value`` as an object of the annotation ``kind``; ``where`` is its place, such as ``tables[2].name``."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return value
    if kind in converters:
        return _called(converters[kind], where, value)
    if is_dataclass(kind):
        return _object(kind, value, where, converters)
    if origin in (Union, types.UnionType):
        return _alternative(arguments, value, where, converters)
    if origin is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in arguments):
            raise _wrong(value, where, _name(kind))
        return value
    if origin in (list, tuple) and isinstance(value, list):
        kinds = [arguments[0] if arguments else Any] * len(value)
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            kinds = list(arguments)
        if len(kinds) != len(value):
            raise _wrong(value, where, f"a list of {len(kinds)} values")
        pairs = enumerate(zip(kinds, value, strict=True))
        return origin(_checked(inner, entry, f"{where}[{i}]", converters) for i, (inner, entry) in pairs)
    if origin in (dict, Mapping) and isinstance(value, dict):
        inner = arguments[1] if arguments else Any
        return {name: _checked(inner, entry, _joined(where, name), converters) for name, entry in value.items()}
    if origin is float and type(value) is int:
        return value
    if type(value) is not origin or (origin is int and not -(2**63) <= value < 2**64):
        raise _wrong(value, where, _name(kind))
    return value


def _object(cls: Any, value: Any, where: str, converters: Converters) -> Any:
    if not isinstance(value, dict):
        raise _wrong(value, where, NAMES[dict])
    hints, known = get_type_hints(cls), {field.name: field for field in fields(cls) if field.init}
    if extra := sorted(value.keys() - known.keys()):
        raise ValueError(f"{_joined(where, extra[0])} is not known: {cls.__name__} has {', '.join(known)}")
    for name, field in known.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{_joined(where, name)} is missing")
    options = {name: _checked(hints[name], each, _joined(where, name), converters) for name, each in value.items()}
    return _called(cls, where, **options)


def _called(make: Callable[..., Any], where: str, *values: Any, **options: Any) -> Any:
    """The object that ``make`` returns; its errors become ValueErrors that say where the value is."""
    try:
        return make(*values, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None


def _alternative(kinds: tuple[Any, ...], value: Any, where: str, converters: Converters) -> Any:
    """``value`` as an object of the first of several annotations that it fits."""
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    errors = []
    for kind in kinds:
        try:
            return _checked(kind, value, where, converters)
        except ValueError as error:
            errors.append(error)
    for reason in errors:
        if len(errors) == 1 or not str(reason).startswith(f"{where} ("):  # the latter: an inner value is wrong
            raise reason
    raise _wrong(value, where, _name(Union[kinds]))  # noqa: UP007 - of a tuple


def _wrong(value: Any, where: str, rule: str) -> ValueError:
    return ValueError(f"{where or 'it'} ({repr(value)[:80]}) must be {rule}")


def _name(kind: Any) -> str:
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_name, arguments)))
    return NAMES.get(origin, getattr(origin, "__name__", str(kind)))


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
