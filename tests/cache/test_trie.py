"""Order of eviction when pages run out."""

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
    assert trie.num_free == 4
    assert not cached(trie)


def test_a_salt_leaves_no_trace():
    trie = BlockTrie(2)
    for salt in map(str, range(50)):
        trie.release(path(trie, "a", salt=salt))
    assert len(trie._roots) <= 3
    trie.evict_all()
    assert not trie._roots


def question(trie, prefix, *chunks):
    """Hold a block below a prefix and the ends of chunks, with one more below it; children first."""
    above = [trie.acquire(block) for block in (prefix, *chunks)]
    first, second = trie.new(1, keep=True), trie.new(1, keep=True)
    trie.link(first, tuple(above), ("q", *(c.serial for c in chunks)))
    trie.link(second, (first,), ("more",))
    first.filled = second.filled = 1
    return [second, first, *reversed(above)]


def test_forgotten_paths_go_with_what_stands_on_them():
    trie = BlockTrie(16)
    for names in ("pab", "pac", "pd"):
        trie.release(path(trie, *names))
    p = trie.root(None).children["p",]
    a, d = p.children["a",], p.children["d",]
    b = a.children["b",]
    for chunks in ((b, d), (d,), (b,)):
        trie.release(question(trie, p, *chunks))
    trie.check([])
    trie.forget([a, b])
    trie.check([])
    assert cached(trie) == {"p", "a", "c", "d", "q", "more"}  # "a" stays for "c", and one question that saw "d" alone
    assert trie.num_cached == 6
    trie.evict_all()
    assert trie.num_free == 16


def test_what_is_held_is_forgotten_with_its_holder():
    trie = BlockTrie(8)
    held = path(trie, "a", "b")
    b, a = held[:2]
    asked = question(trie, a, b)
    trie.forget([b])
    trie.check([held, asked])
    assert cached(trie) == {"a", "b", "q", "more"}
    trie.release(held)
    trie.check([asked])
    trie.release(asked)
    trie.check([])
    assert cached(trie) == {"a"}


def test_looking_is_no_use():
    trie = BlockTrie(2)
    trie.release(path(trie, "a"))
    trie.release(path(trie, "b"))
    trie.release(path(trie, "a"), used=False)
    trie.release(path(trie, "c"))
    assert cached(trie) == {"b", "c"}
    for _ in range(1000):
        trie.release(path(trie, "b"), used=False)
    assert len(trie._leaves) < 100
