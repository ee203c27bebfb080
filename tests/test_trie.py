"""What goes first when pages run out."""

import pytest

from chunkattn.cache.trie import BlockTrie
from chunkattn.errors import OutOfPagesError


def path(trie, *names, salt=None):
    """Hold a path of blocks of one token, making what is missing; children first."""
    above, held = trie.acquire(trie.root(salt)), []
    held.append(above)
    for name in names:
        block = above.children.get((name,))
        if block is None:
            block = trie.new(1, keep=True)
            trie.link(block, (above,), (name,))
            block.filled = 1
        else:
            trie.acquire(block)
        held.insert(0, block)
        above = block
    return held


def cached(trie):
    return {block.key[0] for block in trie.blocks()}


def test_the_least_recently_used_leaf_goes_first():
    trie = BlockTrie(6)
    for names in ("ab", "ac", "d", "e"):
        trie.release(path(trie, *names))
    trie.release(path(trie, "a", "b"))  # used again
    gone = []
    held = path(trie, "u")
    for name in "vwx":
        before = cached(trie)
        held = [*path(trie, name), *held]
        gone += before - cached(trie)
    assert gone == ["c", "d", "e"]  # for the first a page was free
    assert {"a", "b"} <= cached(trie)
    trie.check([held])
    trie.release(held)
    assert trie.num_available == 6


def test_parents_outlive_children_and_holders_outlast_everything():
    trie = BlockTrie(4)
    trie.release(path(trie, "a", "b", "c"))
    kept = path(trie, "a", "b")
    more = [*path(trie, "x"), *path(trie, "y")]
    assert cached(trie) == {"a", "b", "x", "y"}
    with pytest.raises(OutOfPagesError):
        path(trie, "z")
    trie.release(more)
    trie.release(kept)
    trie.evict_all()
    assert trie.pool.num_free == 4
    assert not cached(trie)


def test_a_salt_leaves_no_trace():
    trie = BlockTrie(2)
    for salt in map(str, range(50)):
        trie.release(path(trie, "a", salt=salt))
    assert len(trie._roots) <= 3
    trie.evict_all()
    assert not trie._roots
