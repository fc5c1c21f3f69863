"""What can go wrong with stored jobs, told apart by what helps."""


class StoreUnavailable(Exception):  # noqa: N818  (a state of the world, and it may pass)
    """The database or the storage cannot be used now; trying again later may help."""


class CorruptRecord(Exception):  # noqa: N818
    """A stored record is not what this program wrote; the message names it."""


class LeaseLost(Exception):  # noqa: N818
    """Another server (or a cancellation) has taken over what this one was working on."""


class JobError(Exception):
    """A request about jobs that cannot be granted. `param` names the field, `code` the reason."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param = param
        self.code = code
