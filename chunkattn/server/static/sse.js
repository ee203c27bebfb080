/** Server-sent events over fetch; EventSource cannot send a POST. */

/**
 * The data of each event as it comes. Reads may end anywhere: within an event, a line, or a character.
 * @param {ReadableStream<Uint8Array>} stream
 */
export async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return; // an event without its blank line is incomplete
      // A "\r" that ends what has come may be half of a "\r\n".
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        if (line !== "") continue; // comments and other fields mean nothing here
        if (data.length) yield data.join("\n");
        data = [];
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // an aborted stream cannot be cancelled, and need not be
  }
}
