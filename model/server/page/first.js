// What an empty conversation shows: the model, examples to press, what *Inside* is.

import { button, make } from "./dom.js";

const TALK = [
  "Explain what a Mixture-of-Experts model is, in five sentences.",
  "Write a Python function that merges overlapping intervals, with a short test.",
  "Compare TCP and UDP in a table.",
];
const TEXT = ["def quicksort(xs):", "class Stack:\n    def push(self, item):", "import json\n\ndef load(path):"];

const many = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** The model in two sentences, of what the server knows of it. */
function described(about) {
  const layers = about.routed_layers;
  const [first] = layers;
  const kind = first ? "A Mixture-of-Experts model" : "A model";
  const chooses = first
    ? `: in ${many(layers.length, "layer")} a router gives each token ${first.topk} of ${first.experts} experts`
    : "";
  const gpus = about.devices.filter((device) => device !== "cpu");
  const on = [
    ...(about.workers && about.devices.includes("cpu") ? [`the CPU with ${many(about.workers, "worker")}`] : []),
    ...gpus,
  ];
  const where = on.length ? `It runs on ${on.join(" and ")}, and` : "It";
  return (
    `${kind} of the type ${about.model_type}${chooses}. ` +
    `${where} takes ${many(about.max_model_len, "token")} of question and answer.`
  );
}

/** actions: ask(text), inside(). */
export function firstView(about, actions) {
  if (!about) return null;
  const view = make("section", undefined, { class: "first", "aria-label": "To begin with" });
  view.append(make("h2", about.model), make("p", described(about)));
  if (!about.chat_template) {
    view.append(make("p", "It has no chat template: it goes on with a text more than it answers.", { class: "quiet" }));
  }
  const examples = make("div", undefined, { class: "examples", role: "group", "aria-label": "Examples" });
  for (const text of about.chat_template ? TALK : TEXT) {
    examples.append(button(text, () => actions.ask(text), about.chat_template ? "example" : "example plain"));
  }
  const inside = make("p", undefined, { class: "quiet" });
  inside.append(
    button("Inside", actions.inside, "link"),
    " shows what the model does meanwhile: which experts each token used, what each worker and" +
      " stream did when, and what each device has of the model.",
  );
  view.append(examples, inside);
  return view;
}
