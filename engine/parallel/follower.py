"""`python -m engine.parallel.follower`: a rank that is told on its standard input what to do."""

import os
import pickle
import signal
import sys

from torch.distributed import FileStore  # type: ignore[attr-defined]

from engine.engine import Engine
from engine.parallel.ranks import last_words, meet, ready
from engine.parallel.shard import Shard


def main() -> None:
    """Follow until the leader closes the pipe, or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the leader's to handle
        signal.signal(number, signal.SIG_IGN)
    told = sys.stdin.buffer
    config, rank, size, path = pickle.load(told)
    store = FileStore(path, size)
    try:
        meet(store, rank, size, config.device)
        engine = Engine(config, shard=Shard(rank, size))
        store.set(ready(rank), "")
        while True:
            engine.follow(pickle.load(told))
    except EOFError:
        os._exit(0)  # without waiting for a group whose leader has left
    except Exception as error:  # the leader says it, in one line
        store.set(last_words(rank), f"{type(error).__name__}: {error}")
        os._exit(1)


if __name__ == "__main__":
    main()
