"""Four ranks that import Lightning once, for all tests of the plugin."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks
