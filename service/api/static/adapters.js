// The adapters of the server: table, upload, load report, delete.

import { call, getJson, upload } from "./api.js";

const element = (id) => document.getElementById(id);
const MOST_ROWS = 200; // thousands of adapters are found by the filter, not by scrolling
const rows = new Map(); // name -> { row, cells }
let adapters = [];
let numLists = 0; // that were asked for, or are out of date
let dropped = []; // files that were dropped instead of chosen
let onList = () => {};

/** `listed` is called with the adapters whenever the list was read. */
export function startAdapters(listed) {
  onList = listed;
  element("filter").addEventListener("input", showAdapters);
  element("upload-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  element("files").addEventListener("change", () => take([]));
  element("adapter-name").addEventListener("input", sayChosen);
  const drop = element("drop");
  drop.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", async (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    take(await filesOf(event.dataTransfer));
  });
}

/** Read the list again. */
export async function refreshAdapters(options) {
  const number = ++numLists;
  try {
    const all = await listAll(options);
    if (number !== numLists) return; // a later one has begun
    adapters = all;
  } catch (error) {
    if (options?.quiet) return; // what was shown stays until there is news
    adapters = [];
    showAdapters();
    say("adapters-status", error.message, true);
    onList([]);
    return;
  }
  showAdapters();
  onList(adapters);
}

async function listAll(options) {
  const all = [];
  for (let page = { has_more: true, last_id: "" }; page.has_more; ) {
    page = await getJson(`v1/adapters?limit=1000&after=${encodeURIComponent(page.last_id)}`, options);
    all.push(...page.data);
  }
  return all;
}

// ---- the table

function showAdapters() {
  forgetWhatIsGone();
  const wanted = element("filter").value.toLowerCase();
  const found = adapters.filter((one) => one.name.toLowerCase().includes(wanted));
  const shown = found.slice(0, MOST_ROWS);
  const names = new Set(shown.map((one) => one.name));
  for (const name of rows.keys()) if (!names.has(name)) rows.delete(name);
  const body = element("adapters");
  const wantedRows = shown.map(rowOf);
  if (wantedRows.length !== body.rows.length || wantedRows.some((row, i) => row !== body.rows[i])) {
    const focused = body.contains(document.activeElement) ? document.activeElement : null;
    body.replaceChildren(...wantedRows);
    if (focused) (focused.isConnected ? focused : element("adapters-title")).focus();
  }
  const number = (count) => count.toLocaleString("en");
  const more = found.length > shown.length ? `; the first ${number(shown.length)} are shown, filter for others` : "";
  say("adapters-status", `${number(found.length)} of ${number(adapters.length)} adapters${more}.`);
}

/** What is said of an adapter goes when that does, or is another one. */
function forgetWhatIsGone() {
  const digests = new Map(adapters.map((one) => [one.name, one.digest]));
  const isGone = ({ dataset }) => dataset.name && digests.get(dataset.name) !== dataset.digest;
  if (isGone(element("report"))) element("report").hidden = true;
  if (isGone(element("upload-status"))) say("upload-status", "");
}

function rowOf(adapter) {
  let known = rows.get(adapter.name);
  if (!known) {
    const name = button(adapter.name, () => showAdapter(adapter.name), "link");
    name.title = "Show what it is bound to";
    const remove = button("Delete", () => removeAdapter(adapter.name));
    remove.setAttribute("aria-label", `Delete ${adapter.name}`);
    const cells = ["td", "td", "td", "td"].map((tag, i) => node(tag, "", i === 1 || i === 2 ? "number" : ""));
    const row = node("tr");
    const header = node("th");
    header.scope = "row";
    header.append(name);
    const last = node("td");
    last.append(remove);
    row.append(header, ...cells, last);
    known = { row, cells };
    rows.set(adapter.name, known);
  }
  const values = [adapter.state, adapter.rank, sizeOf(adapter.bytes), timeOf(adapter.last_used)];
  known.cells.forEach((cell, i) => {
    if (cell.textContent !== String(values[i])) cell.textContent = values[i];
  });
  return known.row;
}

async function showAdapter(name) {
  try {
    showReport(await getJson(`v1/adapters/${encodeURIComponent(name)}`));
  } catch (error) {
    say("adapters-status", error.message, true);
  }
}

async function removeAdapter(name) {
  if (!confirm(`Delete the adapter ${name}? Requests that use it now still finish.`)) return;
  try {
    await call(`v1/adapters/${encodeURIComponent(name)}`, { method: "DELETE" });
  } catch (error) {
    say("adapters-status", error.message, true);
    return;
  }
  await refreshAdapters();
}

// ---- upload

function take(files) {
  dropped = files;
  element("files").required = !files.length;
  if (files.length) element("files").value = "";
  sayChosen();
  const archive = chosen().find((file) => /\.(zip|tgz|tar\.gz)$/i.test(file.name));
  const field = element("adapter-name");
  if (!field.value) field.value = files.folder ?? archive?.name.replace(/\.(zip|tgz|tar\.gz)$/i, "") ?? "";
}

function sayChosen() {
  const names = (some) => some.map((file) => file.name).join(", ");
  const left = given().filter(isAside);
  const aside = left.length ? ` Left out: ${names(left)}.` : "";
  say("upload-status", given().length ? `To upload: ${names(chosen())}.${aside}` : "");
}

function given() {
  return dropped.length ? dropped : [...element("files").files];
}

/** What lies in every PEFT directory beside the adapter; the server refuses files that it does not know. */
function isAside(file) {
  return /\.md$/i.test(file.name) || file.name.startsWith(".");
}

function chosen() {
  return given().filter((file) => !isAside(file));
}

/** The files of a drop; of a folder those that lie in it directly, with its name as `folder`. */
async function filesOf(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  const folder = entries.find((entry) => entry.isDirectory);
  if (!folder) return [...transfer.files];
  const reader = folder.createReader();
  const inside = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) break;
    inside.push(...some.filter((entry) => entry.isFile));
  }
  const files = await Promise.all(inside.map((entry) => new Promise((done, fail) => entry.file(done, fail))));
  return Object.assign(files, { folder: folder.name });
}

async function send() {
  const name = element("adapter-name").value.trim();
  await refreshAdapters({ quiet: true });
  const there = adapters.find((one) => one.name === name);
  const question = `${name} is there, as version ${there?.version}. Replace it? Requests that use it now still finish.`;
  if (there && !confirm(question)) return;
  const form = new FormData();
  if (!there) form.append("name", name); // first, so that a bad name is refused before the files
  for (const file of chosen()) form.append("file", file, file.name); // known by their file names
  const path = there ? `v1/adapters/${encodeURIComponent(name)}` : "v1/adapters";
  const headers = there ? { "If-Match": `"${there.digest}"` } : {};
  const progress = element("progress");
  progress.hidden = false;
  progress.value = 0;
  element("upload").disabled = true;
  element("report").hidden = true;
  say("upload-status", "Uploading …");
  try {
    const report = await upload({ method: there ? "PUT" : "POST", path, headers, form }, (fraction) => {
      progress.value = fraction;
      if (fraction === 1) say("upload-status", "Sent; the server checks it …");
    });
    element("upload-form").reset();
    dropped = [];
    element("files").required = true;
    numLists += 1; // a list that was asked for before does not know of it
    say("upload-status", `${report.name} is loaded and can be used now.`, false, report);
    showReport(report);
    await refreshAdapters();
  } catch (error) {
    say("upload-status", error.message, true);
    if (error.problems) showTable("What does not fit", ["Name", "Reason"], error.problems.map((p) => [p.name, p.reason]));
  } finally {
    progress.hidden = true;
    element("upload").disabled = false;
  }
}

// ---- reports

function showReport(report) {
  const modules = report.modules.map((one) => [one.module, one.rank, Number(one.scaling.toPrecision(6)), one.bytes]);
  const title = `${report.name}: ${modules.length} modules, rank ${report.rank}, ${sizeOf(report.bytes)}`;
  showTable(title, ["Module", "Rank", "Scaling", "Bytes"], modules, report.notes, report);
}

function showTable(title, columns, lines, notes = [], adapter = null) {
  const isNumber = (value) => (typeof value === "number" ? "number" : "wide");
  const head = node("tr");
  columns.forEach((column, i) => head.append(node("th", column, lines.length ? isNumber(lines[0][i]) : "")));
  const table = node("table");
  table.createTHead().append(head);
  const body = table.createTBody();
  for (const line of lines) {
    const row = body.insertRow();
    for (const value of line) row.append(node("td", value.toLocaleString("en"), isNumber(value)));
  }
  const scroll = node("div", "", "scroll");
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", title);
  scroll.append(table);
  const report = element("report");
  report.replaceChildren(node("h3", title), ...notes.map((note) => node("p", note, "hint")), scroll);
  report.append(button("Close", () => (report.hidden = true)));
  isOf(report, adapter);
  report.hidden = false;
}

// ---- small things

function node(tag, text = "", style = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (style) made.className = style;
  return made;
}

function button(text, action, style = "") {
  const made = node("button", text, style);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

/** `adapter`: what it is about, see `forgetWhatIsGone`. */
function say(id, sentence, isError = false, adapter = null) {
  const place = element(id);
  isOf(place, adapter);
  if (place.textContent !== sentence) place.textContent = sentence;
  place.classList.toggle("error", isError);
}

function isOf(place, adapter) {
  Object.assign(place.dataset, { name: adapter?.name ?? "", digest: adapter?.digest ?? "" });
}

function sizeOf(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let power = 0;
  while (bytes >= 1024 && power < units.length - 1) {
    bytes /= 1024;
    power += 1;
  }
  return `${power ? bytes.toFixed(1) : bytes} ${units[power]}`;
}

function timeOf(unixSeconds) {
  if (unixSeconds === null) return "not yet";
  return new Date(unixSeconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
}
