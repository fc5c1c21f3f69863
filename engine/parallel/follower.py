"""`python -m engine.parallel.follower`: a rank that is told on its standard input what to do."""

import os
import pickle
import signal
import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.engine import Engine
from engine.parallel.ranks import HOST, PATIENCE, last_words, meet
from engine.parallel.shard import Shard


def main() -> None:
    """Follow until the leader closes the pipe, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the leader's to handle
    told = sys.stdin.buffer
    config, rank, size, port = pickle.load(told)
    store = TCPStore(HOST, port, None, False, PATIENCE)
    meet(store, rank, size, config.device)
    try:
        engine = Engine(config, shard=Shard(rank, size))
    except Exception as error:  # the leader says it, in one line
        store.set(last_words(rank), f"{type(error).__name__}: {error}")
        sys.exit(1)
    try:
        while True:
            engine.follow(pickle.load(told))
    except EOFError:
        os._exit(0)  # without waiting for a group whose leader has left


if __name__ == "__main__":
    main()
