"""Lists that are longer than a page."""

import pytest

from batchwright.cli.paging import read_pages


@pytest.mark.parametrize(
    ("there", "limit", "pages"),
    [(0, 5, [3]), (2, 5, [3]), (3, 5, [3, 2]), (7, 5, [3, 2]), (9, 9, [3, 3, 3]), (7, 2, [2])],
)
async def test_pages_are_read_until_enough_or_all_were(there, limit, pages):
    asked = []

    async def fetch(last, wanted):
        asked.append(wanted)
        first = 0 if last is None else last + 1
        return list(range(there))[first : first + wanted]

    assert await read_pages(fetch, limit, page=3) == list(range(min(there, limit)))
    assert asked == pages
