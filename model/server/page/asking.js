// Asks the server for answers, and takes them as they come.

import { Gone, streamed } from "./api.js";
import { between, counts } from "./figures.js";
import * as store from "./store.js";

// Several tokens may come in one event: each tells how many there are.
const COUNTED = { include_usage: true, continuous_usage_stats: true };
const CLOSED = "The page was closed before this answer was complete.";

/** Answers that were being written when the page was closed say so. */
export function markUnfinished() {
  for (const { messages } of store.all()) {
    const last = messages.at(-1);
    if (last?.role === "assistant" && !last.finish && !last.error) last.error = CLOSED;
  }
}

export class Asking {
  /**
   * show: {begins(conversation, message), grows(conversation, message), ends(conversation,
   * message), routed(conversation, message, piece)}; settings: see `Settings`.
   */
  constructor(settings, show) {
    this.settings = settings;
    this.show = show;
    this.running = null; // {controller, conversation}
    window.addEventListener("pagehide", () => this.running && store.keep());
  }

  stop(conversation = null) {
    if (!conversation || this.running?.conversation === conversation) this.running?.controller.abort();
  }

  /** The next message of a conversation; `goOn`: the rest of its last one. */
  async answer(conversation, experts, goOn = false) {
    if (this.running) return;
    const request = this.body(conversation, experts, goOn);
    const message = goOn ? conversation.messages.at(-1) : { role: "assistant", content: "", reasoning: "" };
    if (goOn) {
      message.content = message.content.trimEnd(); // as templates do; the rest begins behind that
      delete message.error;
      delete message.finish;
    } else conversation.messages.push(message);
    this.running = { controller: new AbortController(), conversation };
    store.keep();
    const clock = new Clock(goOn ? message.figures : null);
    this.show.begins(conversation, message);
    const before = counts();
    try {
      for await (const event of streamed("/v1/chat/completions", request, this.running.controller.signal)) {
        this.take(event, conversation, message, clock);
      }
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else message.error = error.message;
      if (error instanceof Gone && goOn) message.error = `It could not go on: ${error.message}`;
    }
    message.figures = clock.figures();
    if (clock.tokens) Object.assign(message.figures, between(await before, await counts()));
    this.running = null;
    if (message.finish === "stopped" && !message.content && !message.reasoning) conversation.messages.pop();
    store.keep();
    this.show.ends(conversation, message);
  }

  take(event, conversation, message, clock) {
    if (event.usage) clock.counted(event.usage.completion_tokens);
    const choice = event.choices[0];
    if (!choice || choice.delta.role) return;
    const { content, reasoning_content } = choice.delta;
    clock.came();
    message.content += content ?? "";
    message.reasoning += reasoning_content ?? "";
    if (message.reasoning && content && !message.thought) message.thought = clock.seconds;
    if (choice.finish_reason) message.finish = choice.finish_reason;
    const piece = choice.pykernels?.routed_experts;
    if (piece) this.show.routed(conversation, message, piece);
    message.figures = clock.figures();
    this.show.grows(conversation, message);
  }

  body(conversation, experts, goOn) {
    const messages = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    for (const { role, content, reasoning } of conversation.messages) {
      const message = { role, content };
      if (role === "assistant" && reasoning) message.reasoning_content = reasoning;
      messages.push(message);
    }
    const found = { messages, stream: true, stream_options: COUNTED, ...this.settings.chosen() };
    if (goOn) {
      found.continue_final_message = true;
      messages.at(-1).content = messages.at(-1).content.trimEnd();
    }
    if (experts) found.pykernels = { routed_experts: true };
    return found;
  }
}

/** When the tokens of an answer came; `earlier`: the figures of what it goes on from. */
class Clock {
  constructor(earlier) {
    this.earlier = earlier;
    this.began = performance.now();
    this.first = this.last = this.tokens = 0;
  }

  came() {
    this.last = performance.now();
    this.first ||= this.last;
  }

  counted(tokens) {
    this.tokens = tokens;
  }

  get seconds() {
    return (this.last - this.first) / 1000;
  }

  figures() {
    const first = this.first ? (this.first - this.began) / 1000 : null;
    const fast = this.seconds > 0.02 && this.tokens > 1;
    return {
      tokens: this.tokens + (this.earlier?.tokens ?? 0),
      firstToken: this.earlier?.firstToken ?? first,
      rate: fast ? (this.tokens - 1) / this.seconds : null,
    };
  }
}
