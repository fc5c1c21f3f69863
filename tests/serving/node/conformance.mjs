// OpenAI's Node client against a Bishop server: pictures, streams, files, batches, errors.
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });

const models = await client.models.list();
assert.equal(models.data.length, 1);

const drawn = await client.images.generate({ prompt: "a red apple", n: 2, seed: 7 });
assert.equal(drawn.data.length, 2);
assert.equal(Buffer.from(drawn.data[0].b64_json, "base64").subarray(1, 4).toString(), "PNG");
assert.equal(drawn.usage.total_tokens, drawn.usage.input_tokens + drawn.usage.output_tokens);

const types = [];
const stream = await client.images.generate({ prompt: "a cat", stream: true, partial_images: 2 });
for await (const event of stream) types.push(event.type);
assert.deepEqual(types, [
  "image_generation.partial_image",
  "image_generation.partial_image",
  "image_generation.completed",
]);

await assert.rejects(client.images.generate({ prompt: "a", n: 99 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "n");
  return true;
});

const line = (id, body) =>
  JSON.stringify({ custom_id: id, method: "POST", url: "/v1/images/generations", body });
const text = [line("a", { prompt: "x", seed: 7 }), line("b", { prompt: "y", n: 99 })].join("\n");
const file = await client.files.create({
  file: await toFile(Buffer.from(text), "in.jsonl"),
  purpose: "batch",
});
assert.equal(await (await client.files.content(file.id)).text(), text);
let batch = await client.batches.create({
  input_file_id: file.id,
  endpoint: "/v1/images/generations",
  completion_window: "24h",
});
for (let k = 0; k < 300 && batch.status !== "completed"; k += 1) {
  await new Promise((resolve) => setTimeout(resolve, 100));
  batch = await client.batches.retrieve(batch.id);
}
assert.deepEqual(batch.request_counts, { total: 2, completed: 1, failed: 1 });
const output = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
assert.equal(output.custom_id, "a");
assert.equal(output.response.body.data[0].b64_json.length > 0, true);
const listed = [];
for await (const each of client.batches.list({ limit: 1 })) listed.push(each.id);
assert.deepEqual(listed, [batch.id]);
await assert.rejects(client.batches.cancel(batch.id), OpenAI.ConflictError);
assert.equal((await client.files.delete(file.id)).deleted, true);
await assert.rejects(client.files.retrieve(file.id), OpenAI.NotFoundError);
console.log("conformant");
