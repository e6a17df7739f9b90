"""Who holds which KV blocks: tables per request and group, prefix reuse, windows that move on.

Owns: the block tables of requests (fields of Request) and all traffic with the BlockPool. Knows
nothing of budgets or queues. Called by Scheduler only.

Blocks are registered for reuse when the tokens that fill them are *scheduled*: plans run in order
and each runs exactly once, so that whoever finds a block reads it after it was written. A request
may thus read blocks that another one fills in the same plan, in an earlier row.
"""

from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

from trimaran.messages import NULL_BLOCK_ID, KVCacheConfig
from trimaran.scheduling.block_pool import BlockPool
from trimaran.scheduling.kv_layout import peak_blocks
from trimaran.scheduling.request import Request

_HASH_BYTES = 32
_PERSON = b"trimaran kv"  # BLAKE2 personalisation: our own family of hashes


class CachedPrefix(NamedTuple):
    num_tokens: int  # a multiple of the block size
    tables: list[list[int]]  # per group; null before a window


def root_hash(salt: str | None) -> bytes:
    """What the first block's hash is chained to: every field that separates caches, tagged."""
    fields = b"" if salt is None else b"salt:" + salt.encode()
    return blake2b(fields, digest_size=_HASH_BYTES, person=_PERSON).digest()


class KVCacheManager:
    """``max_chunk``: most tokens of one request in one step, which bounds a sliding group."""

    def __init__(
        self, config: KVCacheConfig, *, max_chunk: int, enable_prefix_caching: bool = True
    ) -> None:
        layout = config.layout
        self.pool = BlockPool(config.num_blocks, len(layout.groups))
        self.block_size = layout.block_size
        self._layout = layout
        self._max_chunk = max_chunk
        self._caches = enable_prefix_caching
        self._num_groups = len(layout.groups)
        self._full = [i for i, group in enumerate(layout.groups) if group.kind == "full"]
        self._sliding = [
            (i, group.window) for i, group in enumerate(layout.groups) if group.kind == "sliding"
        ]
        self._pack_block = Struct(f"<{self.block_size}I").pack
        # Tokens looked up and found, since the start.
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return self.pool.num_referenced / (self.pool.num_blocks - 1)

    def peak_blocks(self, num_tokens: int) -> int:
        return peak_blocks(self._layout, num_tokens, self._max_chunk)

    def num_held_blocks(self, request: Request) -> int:
        return sum(map(len, request.block_tables)) - sum(request.num_released_blocks)

    def blocks_still_needed(self, request: Request) -> int:
        """Blocks that a running request will take at most to compute all tokens it has now."""
        return max(0, self.peak_blocks(len(request.token_ids)) - self.num_held_blocks(request))

    # ------------------------------------------------------------------------------- prefix reuse

    def find_cached_prefix(self, request: Request) -> CachedPrefix:
        """The longest beginning that every group holds; at least one token is left to compute."""
        if not self._reads_cache(request):
            return CachedPrefix(0, [[] for _ in range(self._num_groups)])
        limit = (len(request.token_ids) - 1) // self.block_size
        self._hash_blocks(request, limit)
        hashes = request.block_hashes
        length = limit
        for group in self._full:
            cached = self.pool.cached(group)
            length = next((i for i in range(length) if hashes[i] not in cached), length)
        # Any shorter length suits the full groups as well; sliding ones must agree on one.
        agreed = False
        while not agreed:
            agreed = True
            for group, window in self._sliding:
                fitting = self._longest_window_hit(group, window, hashes, length)
                agreed = agreed and fitting == length
                length = fitting
        tables = [[NULL_BLOCK_ID] * length for _ in range(self._num_groups)]
        for group, table in enumerate(tables):
            cached = self.pool.cached(group)
            for index in range(self._first_visible_block(group, length), length):
                table[index] = cached[hashes[index]]
        return CachedPrefix(length * self.block_size, tables)

    def has_room(self, request: Request, prefix: CachedPrefix, reserved: int) -> bool:
        """Whether all tokens that the request has now fit beside ``reserved`` blocks for others."""
        held = [block for table in prefix.tables for block in table if block != NULL_BLOCK_ID]
        needed = max(0, self.peak_blocks(len(request.token_ids)) - len(held))
        return needed + self.pool.num_idle_among(held) + reserved <= self.pool.num_free

    def attach(self, request: Request, prefix: CachedPrefix) -> None:
        """Let a request without blocks begin behind a prefix just found."""
        assert not request.num_slots, f"{request.request_id} holds blocks already"
        if self._reads_cache(request):
            self.num_prefix_queries += len(request.token_ids)
            self.num_prefix_hits += prefix.num_tokens
        for table in prefix.tables:
            self.pool.touch(table)
        length = prefix.num_tokens // self.block_size
        request.block_tables = prefix.tables
        request.num_released_blocks = [
            self._first_visible_block(group, length) for group in range(self._num_groups)
        ]
        request.num_slots = request.num_computed_tokens = prefix.num_tokens
        request.num_registered_blocks = length

    def _reads_cache(self, request: Request) -> bool:
        # Log-probabilities of prompt tokens exist only where their logits are computed.
        return self._caches and not request.gathers_prompt_logprobs

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing done, while any block is in use."""
        return self.pool.reset_cache()

    # --------------------------------------------------------------------------------- allocation

    def try_allocate(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Slots for the next ``num_tokens``, for all groups or none (None: too few blocks).

        Returns the new blocks per group, or [] if those it has suffice. First gives back what no
        later query sees.
        """
        end = request.num_computed_tokens + num_tokens
        self._release_outside_windows(request)
        new_blocks: list[list[int]] = []
        missing = -(-(end - request.num_slots) // self.block_size)
        if missing > 0:
            if missing * self._num_groups > self.pool.num_free:
                return None
            for table in request.block_tables:
                blocks = self.pool.take(missing)
                table += blocks
                new_blocks.append(blocks)
            request.num_slots += missing * self.block_size
        self._register_blocks(request, end)
        return new_blocks

    def free(self, request: Request) -> None:
        """Give all blocks back, the end of the sequence first, so that it is reused first."""
        self._register_blocks(request, request.num_computed_tokens)
        for column in zip(*map(reversed, request.block_tables), strict=True):
            for block in column:
                self.pool.give(block)
        request.block_tables = []
        request.num_released_blocks = []
        request.num_slots = request.num_computed_tokens = request.num_registered_blocks = 0

    def _register_blocks(self, request: Request, num_tokens: int) -> None:
        first, end = request.num_registered_blocks, num_tokens // self.block_size
        if end <= first or not self._caches:
            return
        self._hash_blocks(request, end)
        for index in range(first, end):
            block_hash = request.block_hashes[index]
            for group, table in enumerate(request.block_tables):
                self.pool.register(table[index], group, block_hash)
        request.num_registered_blocks = end

    def _release_outside_windows(self, request: Request) -> None:
        for group, window in self._sliding:
            first = request.num_released_blocks[group]
            visible = max(0, request.num_computed_tokens - window + 1) // self.block_size
            if visible > first:
                table = request.block_tables[group]
                for index in range(first, visible):
                    self.pool.give(table[index])
                    table[index] = NULL_BLOCK_ID
                request.num_released_blocks[group] = visible

    # ------------------------------------------------------------------------------------ windows

    def _first_visible_block(self, group: int, length: int) -> int:
        """First block that the token after ``length`` blocks sees."""
        spec = self._layout.groups[group]
        if spec.kind == "full":
            return 0
        return max(0, length * self.block_size - spec.window + 1) // self.block_size

    def _longest_window_hit(self, group: int, window: int, hashes: list[bytes], length: int) -> int:
        """The longest prefix, at most ``length`` blocks, whose last window is cached."""
        cached = self.pool.cached(group)
        needed = -(-(window - 1) // self.block_size)
        run = 0  # cached blocks in a row that end at `length`
        for index in range(length - 1, -1, -1):
            if run >= needed:
                break
            if hashes[index] in cached:
                run += 1
            else:
                run, length = 0, index
        return length

    # ------------------------------------------------------------------------------------- hashes

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        """Extend the request's chain of hashes to its first ``num_blocks`` blocks."""
        hashes, tokens, size = request.block_hashes, request.token_ids, self.block_size
        parent = hashes[-1] if hashes else root_hash(request.cache_salt)
        for start in range(len(hashes) * size, num_blocks * size, size):
            data = parent + self._pack_block(*tokens[start : start + size])
            parent = blake2b(data, digest_size=_HASH_BYTES, person=_PERSON).digest()
            hashes.append(parent)
