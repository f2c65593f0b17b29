// Server-sent events, from bytes that may be cut anywhere.

export class EventReader {
  #decoder = new TextDecoder(); // keeps half a character until the rest comes
  #rest = "";
  #data = [];

  /** The data of each event that `bytes` complete. */
  push(bytes) {
    const text = this.#rest + this.#decoder.decode(bytes, { stream: true });
    // A carriage return at the end may be half of a line end.
    const end = text.endsWith("\r") ? text.length - 1 : text.length;
    const lines = text.slice(0, end).split(/\r\n|\n|\r/);
    this.#rest = lines.pop() + text.slice(end);
    const events = [];
    for (const line of lines) {
      if (line.startsWith("data:")) {
        this.#data.push(line.slice(5).replace(/^ /, ""));
      } else if (line === "" && this.#data.length) {
        events.push(this.#data.join("\n"));
        this.#data = [];
      }
    }
    return events;
  }
}

/** The data of each event of a response, as it comes. */
export async function* eventsOf(response) {
  const reader = response.body.getReader();
  const events = new EventReader();
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The connection broke before the answer had ended.");
    });
    if (done) return;
    yield* events.push(value);
  }
}
