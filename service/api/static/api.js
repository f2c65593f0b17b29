// Calls to the server that the page came from. All addresses are relative, so that a path prefix of a proxy stays.

let key = ""; // in memory only
let asking = null; // one question at a time, however many calls were refused

const element = (id) => document.getElementById(id);

/** What the server said, or the browser if there was no answer. `problems`: tensors of an upload that do not fit. */
export class ApiError extends Error {
  constructor(message, status = 0, problems = null) {
    super(message);
    this.status = status;
    this.problems = problems;
  }
}

/** The response, if it is no error. Where the server wants a key, asks for one and calls again, unless `quiet`. */
export async function call(path, { quiet = false, ...options } = {}) {
  for (;;) {
    const sent = key;
    const headers = { ...options.headers, ...authorization() };
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer.");
    }
    if (response.ok) return response;
    const error = errorOf(response.status, await response.text());
    if (response.status !== 401 || quiet) throw error;
    await newKey(sent, error);
  }
}

export async function getJson(path, options) {
  return (await call(path, options)).json();
}

/** Send a form and tell `onProgress` the fraction that is sent, which fetch cannot. */
export async function upload({ method, path, headers, form }, onProgress) {
  for (;;) {
    const sent = key;
    const { status, text } = await new Promise((resolve, reject) => {
      const request = new XMLHttpRequest();
      request.open(method, path);
      for (const [name, value] of Object.entries({ ...headers, ...authorization() })) request.setRequestHeader(name, value);
      request.upload.onprogress = (event) => event.lengthComputable && onProgress(event.loaded / event.total);
      request.onload = () => resolve({ status: request.status, text: request.responseText });
      request.onerror = () => reject(new ApiError("The connection broke before the server had answered."));
      request.send(form);
    });
    if (status >= 200 && status < 300) return JSON.parse(text);
    const error = errorOf(status, text);
    if (status !== 401) throw error;
    await newKey(sent, error);
  }
}

function authorization() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function errorOf(status, text) {
  try {
    const { message, problems } = JSON.parse(text).error;
    return new ApiError(message, status, problems ?? null);
  } catch {
    return new ApiError(`The answer has status ${status} and is not this server's; is there a proxy between?`, status);
  }
}

/** Returns once there is another key than `sent`; throws `error` if the user gives none. */
async function newKey(sent, error) {
  if (key !== sent) return; // given meanwhile
  asking ??= askForKey(error.message).finally(() => (asking = null));
  if (!(await asking)) throw error;
}

/** Shows the dialog. True if a key was given. */
export function askForKey(reason) {
  const dialog = element("key-dialog");
  const field = element("key");
  element("key-reason").textContent = reason;
  element("change-key").hidden = false;
  field.value = "";
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    element("key-form").onsubmit = (event) => {
      event.preventDefault();
      key = field.value.trim();
      dialog.close("given");
    };
    element("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => {
      field.value = "";
      resolve(dialog.returnValue === "given");
    };
  });
}
