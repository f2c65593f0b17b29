// Small live plots of what /metrics tells, asked for only while the page is looked at.

import { call } from "./api.js";

const EVERY_SECONDS = 2;
const MOST_POINTS = 60;
const WIDTH = 120;
const HEIGHT = 40;

const per = (now, before, what, of) => {
  const more = now.get(what) - before.get(what);
  const rise = now.get(of) - before.get(of);
  return rise > 0 && more >= 0 ? more / rise : null; // a restarted server counts from 0 again
};
const mean = (name) => (now, before) => {
  const seconds = per(now, before, `${name}_sum`, `${name}_count`);
  return seconds === null ? null : seconds * 1000;
};

// Title, unit, value from two readings of the metrics (null for none in between), and what it is a part of, if anything.
const PLOTS = [
  ["Throughput", "tokens/s", (now, before) => per(now, before, "step_tokens_sum", "seconds")],
  ["Time to first token", "ms", mean("time_to_first_token_seconds")],
  ["Time of a step", "ms", mean("step_seconds")],
  ["Prompts from the cache", "%", (now, before) => {
    const part = per(now, before, "prefix_cache_hits_total", "prefix_cache_queries_total");
    return part === null ? null : part * 100;
  }],
  ["Adapter rows", "", (now) => now.get("adapter_rows_used"), (now) => now.get("adapter_rows_total")],
];

/** Unlabelled values by name without its prefix; of labelled ones the sum. */
export function parseMetrics(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    const found = /^multilora_(\w+)(?:\{.*\})? (\S+)$/.exec(line);
    if (found) values.set(found[1], (values.get(found[1]) ?? 0) + Number(found[2]));
  }
  return values;
}

/** `onReading` is called with each reading's values. */
export function startPlots(onReading) {
  const plots = PLOTS.map(makePlot);
  let before = null;
  let asked = false;
  const poll = async () => {
    if (asked || document.visibilityState !== "visible") return;
    asked = true;
    try {
      const now = parseMetrics(await (await call("metrics", { quiet: true })).text());
      now.set("seconds", performance.now() / 1000);
      if (before) plots.forEach((plot) => plot(now, before));
      before = now;
      onReading(now);
    } catch {
      before = null; // without an answer there is nothing to draw; the next one may come
    } finally {
      asked = false;
    }
  };
  setInterval(poll, EVERY_SECONDS * 1000);
  document.addEventListener("visibilitychange", poll);
  poll();
}

function makePlot([title, unit, valueOf, totalOf]) {
  const root = document.getElementById("plot-template").content.cloneNode(true).firstElementChild;
  root.querySelector(".title").textContent = title;
  document.getElementById("plots").append(root);
  const points = [];
  return (now, before) => {
    const value = valueOf(now, before);
    points.push(value);
    if (points.length > MOST_POINTS) points.shift();
    const shown = (number) => number.toLocaleString("en", { maximumFractionDigits: 1 });
    const ending = totalOf ? `of ${shown(totalOf(now))}` : unit;
    draw(root, title, points, (number) => `${shown(number)} ${ending}`);
  };
}

function draw(root, title, points, format) {
  const known = points.filter((value) => value !== null);
  const most = Math.max(...known, 0);
  const x = (i) => ((i + MOST_POINTS - points.length) / (MOST_POINTS - 1)) * WIDTH;
  const y = (value) => HEIGHT - 3 - (most > 0 ? value / most : 0) * (HEIGHT - 6);
  const last = points.at(-1);
  // A value alone between two gaps is drawn as a short line.
  const piece = (value, i) => {
    if (value === null) return "";
    const alone = (points[i - 1] ?? null) === null && (points[i + 1] ?? null) === null;
    return `${(points[i - 1] ?? null) === null ? "M" : "L"}${x(i)} ${y(value)}${alone ? "h-2" : ""}`;
  };
  const now = last === null ? "–" : format(last);
  root.querySelector(".line").setAttribute("d", points.map(piece).join(""));
  root.querySelector(".now").textContent = now;
  root.querySelector(".most").textContent = known.length ? `most ${format(most)}` : "nothing yet";
  root.querySelector("svg").setAttribute("aria-label", `${title}, now ${now}, most ${known.length ? format(most) : "–"}`);
}
