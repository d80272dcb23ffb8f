// What each device has of the model, and what the engine has counted since its start.

import { at, make } from "./dom.js";
import { counts } from "./figures.js";

const GB = 1e9;
const percent = (share) => `${(100 * share).toFixed(0)}\u00a0%`;

/** Numbers as runs: 0-3, 5. */
function runs(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}

function beside(part) {
  if (part.slots) return `${part.slots} slots`;
  return part.pinned ? `${part.pinned} for good` : "";
}

export class Devices {
  show(about) {
    const parts = about?.parts ?? [];
    at("parts").hidden = !parts.length;
    at("parts").tBodies[0].replaceChildren(
      ...parts.map((part) => {
        const row = make("tr");
        const workers = part.device === "cpu" && about.workers ? `, ${about.workers} workers` : "";
        row.append(make("th", part.device + workers, { scope: "row" }));
        for (const text of [runs(part.layers), runs(part.expert_layers), beside(part)]) {
          row.append(make("td", text || "–"));
        }
        return row;
      }),
    );
    this.refresh();
  }

  async refresh() {
    if (at("devices").hidden) return;
    const found = await counts();
    at("counts").replaceChildren(...(found ? this.lines(found) : [make("p", "The server does not tell its counts.")]));
  }

  lines(found) {
    const { decode_steps, decode_seconds, read_bytes, read_roof, expert_cache } = found;
    const lines = [["decode steps", decode_steps.toLocaleString("en")]];
    if (decode_steps && decode_seconds) {
      lines.push(["time of one, the mean", `${((1000 * decode_seconds) / decode_steps).toFixed(2)}\u00a0ms`]);
      if (read_bytes) lines.push(["weights read in them", `${(read_bytes / decode_seconds / GB).toFixed(1)}\u00a0GB/s`]);
      if (read_roof) lines.push(["share of the read roof", percent(read_bytes / decode_seconds / read_roof)]);
    }
    if (read_roof) lines.push(["read roof of the workers", `${(read_roof / GB).toFixed(1)}\u00a0GB/s`]);
    if (expert_cache) {
      const { choices, hits, swaps } = expert_cache;
      lines.push(["experts chosen", choices.toLocaleString("en")]);
      lines.push(["of these in slots", choices ? percent(hits / choices) : "–"]);
      lines.push(["experts brought into slots", swaps.toLocaleString("en")]);
    }
    return lines.flatMap(([name, value]) => [make("dt", name), make("dd", value)]);
  }
}
