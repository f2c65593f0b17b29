// One prompt to several models side by side.

import { ApiError, call } from "./api.js";
import { eventsOf } from "./sse.js";

const element = (id) => document.getElementById(id);
const columns = [];
let names = []; // of all models, the base first
let usual = []; // the same in the order in which columns take them
let running = null; // the AbortController of the answers that stream

/** Show the base and the adapters in all columns; what was chosen stays, if it is still there. */
export function setModels(base, adapters) {
  names = [base, ...adapters.map((one) => one.name)];
  // One with a chat template of its own was trained for other prompts than the first one here.
  const others = adapters.filter((one) => one.has_chat_template).map((one) => one.name);
  usual = [...names.filter((name) => !others.includes(name)), ...others];
  if (!running) showColumns();
}

/** `afterAnswers` is called when the answers to a prompt have ended. */
export function startCompare(afterAnswers) {
  element("num-columns").addEventListener("change", showColumns);
  showColumns();
  element("prompt-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    await askAll();
    afterAnswers();
  });
  element("stop").addEventListener("click", () => running?.abort());
  element("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.ctrlKey) element("prompt-form").requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !element("key-dialog").open) running?.abort();
  });
}

/** As many as are wanted, and as there are models: none is shown twice. */
function showColumns() {
  const wanted = Math.min(element("num-columns").value, names.length || 1);
  while (columns.length > wanted) columns.pop().root.remove();
  while (columns.length < wanted) {
    const root = element("column-template").content.cloneNode(true).firstElementChild;
    const part = (name) => root.querySelector(`.${name}`);
    const column = { root, model: part("model"), answer: part("answer"), ending: part("ending") };
    Object.assign(column, { firstToken: part("first-token"), speed: part("speed"), numTokens: part("num-tokens") });
    column.answer.setAttribute("aria-label", `Answer ${columns.length + 1}`);
    column.model.addEventListener("change", () => choose(column));
    columns.push(column);
    element("columns").append(root);
  }
  columns.forEach(fillColumn);
}

function fillColumn(column) {
  const options = [...column.model.options].map((option) => option.value);
  if (options.length === names.length && options.every((name, i) => name === names[i])) return;
  const chosen = column.chosen;
  column.model.replaceChildren(...names.map((name) => new Option(name, name)));
  const others = columns.filter((one) => one !== column).map((one) => one.chosen);
  setModel(column, names.includes(chosen) ? chosen : usual.find((name) => !others.includes(name)));
}

/** A model was chosen for a column: another one that showed it takes what this one showed. */
function choose(column) {
  const other = columns.find((one) => one !== column && one.chosen === column.model.value);
  if (other) setModel(other, column.chosen);
  setModel(column, column.model.value);
}

/** What a column shows goes with its model. */
function setModel(column, name) {
  column.model.value = name;
  if (column.chosen === name) return;
  column.chosen = name;
  column.answer.replaceChildren();
  show(column, "");
  showTimes(column, { first: null, numTokens: 0 });
}

async function askAll() {
  running = new AbortController();
  setRunning(true);
  try {
    await Promise.all(columns.map((column) => ask(column, running.signal)));
  } finally {
    running = null;
    setRunning(false);
    showColumns();
  }
}

function setRunning(is) {
  for (const control of [element("send"), element("num-columns"), ...columns.map((one) => one.model)]) control.disabled = is;
  element("stop").disabled = !is;
}

function requestFor(model) {
  const prompt = element("prompt").value;
  const isChat = element("kind").value === "chat";
  const body = {
    model,
    // All that the model writes is shown as it comes, thoughts too.
    ...(isChat ? { messages: [{ role: "user", content: prompt }], separate_reasoning: false } : { prompt }),
    max_tokens: Number(element("max-tokens").value),
    temperature: Number(element("temperature").value),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  return { path: isChat ? "v1/chat/completions" : "v1/completions", body };
}

async function ask(column, signal) {
  const text = document.createTextNode("");
  column.answer.replaceChildren(text);
  column.answer.setAttribute("aria-busy", "true");
  show(column, "Waiting …");
  const times = { started: performance.now(), first: null, last: null, numTokens: 0 };
  try {
    const reason = await stream(column, text, times, signal);
    show(column, `Ended: ${reason}, ${times.numTokens} tokens.`);
  } catch (error) {
    if (error.name === "AbortError") show(column, "Stopped.");
    else show(column, error.message, true);
  } finally {
    column.answer.setAttribute("aria-busy", "false");
  }
}

/** Adds to `text` and `times` what comes; the finish reason. */
async function stream(column, text, times, signal) {
  showTimes(column, times);
  const { path, body } = requestFor(column.model.value);
  const headers = { "Content-Type": "application/json" };
  const response = await call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  let reason = null;
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") return reason ?? "without a reason";
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    const choice = chunk.choices[0];
    text.appendData(choice?.delta?.content ?? choice?.text ?? "");
    reason = choice?.finish_reason ?? reason;
    count(times, chunk.usage?.completion_tokens ?? 0);
    showTimes(column, times);
  }
  throw new ApiError("The connection broke before the answer had ended.");
}

function count(times, numTokens) {
  if (numTokens <= times.numTokens) return;
  times.last = performance.now();
  if (times.first === null) Object.assign(times, { first: times.last, atFirst: numTokens });
  times.numTokens = numTokens;
}

function showTimes(column, times) {
  const seconds = (times.last - times.first) / 1000;
  const speed = (times.numTokens - times.atFirst) / seconds;
  column.firstToken.textContent = times.first === null ? "–" : `${Math.round(times.first - times.started)} ms`;
  column.speed.textContent = seconds > 0 ? `${speed.toFixed(1)} tokens/s` : "–";
  column.numTokens.textContent = times.numTokens || "–";
}

function show(column, sentence, isError = false) {
  column.ending.textContent = sentence;
  column.ending.classList.toggle("error", isError);
}
