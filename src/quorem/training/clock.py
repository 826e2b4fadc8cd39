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
        self.began = self.saved = self.reported = time.perf_counter()
        self.paused_seconds, self.save_seconds = 0.0, 0.0

    @property
    def session(self) -> float:
        """Seconds of training in this attempt."""
        return time.perf_counter() - self.began - self.paused_seconds

    @property
    def seconds(self) -> float:
        """Seconds of training in all attempts."""
        return self.earlier_seconds + self.session

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time within this context as training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.paused_seconds += time.perf_counter() - began

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long a checkpoint takes; the time does not count as training."""
        with self.paused():
            began = time.perf_counter()
            yield
            self.saved = time.perf_counter()
            self.save_seconds = self.saved - began

    def save_is_due(self) -> bool:
        """Whether a checkpoint is due; saving takes at most a tenth of the time."""
        return time.perf_counter() - self.saved >= max(self.checkpoint_seconds, 9 * self.save_seconds)

    def report_is_due(self) -> bool:
        """Whether a report is due; if so, the time until the next one starts now."""
        seconds = time.perf_counter()
        if seconds - self.reported < REPORT_SECONDS:
            return False
        self.reported = seconds
        return True
