"""Texts that tell tokenizers apart, and a random mix of their pieces."""

import numpy as np

TEXTS = (
    "",
    "a",
    "yes",
    " yes",
    "Hello",
    " Hello",
    "  two spaces  in  between  ",
    "   ",
    "\n",
    "\n\n  \n",
    "\ttab\t\tand\r\nlines\r\n\r\n",
    "trailing ",
    "def f(x):\n    if x:\n        return x + 1\n",
    "The year 1987  5 and 12345, isn't it? 3.14 \u00bd \u0663\u0664",
    "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m",
    "cafe\u0301 nai\u0308ve A\u030angstro\u0308m",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4",
    "\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7",
    "HELLO's we'LL don't I'M THEY'RE",
    "a\u00a0b\u2003c\u200bd\ufeffe \ufb01 \u2460 \u212b",
    "x\u2581y \u2581 z",
    "snake_case camelCase kebab-case https://a.b/c?d=e&f=%20",
    "((()))[[]]{{}}//**##!!??",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0420\u0443\u0441\u0441 \u0395\u03bb\u03bb\u03b7 \u0627\u0644\u0639",
    " zebrafish banananas aaaaaaa",
    "nul\x00 and \x7f",
)

PIECES = [" ", "  ", "a", "an", "na", "b", "the", " the", "\n", "\t", "1", "12", "'s", "A", ".", ","]
PIECES += ["\u00e9", "e\u0301", "\u4f60", "\U0001f600", "\u2581", "Z\u00c9", "\u0939\u093f", "\u00a0"]


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Random concatenations of pieces."""
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(PIECES, rng.integers(1, 12))) for _ in range(count)]
