/** Answers of tab "Decide" as bars of probabilities. */

import { bar, element } from "./dom.js";

const SMALL_MASS = 0.1;
const SMALL_MASS_HINT = "Small label mass: the model wanted to say something else.";

/** Return the elements that show an answer of `/v1/decisions`. */
export function answerParts(answer) {
  const mass = answer.label_mass;
  if (answer.type === "refusal") {
    const text = `The label mass ${short(mass)} is below this server's limit.`;
    return [headed("refused", []), element("p", { class: "hint" }, text)];
  }
  const { title, facts, shares, best } = READ[answer.type](answer);
  facts.push(["label mass", short(mass)]);
  const parts = [
    headed(title, facts),
    element("ol", { class: "bars" }, ...shares.map(([name, share], index) => option(name, share, index === best))),
  ];
  // Texts are few among all texts: their mass is always small.
  if (answer.method !== "likelihood" && mass < SMALL_MASS) {
    parts.push(element("p", { class: "warning", "data-testid": "small-mass" }, SMALL_MASS_HINT));
  }
  return parts;
}

/** Functions that return title, facts, and the probabilities with the place of the likeliest, by the answer's type. */
const READ = {
  predicate({ probability }) {
    const shares = [
      ["yes", probability],
      ["no", 1 - probability],
    ];
    const best = probability >= 0.5 ? 0 : 1;
    return { title: shares[best][0], facts: [["probability of yes", probability.toFixed(4)]], shares, best };
  },
  choice({ choice, confidence, probabilities }) {
    const shares = probabilities.map(({ value, probability }) => [String(value), probability]);
    const best = probabilities.findIndex(({ value }) => value === choice);
    return { title: String(choice), facts: [["confidence", confidence.toFixed(4)]], shares, best };
  },
  score({ score, confidence, probabilities }) {
    const shares = probabilities.map(({ value, label, probability }) => [`${value} ${label}`, probability]);
    const best = shares.reduce((most, [, share], index) => (share > shares[most][1] ? index : most), 0);
    const facts = [
      ["score", `${score.toFixed(2)} of ${shares.length - 1}`],
      ["confidence", confidence.toFixed(4)],
    ];
    return { title: probabilities[best].label, facts, shares, best };
  },
};

const short = (share) => (share === 0 ? "0" : share.toPrecision(2));

function headed(title, facts) {
  const each = facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  return element(
    "div",
    { class: "answer-head" },
    element("h3", { "data-testid": "chosen" }, element("span", { class: "visually-hidden" }, "Answer: "), title),
    element("dl", { class: "statistics" }, ...each),
  );
}

function option(name, share, isBest) {
  return element(
    "li",
    { class: isBest && "best", "data-testid": "probability", "data-probability": share },
    element("span", { class: "caption" }, name),
    bar(share),
    element("span", { class: "number", title: String(share) }, share.toFixed(4)),
  );
}
