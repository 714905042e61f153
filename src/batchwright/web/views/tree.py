"""The children of a job as a tree. The address says which levels are open; each level and the whole have a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from batchwright.engine.briefs import Briefs, Child, JobBrief, Place
from batchwright.engine.jobs import JobId

OPEN_PATTERN = r"[0-9a-f]{12}(\.[0-9a-f]{12}){0,19}"
_FIRST_LEVEL = 25
_OTHER_LEVELS = 10
_OPEN_MAX = 6
_DEPTH_MAX = 6


@dataclass(slots=True)
class Twig:
    """A job in the tree, and what is open below it."""

    job: JobBrief
    has_children: bool
    is_open: bool = False
    below: list[Twig] = field(default_factory=list)
    has_more: bool = False
    """Whether it has more children than are shown."""
    turned: str | None = None
    """What the address has to say to open or to close it; None if it has no children, or if enough is open."""

    @property
    def key(self) -> str:
        """How the address names it; the whole id would make long addresses."""
        return self.job.id.hex[-12:]


async def load_tree(
    briefs: Briefs, id: JobId, *, tenant: str | None, opened: Sequence[str], after: Place | None
) -> tuple[list[Twig], Place | None]:
    """The children of this job with the levels that are open below them, and where the next page of them begins."""
    found = (await briefs.children([id], tenant=tenant, limit=_FIRST_LEVEL + 1, after=after))[id]
    tree = _twigs(found[:_FIRST_LEVEL])
    shown, level, is_open = list(tree), tree, list[str]()
    for _ in range(_DEPTH_MAX):
        wanted = [twig for twig in level if twig.has_children and twig.key in opened][: _OPEN_MAX - len(is_open)]
        children = await briefs.children([twig.job.id for twig in wanted], tenant=tenant, limit=_OTHER_LEVELS + 1)
        for twig in wanted:
            below = children[twig.job.id]
            twig.is_open, twig.below, twig.has_more = True, _twigs(below[:_OTHER_LEVELS]), len(below) > _OTHER_LEVELS
            is_open.append(twig.key)
        level = [one for twig in wanted for one in twig.below]
        shown += level
    for twig in shown:
        others = [key for key in is_open if key != twig.key]
        if twig.is_open or (twig.has_children and len(others) < _OPEN_MAX):
            twig.turned = ".".join(others if twig.is_open else [*others, twig.key])
    return tree, found[_FIRST_LEVEL - 1].place if len(found) > _FIRST_LEVEL else None


def _twigs(children: Sequence[Child]) -> list[Twig]:
    return [Twig(child.job, child.has_children) for child in children]
