"""Images that wait: one line per priority, in order of arrival."""

from collections import OrderedDict

from scheduler.plan import ImageTask
from scheduler.request import Priority


class ImageQueue:
    """Interactive before batch, first come first served within each. Every operation is O(1)."""

    def __init__(self) -> None:
        self._lines: dict[Priority, OrderedDict[int, ImageTask]] = {
            priority: OrderedDict() for priority in sorted(Priority)
        }

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def push(self, task: ImageTask) -> None:
        """Append an image that arrived."""
        self._lines[task.priority][task.image] = task

    def push_front(self, task: ImageTask) -> None:
        """Return an image to the head of its line; of several, the youngest is returned first."""
        self.push(task)
        self._lines[task.priority].move_to_end(task.image, last=False)

    def head(self) -> ImageTask | None:
        """The only image that may be admitted next: nothing overtakes it."""
        for line in self._lines.values():
            if line:
                return next(iter(line.values()))
        return None

    def remove(self, task: ImageTask) -> bool:
        """Take an image out; False if it does not wait here."""
        return self._lines[task.priority].pop(task.image, None) is not None
