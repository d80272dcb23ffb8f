// The page: what its buttons, keys and fields do.

import { getJson, streamed } from "./api.js";
import { Experts } from "./experts.js";
import { Messages } from "./messages.js";
import * as store from "./store.js";
import { Workers } from "./workers.js";

const at = (id) => document.getElementById(id);
const status = (text) => (at("status").textContent = text);

const experts = new Experts();
const workers = new Workers();
const routing = new WeakMap(); // of messages, while the page is open
let current = null;
let running = null; // {controller, conversation}
let about = null;

const messages = new Messages(at("messages"), {
  edit: (index, text) => {
    current.messages.splice(index);
    ask(text);
    at("prompt").focus();
  },
  regenerate: (index) => {
    current.messages.splice(index);
    answer();
    at("prompt").focus();
  },
  look: (message) => showRouting(message),
  hasRouting: (message) => routing.has(message),
});

// Settings.

const form = at("settings");
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
  "frequency_penalty", "max_tokens", "seed",
];

function chosen() {
  const found = {};
  for (const name of NUMBERS) {
    const field = form.elements[name];
    if (field.value !== "" && field.validity.valid) found[name] = Number(field.value);
  }
  if (form.elements.stop.value) found.stop = form.elements.stop.value;
  if (form.elements.reasoning_effort.value) found.reasoning_effort = form.elements.reasoning_effort.value;
  return found;
}

function readSettings() {
  const kept = store.settings();
  for (const field of form.elements) {
    if (field.name && field.name !== "key" && kept[field.name] !== undefined) field.value = kept[field.name];
  }
  form.elements.key.value = store.key();
  useTheme();
}

function keepSettings() {
  const kept = {};
  for (const field of form.elements) {
    if (field.name && field.name !== "key" && field.value) kept[field.name] = field.value;
  }
  store.keepSettings(kept);
  useTheme();
}

function useTheme() {
  const theme = form.elements.theme.value;
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  draw();
}

function draw() {
  experts.draw();
  workers.draw();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", keepSettings);
form.addEventListener("change", (event) => {
  if (event.target.name === "key") {
    store.keepKey(event.target.value);
    connect();
  }
});
form.addEventListener("reset", () => setTimeout(() => (store.keepKey(""), keepSettings())));

// Conversations.

function listConversations() {
  at("conversations").replaceChildren(
    ...store.all().map((conversation) => {
      const line = document.createElement("li");
      const open = document.createElement("button");
      const remove = document.createElement("button");
      open.type = remove.type = "button";
      open.className = "open";
      open.textContent = store.title(conversation);
      if (conversation === current) open.setAttribute("aria-current", "true");
      open.addEventListener("click", () => openConversation(conversation));
      remove.textContent = "×";
      remove.setAttribute("aria-label", `Delete ${store.title(conversation)}`);
      remove.addEventListener("click", () => {
        if (running?.conversation === conversation) running.controller.abort();
        store.remove(conversation.id);
        openConversation(conversation === current ? (store.all()[0] ?? store.create()) : current);
        at("new").focus();
      });
      line.append(open, remove);
      return line;
    }),
  );
}

function openConversation(conversation) {
  current = conversation;
  listConversations();
  messages.show(current.messages);
  const answered = current.messages.findLast((message) => message.role === "assistant");
  showRouting(answered);
}

function showRouting(message) {
  experts.show(message && routing.get(message), about);
}

at("new").addEventListener("click", () => {
  openConversation(store.create());
  at("prompt").focus();
});

// Asking.

function ask(text) {
  current.messages.push({ role: "user", content: text });
  return answer();
}

function body(conversation) {
  const asked = [];
  const system = form.elements.system.value.trim();
  if (system) asked.push({ role: "system", content: system });
  for (const { role, content, reasoning } of conversation.messages) {
    const message = { role, content };
    if (role === "assistant" && reasoning) message.reasoning_content = reasoning;
    asked.push(message);
  }
  const found = { messages: asked, stream: true, stream_options: { include_usage: true }, ...chosen() };
  if (about?.routed_layers.length && !at("insight").hidden) found.pykernels = { routed_experts: true };
  return found;
}

async function answer() {
  if (running) return;
  const conversation = current;
  const request = body(conversation);
  const message = { role: "assistant", content: "", reasoning: "" };
  conversation.messages.push(message);
  running = { controller: new AbortController(), conversation };
  busy(true);
  listConversations();
  messages.show(conversation.messages, message);
  status("The answer is being written.");
  workers.answerBegins();
  const began = performance.now();
  let first = 0;
  let last = 0;
  let tokens = 0;
  const shown = () => conversation === current && messages.update(message);
  const measured = () => {
    const seconds = (last - first) / 1000;
    message.figures = {
      tokens,
      firstToken: first ? (first - began) / 1000 : null,
      rate: seconds > 0.02 && tokens > 1 ? (tokens - 1) / seconds : null,
    };
  };
  try {
    for await (const event of streamed("/v1/chat/completions", request, running.controller.signal)) {
      if (event.usage) tokens = event.usage.completion_tokens;
      const choice = event.choices[0];
      if (!choice || choice.delta.role) continue;
      last = performance.now();
      first ||= last;
      if (!event.usage) tokens++;
      message.content += choice.delta.content ?? "";
      if (choice.delta.reasoning_content) message.reasoning += choice.delta.reasoning_content;
      if (message.reasoning && choice.delta.content && !message.thought) message.thought = (last - first) / 1000;
      if (choice.finish_reason) message.finish = choice.finish_reason;
      const routed = choice.pykernels?.routed_experts;
      if (routed) {
        if (!routing.has(message)) {
          routing.set(message, experts.record(about));
          if (conversation === current) showRouting(message);
        }
        routing.get(message).add(routed);
        if (conversation === current) experts.changed(routing.get(message));
      }
      measured();
      shown();
    }
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else message.error = error.message;
  }
  measured();
  running = null;
  workers.answerEnds();
  busy(false);
  if (!message.content && !message.reasoning && message.finish === "stopped") conversation.messages.pop();
  store.keep();
  listConversations();
  if (conversation === current) messages.show(conversation.messages);
  const rate = message.figures.rate ? `, ${message.figures.rate.toFixed(1)} tokens a second` : "";
  status(message.error ?? `The answer is complete: ${tokens} tokens${rate}.`);
}

function busy(on) {
  at("send").hidden = on;
  at("stop").hidden = !on;
  at("messages").setAttribute("aria-busy", on);
}

function send() {
  const text = at("prompt").value;
  if (!text.trim() || running) return;
  at("prompt").value = "";
  ask(text);
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
at("stop").addEventListener("click", () => {
  running?.controller.abort();
  at("prompt").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !event.target.closest("#insight")) running.controller.abort();
});

// Panels.

for (const name of ["side", "insight"]) {
  at(`toggle-${name}`).addEventListener("click", (event) => {
    at(name).hidden = !at(name).hidden;
    event.currentTarget.setAttribute("aria-expanded", !at(name).hidden);
    draw();
  });
}

const tabs = [at("tab-experts"), at("tab-workers")];

function openTab(tab) {
  for (const one of tabs) {
    const selected = one === tab;
    one.setAttribute("aria-selected", selected);
    one.tabIndex = selected ? 0 : -1;
    at(one.getAttribute("aria-controls")).hidden = !selected;
  }
  draw();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => openTab(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[1 - tabs.indexOf(tab)];
    openTab(other);
    other.focus();
  });
}

async function connect() {
  try {
    about = await getJson("/v1/pykernels");
    at("model").textContent = `${about.model} · ${about.devices.join(" + ")} · ${about.workers} worker${about.workers === 1 ? "" : "s"}`;
    messages.plain = !about.chat_template;
    messages.show(current.messages);
    messages.note(about.chat_template ? "" : "This model has no chat template: it goes on with the text more than it answers.");
  } catch (error) {
    about = null;
    at("model").textContent = "";
    messages.note(error.message, true);
    if (error.status === 401) {
      form.querySelector("details").open = true;
      form.elements.key.focus();
    }
  }
  showRouting(current.messages.findLast((message) => message.role === "assistant"));
}

readSettings();
openConversation(store.all()[0] ?? store.create());
connect();
at("prompt").focus();
