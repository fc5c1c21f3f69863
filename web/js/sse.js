/** Server-sent events of a fetch response: EventSource cannot POST. */

/** The events of `body` (a ReadableStream) as {event, data}; comments are passed over. */
export async function* serverEvents(body) {
  let buffer = "";
  for await (const text of decoded(body)) {
    buffer += text;
    const blocks = buffer.split(/\r?\n\r?\n/);
    buffer = blocks.pop();
    for (const block of blocks) {
      const found = parse(block);
      if (found) yield found;
    }
  }
}

async function* decoded(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    await reader.cancel().catch(() => {}); // it may have ended in an error, which has been thrown
  }
}

function parse(block) {
  const fields = { event: "message", data: [] };
  for (const line of block.split(/\r?\n/)) {
    const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line);
    if (name === "data") fields.data.push(value);
    else if (name === "event") fields.event = value;
  }
  return fields.data.length ? { event: fields.event, data: fields.data.join("\n") } : null;
}
