// Figures under an answer: its speed, its first token, what its steps read.

import { getJson } from "./api.js";
import { make } from "./dom.js";

const ENDS = { length: "ended at its limit", stopped: "stopped", tool_calls: "calls a tool" };

/** The engine's counts now; null where the server does not tell them. */
export async function counts() {
  try {
    return await getJson("/v1/pykernels/figures", AbortSignal.timeout(3000));
  } catch {
    return null;
  }
}

/**
 * What lies between two counts: {roof: share of the read roof, hits: share of the experts chosen
 * that were in a GPU's slots}, null where it is not known. It is that of all steps between them.
 */
export function between(before, after) {
  if (!before || !after) return {};
  const grew = (name) => after[name] - before[name];
  const seconds = grew("decode_seconds");
  const cached = after.expert_cache && before.expert_cache;
  const chosen = cached ? after.expert_cache.choices - before.expert_cache.choices : 0;
  return {
    roof: after.read_roof && seconds > 0 ? grew("read_bytes") / seconds / after.read_roof : null,
    hits: chosen ? (after.expert_cache.hits - before.expert_cache.hits) / chosen : null,
  };
}

const percent = (share) => `${(100 * share).toFixed(0)}\u00a0%`;

/** A figure never breaks in two: there are lines between them only. */
export function figures(message) {
  const parts = [];
  const { tokens, firstToken, rate, roof, hits } = message.figures ?? {};
  const add = (text, title) => parts.push(make("span", text, title ? { title } : {}));
  if (tokens) add(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (rate) add(`${rate.toFixed(1)} tokens/s`);
  if (firstToken != null) {
    add(firstToken < 10 ? `first after ${(1000 * firstToken).toFixed(0)}\u00a0ms` : `first after ${firstToken.toFixed(1)} s`);
  }
  if (roof != null) add(`${percent(roof)} of the read roof`, "Weights read per second, of what this CPU's workers read from memory at most");
  if (hits != null) add(`${percent(hits)} cache hits`, "Of the experts chosen, those that were in slots of the GPU");
  if (ENDS[message.finish]) add(ENDS[message.finish]);
  return parts.flatMap((part, i) => (i ? ["\u00a0· ", part] : [part]));
}
