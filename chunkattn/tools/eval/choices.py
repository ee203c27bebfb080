"""`Choices`: the documents that a focus chooses for questions, with the scores computed once per document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chunkattn.calls.focus_scores import Candidates, get_score
from chunkattn.llm import LLM
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.choice import behind_one, candidates_of, choose
from chunkattn.tools.eval.conditions import GOLD, Condition, TokenizedQuestion
from chunkattn.tools.eval.data import Question
from chunkattn.tools.eval.results import Results, layout_digest, result_key


class Choices:
    """Chosen documents of questions by condition.

    A score is kept by the tokens of its document and question, so questions that share documents share scores.

    Args:
        llm: engine.
        questions: questions of the data.
        prompts: token ids of every question.
        results: earlier results; scores are added.
        model: digest of the model's weights.
    """

    def __init__(
        self,
        llm: LLM,
        questions: Sequence[Question],
        prompts: Sequence[TokenizedQuestion],
        results: Results,
        model: str,
    ) -> None:
        self._llm, self._questions, self._prompts, self._results = llm, questions, prompts, results
        self._model, self._chosen = model, dict[tuple[Condition, int], list[int]]()

    def of(self, condition: Condition, number: int) -> list[int]:
        """Return the documents that a question shows, the best first; none before `choose`, and without a focus.

        Args:
            condition: condition of the prompt.
            number: place of the question.
        """
        return self._chosen.get((condition, number), [])

    def recall(self, condition: Condition, number: int) -> float:
        """Return the share of a question's gold documents that were chosen. Equal documents count as one.

        Args:
            condition: condition with a focus.
            number: place of the question, which names its gold documents.
        """
        prompt = self._prompts[number]
        gold, chosen = ({tuple(prompt.documents[n]) for n in places} for places in (prompt.gold, self.of(condition, number)))
        return len(gold & chosen) / len(gold)

    def choose(self, condition: Condition, numbers: Sequence[int]) -> None:
        """Score and choose the documents of questions. A condition without a focus chooses nothing.

        Args:
            condition: condition of the prompts.
            numbers: places of the questions, which fit the KV pool together.

        Raises:
            RequestError: a score cannot judge a question.
            EngineError: a step failed.
        """
        if (focus := condition.focus) is None:
            return
        if focus.score == GOLD:
            for number in numbers:
                self._chosen[condition, number] = list(self._prompts[number].gold)
            return
        asked = {number: self._candidates(condition, number) for number in numbers}
        keys = {
            number: [self._key(candidates, place, focus.score) for place in candidates.numbers]
            for number, candidates in asked.items()
        }
        missing, known = dict[int, Candidates](), set[str]()
        for number, candidates in asked.items():
            pairs = zip(candidates.numbers, keys[number], strict=True)
            places = [place for place, key in pairs if key not in self._results and key not in known]
            known.update(keys[number])
            if places:
                missing[number] = replace(candidates, numbers=places)
        if missing:
            outputs = self._llm.run(get_score(focus.score)(self._llm.frontend, list(missing.values())), False)
            self._results.add(
                {"key": self._key(candidates, place, focus.score), "line": self._questions[number].line, focus.score: value}
                for (number, candidates), scored in zip(missing.items(), outputs, strict=True)
                for place, value in zip(candidates.numbers, scored.values, strict=True)
            )
        for number, candidates in asked.items():
            scores = [self._results[key][focus.score] for key in keys[number]]
            self._chosen[condition, number] = choose(candidates.prompt.layout, candidates.numbers, scores, focus.top_n)

    def _candidates(self, condition: Condition, number: int) -> Candidates:
        question, layout = self._questions[number], replace(condition, focus=None).layout(self._prompts[number])
        prompt = ParsedPrompt(layout, None, query=question.question, sources=question.documents)
        gap = condition.calibration.chunk_position_gap
        return Candidates(prompt, candidates_of(layout), gap, weighing=condition.weighing)

    def _key(self, candidates: Candidates, place: int, score: str) -> str:
        alone = behind_one(candidates.prompt.layout, place, candidates.gap)
        form = [alone.prefix_len, alone.chunk_lens, candidates.weighing, self._llm.config.rerank_template]
        return result_key("score", score, self._model, layout_digest(alone), form)
