"""What the `bishop bench` commands share. Light: a load generator must not import torch."""

import argparse
from typing import NoReturn

from commands.refusal import Refusal

PROMPTS = (
    "a red apple",
    "two dogs on a blue background",
    "a cat left of a tree, flat style",
    "three yellow stars on a green background",
    "a house",
    "a fish right of a boat",
    "an umbrella above a rabbit",
    "a purple flower on a white background",
)


class Parser(argparse.ArgumentParser):
    """Its errors are refusals, which are one line each."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(message)
