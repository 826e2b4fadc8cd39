"""How long a run has trained, and when a checkpoint or a report is due."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

REPORT_SECONDS = 0.2


class Clock:
    """Seconds of training, without pauses, and when the next checkpoint and report are due.

    Args:
        earlier_seconds: seconds of training in earlier attempts.
        checkpoint_seconds: least time between two checkpoints.
    """

    def __init__(self, earlier_seconds: float, checkpoint_seconds: float) -> None:
        self.earlier_seconds, self.checkpoint_seconds = earlier_seconds, checkpoint_seconds
        self.began = self.reported = time.perf_counter()
        self.next_save = self.began + checkpoint_seconds

    @property
    def session(self) -> float:
        """Seconds of training in this attempt."""
        return time.perf_counter() - self.began

    @property
    def seconds(self) -> float:
        """Seconds of training in all attempts."""
        return self.earlier_seconds + self.session

    @contextmanager
    def paused(self, *, saving: bool = False) -> Iterator[None]:
        """Do not count the time within this context as training.

        If it writes a checkpoint, the next one is put off, so that saving takes at most a tenth of the time.
        """
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        self.began += ended - began
        if saving:
            self.next_save = ended + max(self.checkpoint_seconds, 9 * (ended - began))

    def save_is_due(self) -> bool:
        """Whether a checkpoint is due."""
        return time.perf_counter() >= self.next_save

    def report_is_due(self) -> bool:
        """Whether a report is due; if so, the time until the next one starts now."""
        seconds = time.perf_counter()
        if seconds - self.reported < REPORT_SECONDS:
            return False
        self.reported = seconds
        return True
