"""Tables of what is refused."""

from collections.abc import Callable

import pytest

Case = tuple[Callable[[], object], type[Exception], str]


def refused(*cases: Case) -> Callable[..., None]:
    """A test that each call raises an error of this class that says this."""

    @pytest.mark.parametrize(("call", "error", "match"), cases)
    def test(call: Callable[[], object], error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            call()

    return test
