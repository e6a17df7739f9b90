"""The blocks of the KV cache: which are free, which are in use, which hold a findable prefix.

Owns: reference counts, the free blocks and the prefix-cache map. Knows nothing of requests or
tokens: a block is a number, what it holds is a hash. Called by KVCacheManager only.

A block is in exactly one of four states:

    null (block 0)           stands where a table has no block; never taken, never given
    unused                   free, holds nothing worth keeping
    idle                     free, but findable by its hash until it is taken (least recent first)
    referenced               held by one request or more; findable too once registered

Every operation is O(1) per block: this runs in every step.
"""

from collections import OrderedDict
from collections.abc import Iterable

from trimaran.messages import NULL_BLOCK_ID


class BlockPool:
    """``num_blocks`` counts the null block; groups have separate hash maps over one pool."""

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks}")
        self.num_blocks = num_blocks
        # Taken from the end: what was given back last is warmest in the CPU's caches.
        self._unused = list(range(num_blocks - 1, NULL_BLOCK_ID, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._cached: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        # What a registered block holds, so that taking it can erase the entry.
        self._keys: list[tuple[int, bytes] | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._unused) + len(self._idle)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def take(self, count: int) -> list[int]:
        """``count`` blocks with one reference each; at most ``num_free``."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        unused, references = self._unused, self._references
        blocks = []
        for _ in range(count):
            if unused:
                block = unused.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget(block)
            references[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """One more reference to each (null blocks are passed over)."""
        references = self._references
        for block in blocks:
            if block == NULL_BLOCK_ID:
                continue
            if references[block] == 0:
                del self._idle[block]
            references[block] += 1

    def give(self, block: int) -> None:
        """One reference less (the null block is passed over).

        Give the end of a sequence first: idle blocks are taken in the order they came.
        """
        if block == NULL_BLOCK_ID:
            return
        references = self._references
        assert references[block] > 0, f"block {block} is given back more often than taken"
        references[block] -= 1
        if references[block] == 0:
            if self._keys[block] is None:
                self._unused.append(block)
            else:
                self._idle[block] = None

    def register(self, block: int, group: int, block_hash: bytes) -> None:
        """Make a referenced block findable (the null block is passed over).

        If another block with the same content is findable already, this one stays unknown.
        """
        if block == NULL_BLOCK_ID:
            return
        assert self._references[block] > 0, f"block {block} is registered while free"
        cached = self._cached[group]
        if self._keys[block] is None and block_hash not in cached:
            cached[block_hash] = block
            self._keys[block] = (group, block_hash)

    def cached(self, group: int) -> dict[bytes, int]:
        """Hash -> block of one group; to be read, not changed."""
        return self._cached[group]

    def num_idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these (null blocks passed over) count as free at present."""
        references = self._references
        return sum(1 for block in blocks if block != NULL_BLOCK_ID and references[block] == 0)

    def reset_cache(self) -> bool:
        """Forget all hashes. False, and nothing done, while any block is in use."""
        if self.num_referenced:
            return False
        for block in self._idle:
            self._forget(block)
        self._unused.extend(self._idle)
        self._idle.clear()
        return True

    def check(self) -> None:
        """Free + idle + referenced + null = all, each in one state; O(blocks), for tests."""
        unused, idle = set(self._unused), set(self._idle)
        referenced = {block for block, count in enumerate(self._references) if count}
        assert len(unused) == len(self._unused), "a block is unused twice"
        assert not unused & idle, f"unused and idle: {unused & idle}"
        assert not referenced & (unused | idle), f"used and free: {referenced & (unused | idle)}"
        everything = unused | idle | referenced | {NULL_BLOCK_ID}
        assert everything == set(range(self.num_blocks)), f"lost: {self.num_blocks, everything}"
        assert NULL_BLOCK_ID not in unused | idle | referenced, "the null block moved"
        found = {block: (g, h) for g, m in enumerate(self._cached) for h, block in m.items()}
        keyed = {block: key for block, key in enumerate(self._keys) if key is not None}
        assert found == keyed, "hash maps and blocks disagree"
        assert idle <= set(found), "an idle block cannot be found"
        assert not unused & set(found), "an unused block can be found"

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None, f"idle block {block} has no hash"
        group, block_hash = key
        del self._cached[group][block_hash]
        self._keys[block] = None
