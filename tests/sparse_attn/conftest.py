"""What the tests of the compiled operators share."""

from collections.abc import Iterator

import pytest
import torch

from sparse_attn import ops


@pytest.fixture
def native() -> None:
    """The operators must be there: a test suite that skips them proves nothing."""
    if ops.why_not() is not None:
        pytest.fail(f"the compiled operators must be built for the tests: {ops.why_not()}")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN, so that a place an operator forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
