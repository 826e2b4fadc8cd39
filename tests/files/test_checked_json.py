"""Dataclasses from JSON: what fits is built, and what does not is named with its place, value and rule."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal

import pytest

from quorem.files.checked_json import build


@dataclass(frozen=True)
class Inner:
    size: int
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size ({self.size}) must be at least 1")


@dataclass(frozen=True)
class Outer:
    name: str
    flag: bool
    inner: list[Inner]
    pair: tuple[int, float]
    names: tuple[str, ...] = ()
    mode: Literal["sum", "mean"] = "sum"
    bits: Literal[8, 4] | None = None
    by_name: Mapping[str, Inner] | None = None
    either: int | str = 0
    forms: Mapping[str, Inner] | tuple[str, ...] = ()
    ratio: Fraction = Fraction(1)
    free: Any = None


GOOD: dict[str, Any] = {
    "name": "a",
    "flag": True,
    "inner": [{"size": 2}, {"size": 3, "share": 1}],
    "pair": [1, 2.5],
    "names": ["x", "y"],
    "mode": "mean",
    "bits": 4,
    "by_name": {"k": {"size": 1}},
    "either": "word",
    "free": {"any": [1, None]},
}


def outer(**changes: Any) -> Outer:
    values = json.loads(json.dumps(GOOD | changes))
    return build(Outer, {k: v for k, v in values.items() if v != "ABSENT"}, converters={Fraction: Fraction})


def test_everything_that_fits() -> None:
    built = outer(ratio="2/3")
    assert built.inner == [Inner(2), Inner(3, 1)] and built.by_name == {"k": Inner(1)}
    assert built.pair == (1, 2.5) and built.names == ("x", "y") and built.ratio == Fraction(2, 3)
    assert asdict(outer(by_name="ABSENT", bits=None)) | {"by_name": None} == asdict(outer(by_name=None, bits="ABSENT"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 3}, r"^name \(3\) must be a string$"),
        ({"name": "ABSENT"}, r"^name is missing$"),
        ({"nam": "a"}, r"^nam is not known: Outer has name, flag, "),
        ({"flag": 1}, r"^flag \(1\) must be true or false$"),
        ({"inner": {}}, r"^inner \(\{\}\) must be a list$"),
        ({"inner": [{"size": 2}, {"size": "2"}]}, r"^inner\[1\]\.size \('2'\) must be an integer$"),
        ({"inner": [{"size": True}]}, r"^inner\[0\]\.size \(True\) must be an integer$"),
        ({"inner": [{"size": 2**64}]}, r"^inner\[0\]\.size \(18446744073709551616\) must be an integer$"),
        ({"inner": [{"size": 0}]}, r"^inner\[0\]: size \(0\) must be at least 1$"),
        ({"inner": [7]}, r"^inner\[0\] \(7\) must be an object$"),
        ({"inner": [{"size": 1, "share": None}]}, r"^inner\[0\]\.share \(None\) must be a number$"),
        ({"pair": [1]}, r"^pair \(\[1\]\) must be a list of 2 values$"),
        ({"pair": [1, "x"]}, r"^pair\[1\] \('x'\) must be a number$"),
        ({"mode": "max"}, r"^mode \('max'\) must be one of 'sum', 'mean'$"),
        ({"bits": 8.0}, r"^bits \(8.0\) must be one of 8, 4$"),
        ({"by_name": {"k": {}}}, r"^by_name\.k\.size is missing$"),
        ({"either": []}, r"^either \(\[\]\) must be an integer or a string$"),
        ({"forms": {"k": {"size": "1"}}}, r"^forms\.k\.size \('1'\) must be an integer$"),
        ({"forms": 3}, r"^forms \(3\) must be an object or a list$"),
        ({"ratio": "x"}, r"^ratio: Invalid literal for Fraction: 'x'$"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        outer(**changes)


def test_values_that_are_no_object() -> None:
    with pytest.raises(ValueError, match=r"^it \(\[1\]\) must be an object$"):
        build(Inner, [1])
