"""Numbers for people."""


def size(count: float) -> str:
    """1.5 MB of 1500000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
