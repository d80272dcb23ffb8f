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

function amount(bytes) {
  const unit = bytes < GB ? ["MB", 1e6] : ["GB", GB];
  return `${(bytes / unit[1]).toFixed(1)}\u00a0${unit[0]}`;
}

const blocks = (count, bytes) => (count ? `${count}, ${amount(bytes)}` : "–");

const speed = (bytes, seconds) => (seconds && bytes ? `${(bytes / seconds / GB).toFixed(2)}\u00a0GB/s` : "–");

/** Rows of a table, which is shown if there are any; the first text of each is its heading. */
function fill(table, rows) {
  table.hidden = !rows.length;
  table.tBodies[0].replaceChildren(
    ...rows.map(([heading, ...texts]) => {
      const row = make("tr");
      row.append(make("th", heading, { scope: "row" }), ...texts.map((text) => make("td", `${text}`)));
      return row;
    }),
  );
}

function levelRow([name, level]) {
  const lost = level.dropped + level.damaged + level.failed;
  return [
    ...[name, blocks(level.read, level.read_bytes), speed(level.read_bytes, level.read_seconds)],
    ...[level.missed, level.declined, blocks(level.written, level.written_bytes), lost],
  ];
}

function nodeRow(node) {
  const rate = node.rate ? `${Math.round(node.rate).toLocaleString("en")}\u00a0tok/s` : "–";
  return [node.name, node.role, node.up ? "up" : "down", node.inside, node.requests, node.lost, rate];
}

export class Devices {
  show(about) {
    const parts = about?.parts ?? [];
    fill(
      at("parts"),
      parts.map((part) => {
        const workers = part.device === "cpu" && about.workers ? `, ${about.workers} workers` : "";
        const texts = [runs(part.layers), runs(part.expert_layers), beside(part)];
        return [part.device + workers, ...texts.map((text) => text || "–")];
      }),
    );
    this.refresh();
  }

  async refresh() {
    if (at("devices").hidden) return;
    const found = await counts();
    fill(at("levels"), Object.entries(found?.kv_levels ?? {}).map(levelRow));
    fill(at("nodes"), (found?.nodes ?? []).map(nodeRow));
    at("counts").replaceChildren(...(found ? this.lines(found) : [make("p", "The server does not tell its counts.")]));
  }

  lines(found) {
    const { decode_steps, decode_seconds, read_bytes, read_roof, expert_cache } = found;
    const { prompt_tokens, cached_tokens, speed } = found;
    const lines = [["prompt tokens", prompt_tokens.toLocaleString("en")]];
    lines.push(["of these cached", prompt_tokens ? percent(cached_tokens / prompt_tokens) : "–"]);
    lines.push(["decode steps", decode_steps.toLocaleString("en")]);
    if (decode_steps && decode_seconds) {
      lines.push(["time of one, the mean", `${((1000 * decode_seconds) / decode_steps).toFixed(2)}\u00a0ms`]);
      if (read_bytes) lines.push(["weights read in them", `${(read_bytes / decode_seconds / GB).toFixed(1)}\u00a0GB/s`]);
      if (read_roof) lines.push(["share of the read roof", percent(read_bytes / decode_seconds / read_roof)]);
    }
    if (read_roof) lines.push(["read roof of the workers", `${(read_roof / GB).toFixed(1)}\u00a0GB/s`]);
    if (speed) {
      const rates = [speed.measured, speed.predicted].map((rate) => rate.toFixed(1));
      lines.push(["first decode steps", `${rates[0]}\u00a0tok/s, predicted ${rates[1]}`]);
    }
    if (expert_cache) {
      const { choices, hits, swaps } = expert_cache;
      lines.push(["experts chosen", choices.toLocaleString("en")]);
      lines.push(["of these in slots", choices ? percent(hits / choices) : "–"]);
      lines.push(["experts brought into slots", swaps.toLocaleString("en")]);
    }
    const made = lines.flatMap(([name, value]) => [make("dt", name), make("dd", value)]);
    const whole = { class: "whole" };
    if (speed?.note) made.push(make("dt", "off by more than a fifth", whole), make("dd", speed.note, whole));
    return made;
  }
}
