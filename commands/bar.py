"""Progress bars on stderr: in visual tokens over all pictures, or in steps of stages."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


class _Bar:
    """A bar while its context is open; nothing where stderr is no terminal, or if `hidden`."""

    def __init__(self, *columns: ProgressColumn, hidden: bool = False) -> None:
        console = Console(stderr=True)
        show = not hidden and console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True, disable=not show)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


class TokenBar(_Bar):
    """`advance(picture, done, total)` says how many tokens of a picture are drawn; going back (a
    picture that starts again) is fine."""

    def __init__(self, pictures: int, hidden: bool) -> None:
        drawing, tokens = TextColumn("drawing"), TextColumn("tokens")
        columns = (drawing, BarColumn(), MofNCompleteColumn(), tokens, TimeRemainingColumn())
        super().__init__(*columns, hidden=hidden)
        self._task = self._progress.add_task("drawing", total=None)
        self._pictures = pictures
        self._done: dict[int, int] = {}

    def advance(self, picture: int, done: int, total: int) -> None:
        self._done[picture] = done
        drawn = sum(self._done.values())
        self._progress.update(self._task, completed=drawn, total=total * self._pictures)


class StepBar(_Bar):
    """Steps of work that has several stages."""

    def __init__(self) -> None:
        super().__init__(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._tasks: dict[str, TaskID] = {}

    def advance(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)
