/** Examples. The bundled demo model can answer the prompts, as in `chunkattn demo`; it was not trained for decisions. */

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

export const RERANK_EXAMPLE = { query: "Find a person who likes honey.", documents: DOCUMENTS };

const MAIL = `From: Nila
Subject: Order 17

The figs came a week late, and half of them were soft. I have written twice and nobody answered.
Please send my money back.`;

const CONVERSATION = `[
  {"role": "user", "content": "My order has not come. Its number is 17."},
  {"role": "assistant", "content": "I am sorry. It was sent to Tunise on Monday. Is that your town?"},
  {"role": "user", "content": "No! I live in Kirora. Change the address, please."}
]`;

const RULES = [
  "Refunds: money is returned when goods arrive spoiled or more than five days late.",
  "Delivery: an address can be changed until the goods leave the store.",
];

/** States with questions. `json` says whether the text is JSON; `documents` come before the state. */
export const DECIDE_EXAMPLES = [
  {
    title: "A mail",
    text: MAIL,
    questions: [
      { type: "predicate", text: "The writer wants money back." },
      { type: "choice", text: "Which team should answer?", options: ["billing", "delivery", "sales"] },
      { type: "score", text: "How angry is the writer?", options: ["calm", "annoyed", "furious"] },
    ],
  },
  {
    title: "A mail, with the rules as documents",
    text: MAIL,
    documents: RULES,
    questions: [
      { type: "predicate", text: "By the rules, the writer gets the money back." },
      { type: "choice", text: "Which rule applies?", options: ["refunds", "delivery", "none"] },
    ],
  },
  {
    title: "A conversation in JSON",
    json: true,
    text: CONVERSATION,
    questions: [
      { type: "predicate", text: "The user still waits for something to be done." },
      { type: "choice", text: "What should the assistant do next?", options: ["change the address", "ask a question", "end the conversation"] },
      { type: "score", text: "How helpful was the assistant?", options: ["not", "a little", "very"] },
    ],
  },
];
