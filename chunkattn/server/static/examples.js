/** Example prompts that the bundled demo model can answer, as in `chunkattn demo`. */

export const SEPARATOR = " # # ";

const PREFIX = "Read the documents and answer the question.";
const DOCUMENTS = [
  "Zenuso works as a baker. Zenuso lives in Kirora.",
  "Mukaba has a friend called Bimupu. Mukaba was born in Sinoba.",
  "Lezudo likes honey. Lezudo has a house in Pegelu.",
  "Taraku is a sailor. The best friend of Taraku is Vikalu.",
];
const QUESTIONS = ["Where does Lezudo live?", "Who is the friend of Mukaba?", "What is the job of Taraku?"];

/** Prompts in parts, with titles. */
export const EXAMPLES = QUESTIONS.map((question) => ({
  title: question,
  parts: { prefix: PREFIX, documents: DOCUMENTS, question: `${question} Answer:` },
}));

export const SCORE_EXAMPLE = { query: "Find a person who lives in Kirora.", items: DOCUMENTS, labels: ["yes", "no"] };
