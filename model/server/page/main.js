// The page: its parts, and what they tell each other.

import { getJson } from "./api.js";
import { Asking, markUnfinished } from "./asking.js";
import { listChats } from "./chats.js";
import { composer } from "./composer.js";
import { Devices } from "./devices.js";
import { at } from "./dom.js";
import { Experts } from "./experts.js";
import { firstView } from "./first.js";
import { Messages } from "./messages.js";
import { Panels } from "./panels.js";
import { Settings } from "./settings.js";
import * as store from "./store.js";
import { tabs } from "./tabs.js";
import { Workers } from "./workers.js";

const status = (text) => (at("status").textContent = text);

const experts = new Experts();
const workers = new Workers();
const devices = new Devices();
const routing = new WeakMap(); // of messages, while the page is open
let current = null;
let about = null;

function draw() {
  experts.draw();
  workers.draw();
}

const panels = new Panels(draw);
const settings = new Settings({ recoloured: draw, keyed: () => connect() });

const asking = new Asking(settings, {
  begins(conversation, message) {
    busy(true);
    messages.note("");
    list();
    messages.show(conversation.messages, message);
    status("The answer is being written.");
    workers.answerBegins();
  },
  grows(conversation, message) {
    if (conversation === current) messages.update(message);
  },
  routed(conversation, message, piece) {
    if (!routing.has(message)) {
      routing.set(message, experts.record(about));
      if (conversation === current) showRouting(message);
    }
    routing.get(message).add(piece);
    if (conversation === current) experts.changed(routing.get(message));
  },
  ends(conversation, message) {
    workers.answerEnds();
    devices.refresh();
    busy(false);
    list();
    if (conversation === current) messages.show(conversation.messages);
    const { tokens, rate } = message.figures;
    const speed = rate ? `, ${rate.toFixed(1)} tokens a second` : "";
    status(message.error ?? `The answer is complete: ${tokens} tokens${speed}.`);
    if (!about && !message.error) connect();
  },
});

const messages = new Messages(at("messages"), {
  edit(index, text) {
    current.messages.splice(index);
    ask(text);
    at("prompt").focus();
  },
  regenerate(index) {
    current.messages.splice(index);
    answer();
    at("prompt").focus();
  },
  goOn(index) {
    current.messages.splice(index + 1);
    answer(true);
    at("prompt").focus();
  },
  look(message) {
    panels.open("insight");
    openTab("experts");
    showRouting(message);
  },
  hasRouting: (message) => routing.has(message),
  first: () =>
    firstView(about, {
      ask(text) {
        ask(text);
        at("prompt").focus();
      },
      inside: () => panels.open("insight"),
    }),
});

const openTab = tabs(["experts", "workers", "devices"], (name) => {
  if (name === "devices") devices.refresh();
  draw();
});

function ask(text) {
  if (asking.running) return;
  current.messages.push({ role: "user", content: text });
  answer();
}

function answer(goOn = false) {
  const told = Boolean(about?.routed_layers.length);
  if (told) panels.unfold();
  asking.answer(current, told && panels.looked, goOn);
}

function busy(on) {
  at("send").hidden = on;
  at("stop").hidden = !on;
  at("messages").setAttribute("aria-busy", on);
}

function list() {
  listChats(current, {
    open(conversation) {
      open(conversation);
      panels.closeDrawers();
    },
    remove(conversation) {
      asking.stop(conversation);
      store.remove(conversation.id);
      open(conversation === current ? (store.all()[0] ?? store.create()) : current);
      at("new").focus();
    },
  });
}

function open(conversation) {
  current = conversation;
  list();
  messages.show(current.messages);
  showRouting();
}

/** The experts of a message; of the last answer, if none is named. */
function showRouting(message = current.messages.findLast(({ role }) => role === "assistant")) {
  experts.show(message && routing.get(message), about);
}

at("new").addEventListener("click", () => {
  open(store.create());
  panels.closeDrawers();
  at("prompt").focus();
});

composer({ send: ask, stop: () => asking.stop(), busy: () => Boolean(asking.running) });

async function connect() {
  messages.note("");
  try {
    about = await getJson("/v1/pykernels");
    const workers = about.workers ? [`${about.workers} worker${about.workers === 1 ? "" : "s"}`] : [];
    at("model").textContent = [about.model, about.devices.join(" + "), ...workers].filter(Boolean).join(" · ");
    messages.plain = !about.chat_template;
    messages.show(current.messages);
  } catch (error) {
    about = null;
    at("model").textContent = "";
    const refused = error.status === 401;
    messages.note(error.message, { bad: true, again: refused ? null : connect });
    if (refused) {
      panels.open("side");
      settings.askForKey();
    }
  }
  devices.show(about);
  showRouting();
}

markUnfinished();
open(store.all()[0] ?? store.create());
connect();
at("prompt").focus();
