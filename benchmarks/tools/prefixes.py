"""A workload whose prompts share their beginnings in part, and a small model of a server's prefix cache."""

import json
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he")


def prose(source: random.Random, size: int) -> str:
    return " ".join(source.choices(WORDS, k=size // 4))[:size]


def requests(count: int, line_bytes: int, seed: int = 7, systems_count: int = 20) -> Iterator[bytes]:
    """Lines of a chat batch in random order: some system prompts, documents under each, seven questions on each."""
    source = random.Random(seed)
    systems = [prose(source, source.randrange(400, line_bytes // 3)) for _ in range(systems_count)]
    documents_count = 1 + 2 * count // (15 * systems_count)
    sizes = [[source.randrange(300, line_bytes // 3) for _ in range(documents_count)] for _ in systems]
    documents = [[prose(source, size) for size in row] for row in sizes]
    for number in range(count):
        system = source.randrange(len(systems))
        document = documents[system][source.randrange(len(documents[system]))]
        yield line(number, systems[system], document, source, line_bytes)


def line(number: int, system: str, document: str, source: random.Random, line_bytes: int) -> bytes:
    room = line_bytes - len(system) - len(document) - 230
    offset = source.randrange(len(TEXT) - line_bytes)
    question = f"Question {source.randrange(10**9)}: {TEXT[offset : offset + max(0, room)]}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{document}\n{question}"}]
    body = {"model": f"org/model-{number % 3}", "messages": messages, "max_tokens": 256}
    request = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(request).encode()


TEXT = prose(random.Random(1), 1_000_000)


def write(file: Path, count: int, line_bytes: int) -> int:
    with file.open("wb") as target:
        for request in requests(count, line_bytes):
            target.write(request + b"\n")
    return file.stat().st_size


class BlockCache:
    """Blocks by prefix; the least recently used is evicted first. A request finds its leading blocks up to a miss."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.blocks_max = blocks_max
        self.cached = 0
        self.total = 0

    def ask(self, chain: bytes) -> None:
        hit = True
        for start in range(0, len(chain), 8):
            block = chain[start : start + 8]
            hit = hit and block in self.blocks
            self.cached += hit
            self.total += 1
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.blocks_max:
            self.blocks.popitem(last=False)


def cached_share(chains: Sequence[bytes], blocks_max: int) -> float:
    """Cached blocks divided by those that could be: all but the first of each kind."""
    cache = BlockCache(blocks_max)
    for chain in chains:
        cache.ask(chain)
    possible = cache.total - distinct(chains)
    return cache.cached / possible if possible else 1.0


def distinct(chains: Sequence[bytes]) -> int:
    return len({chain[start : start + 8] for chain in chains for start in range(0, len(chain), 8)})
