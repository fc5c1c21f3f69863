"""A progress bar in visual tokens over all pictures, on stderr."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


class TokenBar:
    """`advance(picture, done, total)` says how many tokens of a picture are drawn; going back (a
    picture that starts again) is fine."""

    def __init__(self, pictures: int, hidden: bool) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("drawing"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeRemainingColumn(),
        )
        show = not hidden and console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True, disable=not show)
        self._task = self._progress.add_task("drawing", total=None)
        self._pictures = pictures
        self._done: dict[int, int] = {}

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

    def advance(self, picture: int, done: int, total: int) -> None:
        self._done[picture] = done
        drawn = sum(self._done.values())
        self._progress.update(self._task, completed=drawn, total=total * self._pictures)


class StepBar:
    """Steps of work that has several stages."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._tasks: dict[str, TaskID] = {}

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

    def advance(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)
