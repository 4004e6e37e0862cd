// The live monitor: draws what /v1/status says (see __init__.py for the keys). Missing keys leave their place empty.

import { element } from "./markdown.js";

const PLACES = [["FAST", "fast", "VRAM"], ["PCIE", "pcie", "PCIe"], ["CPU", "cpu", "CPU"], ["CPU_LATE", "late", "late"], ["REMOTE", "remote", "remote"], ["SKIPPED", "skipped", "skipped"]];
const SVG = "http://www.w3.org/2000/svg";
const KEPT_SAMPLES = 60;
const at = (id) => document.getElementById(id);
const speeds = [];
let before = null;

function shape(name, attributes, title) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (title) {
    const words = document.createElementNS(SVG, "title");
    words.textContent = title;
    made.append(words);
  }
  return made;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let k = 0;
  while (n >= 1024 && k < units.length - 1) { n /= 1024; k += 1; }
  return `${n.toFixed(k && n < 100 ? 1 : 0)} ${units[k]}`;
}

const percent = (share) => `${(100 * share).toFixed(share > 0.995 || share === 0 ? 0 : 1)} %`;

// Tokens a second since the last look, from the running request's count.
function speed(status, now) {
  const running = status.queue?.running ?? null;
  const current = running && { id: running.id, n: running.generated, now };
  let value = 0;
  if (current && before && before.id === current.id && current.n > before.n) value = (current.n - before.n) / ((now - before.now) / 1000);
  before = current;
  return { value, busy: Boolean(running && running.generated) };
}

function drawSpeed({ value, busy }, last) {
  speeds.push(value);
  if (speeds.length > KEPT_SAMPLES) speeds.shift();
  const rest = last?.decode_s > 0 && last.drafts ? (last.drafts.emitted - last.drafts.from_prompt) / last.decode_s : 0;
  const shown = value || (busy ? 0 : rest);
  at("speed").textContent = shown ? shown.toFixed(shown < 100 ? 1 : 0) : "–";
  const top = Math.max(1, ...speeds);
  const points = speeds.map((v, i) => `${240 - (speeds.length - 1 - i) * (240 / (KEPT_SAMPLES - 1))},${35 - (33 * v) / top}`);
  const first = points[0].split(",")[0];
  at("spark").replaceChildren(
    shape("polygon", { points: `${first},36 ${points.join(" ")} 240,36` }),
    shape("polyline", { points: points.join(" ") }),
  );
}

function drawFacts(status) {
  const shares = status.shares ?? {};
  const queue = status.queue ?? {};
  const facts = [];
  if (shares.hit_share !== undefined) facts.push(["Cache hit rate", percent(shares.hit_share)]);
  if (shares.late_share !== undefined) facts.push(["Late rows", percent(shares.late_share)]);
  if (status.model?.context_tokens) facts.push(["Context", `${(status.conversations?.live_tokens ?? 0).toLocaleString()} of ${status.model.context_tokens.toLocaleString()}`]);
  if (queue.waiting) facts.push(["Waiting", String(queue.waiting.length)]);
  const drafts = status.last?.drafts;
  if (drafts?.offered) facts.push(["Drafts accepted", `${drafts.accepted} of ${drafts.offered}`]);
  at("facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

// Without a graphics card the fast tier is ordinary memory.
function drawRows(rows, onCard) {
  const present = PLACES.filter(([place]) => rows?.[place]?.some(Boolean)).map(([place, kind, label]) => [place, kind, place === "FAST" && !onCard ? "fast tier" : label]);
  const n = Math.max(0, ...present.map(([place]) => rows[place].length));
  const svg = at("rows");
  svg.setAttribute("viewBox", `0 0 ${Math.max(1, n)} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  at("legend").replaceChildren(...present.map(([place, kind, label]) => {
    const sum = rows[place].reduce((a, b) => a + b, 0);
    const all = present.reduce((a, [p]) => a + rows[p].reduce((x, y) => x + y, 0), 0);
    return element("span", { className: kind }, `${label} ${percent(sum / all)}`);
  }));
  svg.setAttribute("aria-label", at("legend").textContent || "No rows were computed yet");
  const marks = [];
  for (let layer = 0; layer < n; layer += 1) {
    const total = present.reduce((a, [place]) => a + (rows[place][layer] ?? 0), 0);
    let y = 100;
    for (const [place, kind, label] of present) {
      const height = total ? (100 * (rows[place][layer] ?? 0)) / total : 0;
      y -= height;
      if (height) marks.push(shape("rect", { class: kind, x: layer + 0.06, y, width: 0.88, height }, `layer ${layer}: ${rows[place][layer]} rows ${label} (${percent(height / 100)})`));
    }
  }
  svg.replaceChildren(...marks);
  const head = element("tr", {}, element("th", {}, "layer"), ...present.map(([, , label]) => element("th", {}, label)));
  const lines = Array.from({ length: n }, (_, layer) => element("tr", {}, element("td", {}, String(layer)), ...present.map(([place]) => element("td", {}, String(rows[place][layer] ?? 0)))));
  at("rows-table").replaceChildren(...(n ? [element("table", {}, head, ...lines)] : ["Nothing yet."]));
}

function drawTimeline(timeline) {
  const svg = at("timeline");
  const spans = [];
  for (let i = 0; i + 1 < timeline.length; i += 1) spans.push([timeline[i][0], timeline[i + 1][1] - timeline[i][1]]);
  const top = Math.max(0.001, ...spans.map(([, ms]) => ms));
  svg.setAttribute("viewBox", `0 0 ${Math.max(1, spans.length)} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren(...spans.map(([layer, ms], i) => shape("rect", { class: "time", x: i + 0.06, y: 100 - (95 * ms) / top, width: 0.88, height: (95 * ms) / top }, `layer ${layer}: ${ms.toFixed(2)} ms`)));
  const all = timeline.length > 1 ? timeline[timeline.length - 1][1] - timeline[0][1] : 0;
  at("window-ms").textContent = all ? `${all.toFixed(1)} ms` : "";
  svg.setAttribute("aria-label", all ? `Slowest layer ${top.toFixed(2)} ms of ${all.toFixed(1)} ms` : "No window yet");
}

function drawMemory(plan) {
  const tiers = {};
  for (const line of plan?.lines ?? []) (tiers[line.tier] ??= []).push(line);
  at("memory").replaceChildren(...Object.entries(tiers).map(([tier, lines]) => {
    const used = lines.reduce((a, line) => a + line.bytes, 0);
    const limit = plan.limits?.[tier]?.bytes ?? used;
    const top = Math.max(limit, used, 1);
    const largest = lines.filter((line) => line.bytes).sort((a, b) => b.bytes - a.bytes);
    const shown = largest.length > 6 ? [...largest.slice(0, 5), { owner: "other", bytes: largest.slice(5).reduce((a, line) => a + line.bytes, 0) }] : largest;
    let x = 0;
    const marks = shown.map((line, i) => {
      const mark = shape("rect", { class: `s${i}`, x, y: 0, width: (100 * line.bytes) / top, height: 10 }, `${line.owner}: ${bytes(line.bytes)}`);
      x += (100 * line.bytes) / top;
      return mark;
    });
    const svg = shape("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": `${tier}: ${bytes(used)} of ${bytes(limit)}` });
    svg.append(...marks);
    const owners = shown.map((line, i) => element("li", { className: `s${i}` }, `${line.owner} ${bytes(line.bytes)}`));
    return element("div", { className: "tier" }, element("p", {}, element("span", {}, tier === "ram" ? "RAM" : tier === "vram" ? "VRAM" : tier), element("span", {}, `${bytes(used)} of ${bytes(limit)}`)), svg, element("ul", {}, ...owners));
  }));
}

function drawMode(status) {
  const mode = status.mode ?? {};
  const changing = mode.changes_output ?? [];
  at("mode").replaceChildren(mode.exact ? "Exact: the same prompt gives the same text." : `Mode ${mode.name ?? "unknown"}.`);
  if (changing.length) at("mode").append(element("br"), element("span", { className: "changes" }, `Changes the output: ${changing.join(", ")}`));
  at("features").replaceChildren(...(status.features ?? []).map((f) => element("li", {}, element("b", {}, `${f.name} ${f.value}`), ` ${f.state}`)));
  drawQuality(status);
}

// The budget that lossy settings were chosen by, and what the running meters measure (nats of KL a token, top-1 agreement).
function drawQuality(status) {
  const quality = status.quality ?? {};
  const budget = Number(status.settings?.quality_budget?.value);
  const lines = [];
  for (const [kind, words] of [["conditional", "single windows"], ["cumulative", "whole answers"]]) {
    const n = quality[`${kind}_positions`];
    if (n) lines.push(`${words}: KL ${quality[`${kind}_kl`].toPrecision(2)} nats, top-1 ${percent(quality[`${kind}_top1`])}, ${n.toLocaleString()} tokens`);
  }
  at("quality-box").hidden = !(budget > 0) && !lines.length;
  at("quality").hidden = !(budget > 0);
  if (budget > 0) {
    const spent = quality.cumulative_positions ? quality.cumulative_kl : quality.conditional_positions ? quality.conditional_kl : 0;
    at("quality").value = Math.min(1, spent / budget);
    lines.unshift(`Budget ${budget} nats${lines.length ? `, ${percent(spent / budget)} of it measured` : "; nothing measured yet"}`);
  }
  at("quality-text").replaceChildren(...lines.flatMap((line, i) => (i ? [element("br"), line] : [line])));
}

export function show(status, now = performance.now()) {
  drawSpeed(speed(status, now), status.last);
  drawFacts(status);
  drawRows(status.rows, (status.plan?.lines ?? []).some((line) => line.tier === "vram"));
  drawTimeline(status.timeline_ms ?? []);
  drawMemory(status.plan);
  drawMode(status);
}
