"""`PROBES`: questions with known answers, by which the method of a model's decisions is chosen."""

from __future__ import annotations

from typing import NamedTuple

from chunkattn.decisions import Choice


class Probe(NamedTuple):
    """One state with its questions.

    Attributes:
        state: text of the state.
        questions: choices of four options.
        answers: the right option of each question.
    """

    state: str
    questions: tuple[Choice, ...]
    answers: tuple[str, ...]


def _probe(state: str, *asked: tuple[str, str, str, str, str]) -> Probe:
    """Return a probe.

    Args:
        state: text of the state.
        *asked: a question, its right answer, and three wrong ones.
    """
    return Probe(state, tuple(Choice(text, options) for text, *options in asked), tuple(right for _, right, *_ in asked))


# Sorted, as the prompts list them, the right options stand six times in each place. They are as long as the wrong ones.
PROBES = (
    _probe(
        "Order 4471, written on Tuesday: the box came two days late, and the blue lamp in it was broken. Please send a new "
        "lamp, I do not want my money back. Regards, Irene Walsh",
        ("What was broken?", "lamp", "clock", "table", "vase"),
        ("What does the customer want?", "a new lamp", "a coupon", "a discount", "a catalogue"),
        ("Who wrote this?", "Irene Walsh", "Paul Becker", "Carla Reyes", "Martin Shaw"),
        ("How is the mood of the text?", "unhappy", "delighted", "proud", "bored"),
    ),
    _probe(
        "Lake Sarnen lies in the Swiss canton of Obwalden. It is 52 metres deep, and its water flows through the river Aa into "
        "Lake Lucerne. In cold winters its northern bay freezes.",
        ("In which country is the lake?", "Switzerland", "Norway", "Austria", "Canada"),
        ("How deep is the lake?", "52 metres", "12 metres", "300 metres", "45 metres"),
        ("What happens in cold winters?", "the bay freezes", "the lake dries up", "the river floods", "the bridge closes"),
        ("What is the text about?", "geography", "cooking", "sports", "music"),
    ),
    _probe(
        "Melt the butter, stir in flour and milk, and let the sauce thicken for ten minutes. Pour it over the cauliflower, "
        "cover it with grated cheese, and bake it until the top is brown.",
        ("What is the text?", "a recipe", "a contract", "a poem", "an invoice"),
        ("Which vegetable is used?", "cauliflower", "spinach", "carrots", "peas"),
        ("What covers the dish in the oven?", "grated cheese", "bread crumbs", "sliced ham", "fried onions"),
        ("How long does the sauce thicken?", "ten minutes", "twenty days", "two hours", "three weeks"),
    ),
    _probe(
        "The 14:20 train to Leeds is cancelled because of a signal failure near York. Passengers may take the bus from stop C, "
        "which leaves at 14:45. Tickets stay valid.",
        ("Why is the train cancelled?", "a signal failure", "a strike", "heavy snow", "a fallen tree"),
        ("What may passengers take instead?", "the bus", "a taxi", "the ferry", "a plane"),
        ("Which city does the train go to?", "Leeds", "Bristol", "Glasgow", "Oxford"),
        ("Who should read this?", "passengers", "teachers", "farmers", "doctors"),
    ),
    _probe(
        "Ada kept bees behind the old mill. Every August her brother Tom helped her to fill the jars, and in return he took "
        "six of them home to his daughter Nell, who ate honey with a spoon.",
        ("What animals did Ada keep?", "bees", "hens", "goats", "ducks"),
        ("In which month did they fill the jars?", "August", "March", "December", "May"),
        ("Who ate honey with a spoon?", "Nell", "Ada", "Tom", "Otto"),
        ("Where were the animals?", "behind the mill", "by the church", "under the bridge", "in the cellar"),
    ),
    _probe(
        "def area(width, height):\n    return width * height\n\nThe function above is called with 3 and 4. Its author wrote it "
        "in Python on a Sunday, and it has no test yet.",
        ("In which language is the function?", "Python", "Fortran", "Perl", "Java"),
        ("What does the function return?", "the area", "the length", "the name", "the weight"),
        ("What is missing?", "a test", "a licence", "a parameter", "a return"),
        ("When was it written?", "Sunday", "Monday", "Friday", "Thursday"),
    ),
)
"""Questions that each model is asked once."""
