// Joins the parts of the page.

import { refreshAdapters, startAdapters } from "./adapters.js";
import { askForKey, getJson } from "./api.js";
import { setModels, startCompare } from "./compare.js";
import { startPlots } from "./plots.js";

const LIST_EVERY_SECONDS = 10;
const WATCHED = ["adapters", "adapter_loads_total", "adapter_evictions_total", "all_requests_total"];

const server = document.getElementById("server");
let base = null;
let seen = "";
let listedAt = 0;

async function list(options) {
  listedAt = performance.now();
  await refreshAdapters(options);
}

/** Read the list again when something has changed it, but not all the time. */
function watch(metrics) {
  const changes = WATCHED.map((name) => metrics.get(name)).join();
  if (changes === seen || performance.now() - listedAt < LIST_EVERY_SECONDS * 1000) return;
  seen = changes;
  list({ quiet: true });
}

async function start() {
  try {
    const { version, model, dtype, device } = await getJson("version");
    base = model;
    server.textContent = [`${model}`, dtype, device && `on ${device}`, `version ${version}`].filter(Boolean).join(", ");
  } catch (error) {
    server.textContent = error.message;
  }
  startAdapters((adapters) => base !== null && setModels(base, adapters));
  startCompare(() => list({ quiet: true }));
  await list();
  startPlots(watch);
}

document.getElementById("change-key").addEventListener("click", async () => {
  if (await askForKey("Requests from this page are sent with this key.")) await list();
});
start();
