/** Server-sent events over fetch; EventSource cannot send a POST. */

/**
 * Yield the data of each event as it arrives. A read may end within an event, a line, or a character.
 * @param {ReadableStream<Uint8Array>} stream
 */
export async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return; // an event without its blank line is incomplete and dropped
      // A "\r" at the end of a read may be half of a "\r\n".
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        if (line !== "") continue; // skip comments and other fields
        if (data.length) yield data.join("\n");
        data = [];
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // cancelling an aborted stream fails, which is harmless
  }
}
