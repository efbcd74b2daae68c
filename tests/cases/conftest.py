"""Four ranks for all cases that leave them alive."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankPool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool
