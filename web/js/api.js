/** The server's API, and its refusals as errors that name a field. */

import { serverEvents } from "./sse.js";

const KEY = "bishop-api-key";
let key = remembered();

/** A refusal: `param` names the field, `status` is the HTTP status (0: the server was not reached). */
export class ApiError extends Error {
  constructor(status, { message, param = null, code = null }) {
    super(message);
    Object.assign(this, { status, param, code });
  }
}

export function useKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // storage is switched off: the key lasts as long as the page
  }
}

function remembered() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : lost();
  }
  if (!response.ok) throw new ApiError(response.status, await refusal(response));
  return response;
}

function lost() {
  return new ApiError(0, { message: "The server cannot be reached. Is it still running?" });
}

async function refusal(response) {
  try {
    return (await response.json()).error;
  } catch {
    return { message: `The server answered ${response.status}.` };
  }
}

const posted = (body, signal) => ({
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

export const getJson = async (path) => (await request(path)).json();

export const readSet = async (body, signal) =>
  (await request("v1/bishop/read_set", posted(body, signal))).json();

/**
 * Draw one picture. Yields {type: "started", id}, then the stream's events with their pictures as
 * blobs. Throws ApiError, or AbortError when `signal` says stop.
 */
export async function* draw(body, signal) {
  const wanted = { ...body, stream: true, partial_images: 3, progress: true };
  const response = await request("v1/images/generations", posted(wanted, signal));
  yield { type: "started", id: response.headers.get("x-request-id") };
  try {
    for await (const { data } of serverEvents(response.body)) yield told(JSON.parse(data));
  } catch (error) {
    throw error instanceof TypeError ? lost() : error;
  }
}

function told(event) {
  if (event.type === "error") throw new ApiError(500, event.error);
  if (event.b64_json === undefined) return event;
  const { b64_json: text, ...rest } = event;
  return { ...rest, blob: blobOf(text, event.output_format) };
}

function blobOf(text, format) {
  const data = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Blob([data], { type: `image/${format}` });
}
