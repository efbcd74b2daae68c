"""Pools of ranks, started by the first test that asks for one and ended with the session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import RankPool

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.distributed)


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks8() -> Iterator[RankPool]:
    with RankPool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks12() -> Iterator[RankPool]:
    with RankPool(12) as pool:
        yield pool
