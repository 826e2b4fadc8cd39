"""Category tokens as the Criteo file writes them: eight hex digits."""

import numpy as np
from numpy.typing import NDArray

HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def hex_digits(numbers: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """The eight hex digits of each number as ASCII ``[N, 8]``.

    >>> hex_digits(np.array([10], np.uint32)).tobytes()
    b'0000000a'
    """
    return HEX_DIGITS[(numbers[:, None] >> np.arange(28, -1, -4, dtype=np.uint32)) & np.uint32(15)]
